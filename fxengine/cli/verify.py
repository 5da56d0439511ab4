"""`fxengine verify`: golden files against a device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fxengine.cli.options import add_device, add_json, print_json, report_stream
from fxengine.ops.linear_tiles import PRECISIONS

if TYPE_CHECKING:
    from fxengine.verify import Outcome, Result


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify",
        help="check a device against golden files",
        description="Run the steps of golden files and compare every result with the float64 reference. Exit status 1 "
        "if a limit is exceeded. The last line is the array nearest to (or furthest beyond) its limit.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE.npz", help="golden files")
    add_device(parser)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="precision to run in (default: fp32)")
    parser.add_argument("--all", action="store_true", help="print every array with its error")
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
        print("nothing was checked: the files have no array that their step computes", file=out)
    else:
        measure, value, limit = worst.binding
        print(f"worst: {name} {measure} {value:.3g} ({_limit(limit)})", file=out)
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
        "unjudged": names("unjudged"),
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
    compared = (*outcome.results, *outcome.summaries)
    if everything:
        width = max((len(r.name) for r in compared), default=0)
        lines += [f"  {_row(result, width)}" for result in compared]
    failed = [r for r in compared if r.failed]
    verdict = f"{len(failed)} beyond the limits" if failed else "all within the limits"
    if outcome.unjudged:
        verdict += f"; {len(outcome.unjudged)} of them reported, not judged"
    lines.append(f"  checked {len(outcome.results)} arrays: {verdict}")
    lines += [f"  FAILED {_row(result)}" for result in failed]
    lines += [f"  NOT CHECKED {name}: {reason}" for name, reason in outcome.missing.items()]
    return "\n".join(lines)


def _row(result: Result, width: int = 0) -> str:
    text = f"{result.name:<{width}}  error {result.error:.2e} ({_limit(result.limit)})"
    if result.update is not None:
        text += f", update {result.update:.2e} ({_limit(result.update_limit)})"
    return text


def _limit(limit: float | None) -> str:
    return "not judged" if limit is None else f"limit {limit:g}"
