"""The learning curves as a PNG. Matplotlib is drawn with directly, without pyplot and without a display."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fxengine.health import Health
    from fxengine.session import TrainResult, Validation

_NEXT_BAR, _REGIME, _TOTAL = "tab:orange", "tab:blue", "tab:green"


#: Losses of the full model that have a panel of their own, each as a share of its first value.
_OTHERS = ("L_iqn", "L_cql", "L_ens", "L_rec", "L_pred", "L_curiosity", "L_iql_high", "L_iql_low")


def learning_curves(
    path: Path,
    curves: Mapping[str, Sequence[float]],
    validations: Sequence[Validation],
    result: TrainResult,
    *,
    title: str,
    health: Sequence[Health] = (),
) -> None:
    """Draw losses, accuracies and learning rate over the steps; of the full model also gate and gradient shares.

    Args:
        path: PNG file to write.
        curves: `step`, `lr`, `loss`, `accuracy_nb`, `accuracy_regime` of every step, and what the full model reports
            besides; may be empty.
        validations: validations, with their steps.
        result: for the baselines; tells whether the full model was trained.
        title: printed above.
        health: health reports of the full model.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    draw = [(_losses, 3), (_accuracies, 3), (_rate, 1)]
    if result.full is not None:
        draw[1:1] = [(_c51, 2), (_other_losses, 2)]
        draw[-1:-1] = [(_gate, 2), (_shares, 2)]
    figure = Figure(figsize=(10, 1.0 + 0.93 * sum(height for _, height in draw)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(draw), 1, sharex=True, height_ratios=[height for _, height in draw])
    panel = _Panel(curves, np.asarray(curves.get("step", ()), np.float64), validations, result, health)
    for axis, (function, _) in zip(grid, draw, strict=True):
        function(axis, panel)
        axis.grid(alpha=0.3)
    grid[-1].set_xlabel("step")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


@dataclass(frozen=True)
class _Panel:
    """What the panels draw."""

    curves: Mapping[str, Sequence[float]]
    step: NDArray[np.float64]
    validations: Sequence[Validation]
    result: TrainResult
    health: Sequence[Health]

    def curve(self, name: str) -> NDArray[np.float64]:
        """A curve over the steps; empty if there was no step."""
        return np.asarray(self.curves.get(name, ()), np.float64)

    @property
    def validated(self) -> list[int]:
        """Steps of the validations."""
        return [v.step for v in self.validations]


def _losses(axis: Any, p: _Panel) -> None:
    _training(axis, p.step, p.curve("loss"), _TOTAL, "training batches")
    axis.plot(p.validated, [v.loss for v in p.validations], "o--", color="black", markersize=4, label="validation")
    axis.set_ylabel("total loss")
    axis.legend(loc="upper right")


def _c51(axis: Any, p: _Panel) -> None:
    _training(axis, p.step, p.curve("L_c51"), "tab:purple", "training batches")
    losses = [math.nan if v.c51_loss is None else v.c51_loss for v in p.validations]
    axis.plot(p.validated, losses, "o--", color="black", markersize=4, label="validation")
    axis.set_ylabel("C51 loss")
    axis.legend(loc="upper right")


def _other_losses(axis: Any, p: _Panel) -> None:
    for at, name in enumerate(_OTHERS):
        y = p.curve(name)
        if len(y) and y[0] > 0.0:
            _training(axis, p.step, y / y[0], f"C{at}", name)
    axis.set_ylabel("loss / first loss")
    axis.set_ylim(bottom=0.0)
    axis.legend(loc="upper right", ncols=4, fontsize="small")


def _accuracies(axis: Any, p: _Panel) -> None:
    for name, color, key, field, baseline in (
        ("regime", _REGIME, "accuracy_regime", "regime_accuracy", p.result.regime_baseline),
        ("next bar", _NEXT_BAR, "accuracy_nb", "next_bar_accuracy", p.result.next_bar_baseline),
    ):
        _training(axis, p.step, p.curve(key), color, f"{name}, training batches")
        points = [getattr(v, field) for v in p.validations]
        axis.plot(
            p.validated, points, "o", color=color, markeredgecolor="black", markersize=5, label=f"{name}, validation"
        )
        axis.axhline(baseline, color=color, linestyle=":", label=f"{name}, majority class on validation")
    axis.set_ylabel("share of right rows")
    axis.set_ylim(0.0, 1.02)
    axis.legend(loc="lower right", ncols=2, fontsize="small")


def _gate(axis: Any, p: _Panel) -> None:
    opened = p.curve("gate_open")
    axis.fill_between(p.step, 0.0, opened, step="pre", color="gray", alpha=0.15, label="gate open")
    for name, label, color in (
        ("aux_acc_short", "next-bar accuracy, short average", _NEXT_BAR),
        ("alpha_grad", "alpha of the wire", "tab:green"),
        ("iqn_readiness", "IQN readiness", "tab:red"),
    ):
        axis.plot(p.step, p.curve(name), color=color, label=label)
    axis.set_ylabel("gate, readiness")
    axis.set_ylim(0.0, 1.02)
    axis.legend(loc="upper right", ncols=2, fontsize="small")


def _shares(axis: Any, p: _Panel) -> None:
    if p.health:
        names = list(p.health[0].shares)
        axis.stackplot(
            [h.step for h in p.health], [[h.shares[name] for h in p.health] for name in names], labels=names, alpha=0.8
        )
        axis.legend(loc="upper left", ncols=len(names), fontsize="small")
    axis.set_ylabel("share of trunk gradient")
    axis.set_ylim(0.0, 1.0)


def _rate(axis: Any, p: _Panel) -> None:
    axis.plot(p.step, p.curve("lr"), color="gray")
    axis.set_ylabel("lr")


def _training(axis: Any, step: NDArray[np.float64], y: NDArray[np.float64], color: str, label: str) -> None:
    """Every step faintly, and a centred mean over 2 % of them on top."""
    window = max(1, len(y) // 50)
    axis.plot(step, y, color=color, alpha=0.2, linewidth=0.5)
    if len(y) >= window:
        smooth = np.convolve(y, np.full(window, 1.0 / window), mode="valid")
        axis.plot(step[window // 2 :][: len(smooth)], smooth, color=color, linewidth=1.8, label=label)
