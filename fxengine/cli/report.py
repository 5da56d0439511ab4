"""The outcome of `fxengine train`: plain about what it shows, for people and as data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxengine.cli.options import table

if TYPE_CHECKING:
    from fxengine.data import Dataset
    from fxengine.graphs import Census
    from fxengine.session import TrainingSession, TrainResult


def as_json(session: TrainingSession, result: TrainResult, census: Census, folder: Path) -> dict[str, Any]:
    """The outcome of a run as plain data."""
    device = session.engine.device
    values = {
        "model": session.settings.model,
        "steps": result.steps,
        "interrupted": result.interrupted,
        "skipped": result.skipped,
        "loss_first": result.loss_first,
        "loss_last": result.loss_last,
        "validation_loss": result.validation.loss,
        "next_bar_accuracy": result.validation.next_bar_accuracy,
        "next_bar_baseline": result.next_bar_baseline,
        "next_bar_standard_error": result.next_bar_error,
        "regime_accuracy": result.validation.regime_accuracy,
        "regime_baseline": result.regime_baseline,
        "steps_per_s": result.steps_per_s,
        "device": device.label,
        "device_name": device.name,
        "batch": session.model.config.batch,
        "seed": session.settings.seed,
        "out": str(folder),
        "census": census.as_dict(),
    }
    if result.full is not None:
        values.update(vars(result.full))
        values["validation_loss_c51"] = result.validation.c51_loss
        values["sizes"] = session.settings.chosen_sizes(device.kind)
    return values


def describe(session: TrainingSession, result: TrainResult, census: Census, seconds: float) -> str:
    """The outcome of a run for people."""
    nodes = ", ".join(f"{count} {kind}" for kind, count in census.nodes.items())
    rows = {
        "steps": f"{result.steps} in {seconds:.1f} s with validations; {result.steps_per_s:,.1f} steps/s",
        "loss": f"{result.loss_first:.4f} at first, {result.loss_last:.4f} at last, "
        f"{result.validation.loss:.4f} on validation",
        "next bar": next_bar_verdict(result),
        "regime": _regime_verdict(session.dataset, result),
        **_full_rows(result),
        "graph": f"depth {census.depth}, {nodes} nodes, instantiated {_times(census.instantiations)}, "
        "one launch per step",
    }
    if result.skipped:
        rows["skipped"] = f"{result.skipped} steps made no update, because a gradient was not finite"
    return table(rows)


def _full_rows(result: TrainResult) -> dict[str, str]:
    """What the full model adds."""
    full = result.full
    if full is None:
        return {}
    validation = result.validation.c51_loss
    return {
        "C51 loss": f"{full.loss_c51_first:.4f} at first, {full.loss_c51_last:.4f} at last, "
        f"{validation if validation is not None else math.nan:.4f} on validation",
        "gate": f"open in {100.0 * full.gate_open_share:.0f} % of the steps, {full.gate_changes} changes",
        "IQN": f"readiness {full.iqn_readiness:.3f}; share of the trunk gradient "
        f"{100.0 * full.iqn_share_first:.1f} % at first, {100.0 * full.iqn_share_last:.1f} % at last",
    }


def next_bar_verdict(result: TrainResult) -> str:
    """In plain words; above the baseline counts only beyond two standard errors."""
    accuracy, baseline = result.validation.next_bar_accuracy, result.next_bar_baseline
    margin = 2.0 * result.next_bar_error
    verdict = f"above it by more than two standard errors (±{margin:.4f})"
    if accuracy <= baseline:
        verdict = "it does NOT beat the majority class"
    elif accuracy - baseline <= margin:
        verdict = f"above it by less than two standard errors (±{margin:.4f}): no evidence of skill"
    return f"{accuracy:.4f} right on validation, majority class {baseline:.4f}: {verdict}"


def _regime_verdict(dataset: Dataset, result: TrainResult) -> str:
    """The regime is no forecast: it measures bars that the state has seen."""
    accuracy, baseline = result.validation.regime_accuracy, result.regime_baseline
    verdict = "above it" if accuracy > baseline else "it does NOT beat the majority class"
    return (
        f"{accuracy:.4f} right on validation, majority class {baseline:.4f}: {verdict} "
        f"(no forecast: the volatility class of the last {dataset.volatility_window} bars)"
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
