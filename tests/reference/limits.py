"""The limits of the tf32 and bf16 modes (docs/step.md, section 10): relative L2, floor 1e-6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config import Array, Config, group_shapes
from .golden import same_specials

FORWARD = ("h1", "h2", "wire", "q", "theta", "q_target", "q_next", "td")
BEFORE_BEST = ("h1", "h2", "wire", "q", "theta", "q_target")
CLOSE_CALL = 1e-2


@dataclass(frozen=True)
class Limits:
    """One row of the table of limits."""

    forward: float
    grad_median: float
    grad_group: float
    grad_single: float
    norms: float
    m: float
    v: float
    spectral: float
    params: float


LIMITS = {
    "tf32": Limits(1e-2, 1e-2, 1e-1, 3e-1, 3e-2, 6e-2, 2e-2, 2e-3, 5e-3),
    "bf16": Limits(3e-2, 5e-2, 5e-1, 5e-1, 5e-1, 4e-1, 5e-2, 1e-2, 3e-2),
}


def relative_l2(actual: Any, reference: Any) -> float:
    """‖x − ref‖/max(‖ref‖, 1e-6) over the finite entries; inf where shapes or specials differ."""
    x, ref = np.asarray(actual, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    if x.shape != ref.shape or not same_specials(x, ref):
        return np.inf
    finite = np.isfinite(ref)
    return float(np.linalg.norm(x[finite] - ref[finite]) / max(np.linalg.norm(ref[finite]), 1e-6))


def limit_of(name: str, limits: Limits) -> float | None:
    """The limit of a single array; None for what is only reported (state, bounds) or judged otherwise."""
    if name in FORWARD or name.startswith("L_"):
        return limits.forward
    table = {
        "grad.": limits.grad_single,
        "grad_norm.": limits.norms,
        "decomposition": limits.norms,
        "m.": limits.m,
        "v.": limits.v,
        "sigma_": limits.spectral,
        "sn_v_": limits.spectral,
        "param.": limits.params,
        "target.": limits.params,
    }
    return next((x for prefix, x in table.items() if name.startswith(prefix)), None)


def best_differs(config: Config, outputs: Mapping[str, Any], reference: Mapping[str, Any]) -> tuple[Array, Array]:
    """Where `best` differs, and where the reference's two best q_next differ by more than 1e-2: [B, D]."""
    gaps = []
    for offset, n in zip(config.offsets, config.branches, strict=True):
        ordered = np.sort(reference["q_next"][:, offset : offset + n], axis=1)
        gaps.append(ordered[:, -1] - ordered[:, -2] if n > 1 else np.full(len(ordered), np.inf))
    return np.asarray(outputs["best"]) != reference["best"], np.stack(gaps, axis=1) > CLOSE_CALL


def gradient_faults(
    config: Config, outputs: Mapping[str, Any], reference: Mapping[str, Any], limits: Limits
) -> list[str]:
    """The median over the gradient arrays and every group's concatenated gradient."""
    errors, faults = [], []
    for group, names in group_shapes(config).items():
        errors += [relative_l2(outputs[f"grad.{n}"], reference[f"grad.{n}"]) for n in names]
        joined = [np.concatenate([np.ravel(side[f"grad.{n}"]) for n in names]) for side in (outputs, reference)]
        found = relative_l2(*joined)
        if not found <= limits.grad_group:
            faults.append(f"gradient of {group}: {found:.3g} > {limits.grad_group:g}")
    if not np.median(errors) <= limits.grad_median:
        faults.append(f"median over gradients: {np.median(errors):.3g} > {limits.grad_median:g}")
    return faults


def judge_step(
    mode: str, config: Config, outputs: Mapping[str, Any], reference: Mapping[str, Any]
) -> tuple[list[str], bool]:
    """Faults of one step in a mode, and whether later steps may be judged too."""
    limits = LIMITS[mode]
    differs, clear = best_differs(config, outputs, reference)
    faults = ["best differs where the reference is clear"] if np.any(differs & clear) else []
    names = BEFORE_BEST if differs.any() else tuple(reference)
    for name in (n for n in names if n in reference):
        limit = limit_of(name, limits)
        found = relative_l2(outputs[name], reference[name]) if limit is not None else 0.0
        if limit is not None and not found <= limit:
            faults.append(f"{name}: {found:.3g} > {limit:g}")
    if differs.any():
        return faults, False
    faults += [f"{n} differs" for n in ("skipped", "step") if int(outputs[n]) != int(reference[n])]
    return faults + gradient_faults(config, outputs, reference, limits), True


def judge(
    mode: str, config: Config, outputs: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Faults of consecutive steps in a mode ("tf32", "bf16"), each with its step; none where all limits hold."""
    found: list[str] = []
    for i, (out, ref) in enumerate(zip(outputs, references, strict=True)):
        faults, go_on = judge_step(mode, config, out, ref)
        found += [f"step {i}: {fault}" for fault in faults]
        if not go_on:
            break
    return found
