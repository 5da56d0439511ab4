"""`fxengine verify`: golden files against a device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fxengine.cli.options import add_device, add_json, print_json, report_stream

if TYPE_CHECKING:
    from fxengine.verify import Outcome, Result


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="check a device against golden files",
        description="Run the steps of golden files and compare every result that this version computes with the "
        "float64 reference. Exit status 1 if a limit is exceeded. What was not checked is named, with the reason.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE.npz", help="golden files")
    add_device(parser)
    parser.add_argument("--precision", choices=("fp32",), default="fp32", help="precision to run in (default: fp32)")
    parser.add_argument("--all", action="store_true", help="print every array compared with its error")
    add_json(parser)
    parser.set_defaults(command=_verify)


def _verify(arguments: argparse.Namespace) -> int:
    from fxengine.driver import Device
    from fxengine.golden import GoldenFile
    from fxengine.verify import verify

    out = report_stream(arguments.json)
    for path in arguments.files:
        GoldenFile(path)  # a bad file is reported before the first one takes its time
    outcomes: list[Outcome] = []
    with Device.open(arguments.device) as device:
        for path in arguments.files:
            outcome = verify(path, device=device, precision=arguments.precision)
            outcomes.append(outcome)
            print(_describe(outcome, everything=arguments.all), file=out)
    name, worst = max(
        ((_name(outcomes, o, o.worst), o.worst) for o in outcomes if o.worst is not None),
        key=lambda entry: entry[1].ratio,
        default=("", None),
    )
    if worst is None:
        print("nothing was checked: this version computes no array that these files can judge", file=out)
    else:
        measure, value, limit = worst.binding
        print(f"worst: {name} {measure} {value:.3g} (limit {limit:g})", file=out)
    if arguments.json:
        sys.stderr.flush()
        print_json(_as_json(outcomes, name, worst))
    return 1 if any(o.failed for o in outcomes) else 0


def _as_json(outcomes: Sequence[Outcome], name: str, worst: Result | None) -> dict[str, Any]:
    """Lists of array names over all files (with the file in front if there are several), then file by file."""
    from fxengine.verify import worst_as_dict

    def names(of: str) -> list[str]:
        return [_prefix(outcomes, o) + n for o in outcomes for n in getattr(o, of)]

    return {
        "checked": names("checked"),
        "failed": names("failed"),
        "missing": names("missing"),
        "worst": worst_as_dict(worst, name),
        "device": outcomes[0].device,
        "precision": outcomes[0].precision,
        "files": [o.as_dict() for o in outcomes],
    }


def _prefix(outcomes: Sequence[Outcome], outcome: Outcome) -> str:
    return f"{outcome.path.name}:" if len(outcomes) > 1 else ""


def _name(outcomes: Sequence[Outcome], outcome: Outcome, result: Result | None) -> str:
    return _prefix(outcomes, outcome) + (result.name if result else "")


def _describe(outcome: Outcome, *, everything: bool) -> str:
    lines = [f"{outcome.path}: {outcome.precision} on {outcome.device}"]
    if everything:
        width = max((len(r.name) for r in outcome.results), default=0)
        lines += [f"  {_row(result, width)}" for result in outcome.results]
    failed = [r for r in outcome.results if r.failed]
    verdict = f"{len(failed)} beyond the limits" if failed else "all within the limits"
    lines.append(f"  checked {len(outcome.results)} arrays: {verdict}" if outcome.results else "  checked nothing")
    for result in failed:
        lines.append(f"  FAILED {_row(result, 0)}")
    for reason, names in outcome.by_reason().items():
        lines.append(f"  not checked, {len(names)} arrays: {reason}")
        lines += [f"    {line}" for line in _summary(names)]
    return "\n".join(lines)


def _row(result: Result, width: int) -> str:
    limits = result.limits
    text = f"{result.name:<{width}}  error {result.error:.2e} (limit {limits.error:g})"
    if result.update is not None:
        text += f", update {result.update:.2e} (limit {limits.update:g})"
    return text


def _summary(names: Sequence[str]) -> list[str]:
    """Names without repetition: steps together, kinds of array that cover the same tensors together."""
    steps: dict[str, set[str]] = {}
    for name in names:
        step, _, rest = name.partition(".out.")
        steps.setdefault(rest, set()).add(step)
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, seen in steps.items():
        kind, dot, tensor = name.partition(".")
        kinds.setdefault((",".join(sorted(seen)), kind + dot if dot else ""), []).append(tensor if dot else name)
    tensors: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (step, kind), members in kinds.items():
        tensors.setdefault((step, tuple(members)), []).append(kind)
    return [
        f"{step}: " + (f"{'|'.join(kind)}{{{' '.join(members)}}}" if kind != [""] else " ".join(members))
        for (step, members), kind in tensors.items()
    ]
