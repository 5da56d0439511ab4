"""The learning curves as a PNG. Matplotlib is drawn with directly, without pyplot and without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fxengine.session import TrainResult, Validation

_NEXT_BAR, _REGIME, _TOTAL = "tab:orange", "tab:blue", "tab:green"


def learning_curves(
    path: Path,
    curves: Mapping[str, Sequence[float]],
    validations: Sequence[Validation],
    result: TrainResult,
    *,
    title: str,
) -> None:
    """Draw losses, accuracies and learning rate over the steps.

    Args:
        path: PNG file to write.
        curves: `step`, `lr`, `loss`, `accuracy_nb`, `accuracy_regime` of every step; may be empty.
        validations: validations, with their steps.
        result: for the baselines.
        title: printed above.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1))
    loss, accuracy, rate = grid
    step = np.asarray(curves.get("step", ()), np.float64)
    at = [v.step for v in validations]

    _training(loss, step, curves.get("loss", ()), _TOTAL, "training batches")
    loss.plot(at, [v.loss for v in validations], "o--", color="black", markersize=4, label="validation")
    loss.set_ylabel("total loss")
    loss.legend(loc="upper right")

    for name, color, key, field, baseline in (
        ("regime", _REGIME, "accuracy_regime", "regime_accuracy", result.regime_baseline),
        ("next bar", _NEXT_BAR, "accuracy_nb", "next_bar_accuracy", result.next_bar_baseline),
    ):
        _training(accuracy, step, curves.get(key, ()), color, f"{name}, training batches")
        points = [getattr(v, field) for v in validations]
        accuracy.plot(at, points, "o", color=color, markeredgecolor="black", markersize=5, label=f"{name}, validation")
        accuracy.axhline(baseline, color=color, linestyle=":", label=f"{name}, majority class on validation")
    accuracy.set_ylabel("share of right rows")
    accuracy.set_ylim(0.0, 1.02)
    accuracy.legend(loc="lower right", ncols=2, fontsize="small")

    rate.plot(step, np.asarray(curves.get("lr", ()), np.float64), color="gray")
    rate.set_ylabel("lr")
    rate.set_xlabel("step")
    for axis in grid:
        axis.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _training(axis: Any, step: NDArray[np.float64], values: Sequence[float], color: str, label: str) -> None:
    """Every step faintly, and a centred mean over 2 % of them on top."""
    y = np.asarray(values, np.float64)
    window = max(1, len(y) // 50)
    axis.plot(step, y, color=color, alpha=0.2, linewidth=0.5)
    if len(y) >= window:
        smooth = np.convolve(y, np.full(window, 1.0 / window), mode="valid")
        axis.plot(step[window // 2 :][: len(smooth)], smooth, color=color, linewidth=1.8, label=label)
