"""`fxengine trade`: bars in; agents that learnt to trade them, judged on later bars beside what needs no learning."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

from fxengine.cli.options import (
    add_choice,
    add_device,
    add_fields,
    add_json,
    documented,
    output_folder,
    plain,
    print_json,
    report_stream,
    require,
    require_free,
    table,
)

if TYPE_CHECKING:
    from fxengine.data import Dataset
    from fxengine.rl.trading import Account, TradeResult

_PICTURE, _REPORT = "trading.png", "report.json"
_COLORS = {"buy and hold": "black", "flat": "gray", "random": "tab:red"}


def add_parser(commands: Any) -> None:
    """Add the command to the subparsers."""
    from fxengine.rl.trading import AGENTS, LEAST_SEEDS, TradeSettings

    parser: argparse.ArgumentParser = commands.add_parser(
        "trade",
        help="let agents learn to trade price bars",
        description="Agents act, trade, remember and learn on the device without the host in between, on the training "
        "part of the bars; then each walks once through the later bars, greedily. Reports total return, annualised "
        f"Sharpe ratio, drawdown, turnover and trades over at least {LEAST_SEEDS} seeds, beside buy and hold, doing "
        "nothing and random actions on the same accounting, and says whether the agents beat them. On the simulated "
        f"device it is a demonstration with small networks and few updates. Writes {_PICTURE} and {_REPORT}.",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="CSV or Parquet file with time, open, high, low, close and, if there is one, volume "
        "(default: hourly EUR/USD bars of 2017, installed with fxengine[demo])",
    )
    add_device(parser)
    settings = parser.add_argument_group("training and costs")
    add_choice(settings, "agent", AGENTS, TradeSettings.agent, documented(TradeSettings)["agent"])
    add_fields(settings, TradeSettings)
    output = parser.add_argument_group("output")
    output.add_argument("--out", metavar="DIR", help="folder for the results (default: runs/trade-DATE-TIME)")
    output.add_argument("--overwrite", action="store_true", help="replace the results that DIR already holds")
    add_json(output)
    parser.set_defaults(command=_trade)


def _trade(arguments: argparse.Namespace) -> int:
    from fxengine.data import demo_bars, load_bars, make_dataset
    from fxengine.rl.trading import TradeSettings, trade

    out = report_stream(arguments.json)
    require("matplotlib", "trade (for the picture)")
    settings = TradeSettings(**{entry.name: getattr(arguments, entry.name) for entry in fields(TradeSettings)})
    dataset = make_dataset(load_bars(arguments.data) if arguments.data else demo_bars())
    folder = output_folder(arguments.out, prefix="trade-")
    require_free(folder, (_PICTURE, _REPORT), overwrite=arguments.overwrite)
    print(dataset.describe(), file=out)

    def show(seed: int, account: Account) -> None:
        print(f"seed {seed}: {account.performance}", file=out, flush=True)

    started = time.perf_counter()
    result = trade(dataset, settings, device=arguments.device, watch=show)
    report = _as_json(result, folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _REPORT).write_text(json.dumps(plain(report), indent=1, allow_nan=False) + "\n")
    _draw(folder / _PICTURE, result, dataset)
    _describe(result, time.perf_counter() - started, out)
    print(f"written to {folder}: {_PICTURE}, {_REPORT}", file=out)
    if arguments.json:
        sys.stderr.flush()
        print_json(report)
    return 0


# -- the report --------------------------------------------------------------------------------------------------


def _describe(result: TradeResult, seconds: float, out: TextIO) -> None:
    """The outcome for people."""
    plan, settings = result.plan, result.settings
    heads = ("return %", "Sharpe", "drawdown %", "turnover", "trades", "exposure")
    lines = [" " * 14 + "".join(f"{head:>16}" for head in heads)]
    for name in ("", *result.baselines):
        cells = "".join(f"{_cell(result, figure, name):>16}" for figure in _figures())
        lines.append(f"{name or 'agents':<14}{cells}")
    print("\n".join(lines), file=out)
    rows = {
        "agents": f"{settings.agent}, {settings.seeds} seeds (mean ± standard deviation), each {plan.updates} updates "
        f"of {plan.agent.batch} transitions and {plan.environments} environments on {result.device}",
        "costs": f"fee {settings.fee:g}, spread {settings.spread:g}, urgency {settings.urgency_cost:g} of the price",
        "speed": f"{result.steps_per_s:,.0f} steps of environments per second while learning; {seconds:.1f} s in all",
        **{f"against {name}": verdict for name, verdict in result.verdicts().items()},
        "luck": f"by the luck of these bars alone a Sharpe ratio has a standard error of about {result.luck:.2f}; the "
        "seeds share the bars and do not show it",
        "verdict": result.conclusion(),
    }
    if plan.demonstration:
        rows["note"] = (
            "a demonstration on the simulated device: small networks, few environments, few updates. It shows that "
            "the loop runs, not what such an agent can learn"
        )
    print(table(rows), file=out)


def _figures() -> tuple[str, ...]:
    from fxengine.rl.trading import FIGURES

    return FIGURES


def _cell(result: TradeResult, figure: str, baseline: str) -> str:
    spread = result.spread(figure, baseline)
    scale = 100.0 if figure in ("total_return", "max_drawdown") else 1.0
    digits = 0 if figure == "trades" else 1 if figure == "turnover" else 2
    sign = "+" if figure in ("total_return", "sharpe") else ""
    shown = f"{scale * spread.mean:{sign}.{digits}f}"
    single = bool(baseline) and len(result.baselines[baseline]) == 1
    return shown if single else f"{shown} ± {scale * spread.deviation:.{digits}f}"


def _as_json(result: TradeResult, folder: Path) -> dict[str, Any]:
    """The outcome as plain data."""
    from fxengine.rl.trading import COMPARED

    settings = {entry.name: getattr(result.settings, entry.name) for entry in fields(result.settings)}
    plan = {name: getattr(result.plan, name) for name in ("environments", "updates", "warmup", "demonstration")}
    return {
        **settings,
        **plan,
        "batch": result.plan.agent.batch,
        "device": result.device,
        "environment_steps_per_s": result.steps_per_s,
        "bars": len(result.bar_times),
        "first_bar": str(result.bar_times[0]),
        "last_bar": str(result.bar_times[-1]),
        "accounts": [vars(account.performance) for account in result.seeds],
        **{name: vars(result.spread(name)) for name in _figures()},
        "baselines": {of: {name: vars(result.spread(name, of)) for name in _figures()} for of in result.baselines},
        "verdicts": result.verdicts(),
        "beats": {of: {figure: result.beats(figure, of) for figure in COMPARED} for of in result.baselines},
        "sharpe_luck": result.luck,
        "conclusion": result.conclusion(),
        "out": str(folder),
    }


# -- the picture -------------------------------------------------------------------------------------------------


def _draw(path: Path, result: TradeResult, dataset: Dataset) -> None:
    """Equity of every account and the position of the agents, over the validation bars, as a PNG without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from fxengine.ops.market import TRACE

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])

    def rows(accounts: Any, name: str) -> NDArray[np.float64]:
        return np.stack([account.trace[:, TRACE.index(name)] for account in accounts], axis=1)

    time_axis = result.bar_times
    for name, accounts in result.baselines.items():
        single = len(accounts) == 1
        lines = above.plot(time_axis, rows(accounts, "equity"), color=_COLORS[name], alpha=1.0 if single else 0.25)
        lines[0].set_label(name)
    equity, position = rows(result.seeds, "equity"), rows(result.seeds, "position")
    above.plot(time_axis, equity, color="tab:blue", alpha=0.35, linewidth=0.9)
    above.plot(time_axis, equity.mean(axis=1), color="tab:blue", linewidth=2.0, label=f"{result.settings.agent}, mean")
    above.set_ylabel("equity")
    above.legend(loc="upper left", fontsize="small")
    below.plot(time_axis, position, color="tab:blue", alpha=0.15, linewidth=0.5, drawstyle="steps-post")
    below.plot(time_axis, position.mean(axis=1), color="tab:blue", linewidth=1.0, label="mean position of the agents")
    below.plot(time_axis, rows(result.baselines["buy and hold"], "position"), color="black", label="buy and hold")
    below.set_ylabel("position / equity")
    below.legend(loc="lower left", fontsize="small")
    for axis in (above, below):
        axis.grid(alpha=0.3)
    figure.suptitle(f"{dataset.source}: out of sample, {result.settings.seeds} seeds")
    figure.savefig(path, dpi=110)
