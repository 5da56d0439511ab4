"""Health of the full step: where its gradients come from, the gate, the readiness, the bounds.

After `engine.step(decompose=True)` and `engine.synchronize()`, `Health.of(engine.telemetry())` tells them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine.signals import BOUND_FAMILIES
from fxengine.telemetry import Report

#: Rows of the gradient decomposition (docs/step.md §7).
COMPONENTS = ("iqn", "ens", "c51", "cql", "distill", "rec", "pred", "cql_sx", "c51_bs")
#: Its columns by the names under which they are logged: magnitude branch, direction branch, trunk.
GRADIENT_GROUPS = ("grad_split_bwd", "grad_split_aux", "grad_trunk")
#: Components whose vector sum is the trunk gradient: cql is raw and c51_bs before its scale, so they are left out.
MERGED = ("iqn", "ens", "c51", "distill", "rec", "pred", "cql_sx")
#: State of the gate and of the readiness, as telemetry names it.
GATE = ("gate_open", "alpha_grad", "aux_acc_short", "aux_acc_long", "aux_acc_var", "disagree_ema")
READINESS = ("iqn_readiness", "iqn_loss_ema", "iqn_loss_ref", "iqn_seen")
#: Telemetry values that belong into a health report and not into the log of every step.
DETAILS = ("split.", "decomposed", "bound.")


@dataclass(frozen=True, eq=False)
class Health:
    """One decomposed step.

    Attributes:
        step: its number, counted from 1.
        decomposition: float32 [9, 3], gradient norms of `COMPONENTS` over `GRADIENT_GROUPS`.
        gate: state of the gate; empty without auxiliary nets.
        readiness: state of the IQN readiness; empty without IQN.
        bounds: bound by group, for each oracle family; 0 where no oracle has run yet.
    """

    step: int
    decomposition: NDArray[np.float32]
    gate: Mapping[str, float]
    readiness: Mapping[str, float]
    bounds: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, report: Report) -> Health:
        """Health by the report of a decomposed step.

        Raises:
            ValueError: the step was not decomposed.
        """
        decomposition = report.decomposition
        if decomposition is None:
            raise ValueError(f"step {report.replay} was not decomposed; run it with step(decompose=True)")
        bounds = {}
        for family in BOUND_FAMILIES:
            start = f"bound.{family}."
            bounds[family] = {n.removeprefix(start): value for n, value in report.items() if n.startswith(start)}
        return cls(
            report.replay,
            decomposition,
            {name: report[name] for name in GATE if name in report},
            {name: report[name] for name in READINESS if name in report},
            bounds,
        )

    @property
    def shares(self) -> dict[str, float]:
        """Share of each merged component in the trunk gradient: its norm over the sum of norms; NaN if all are 0."""
        norms = dict(zip(COMPONENTS, self.decomposition[:, GRADIENT_GROUPS.index("grad_trunk")].tolist(), strict=True))
        total = sum(norms[name] for name in MERGED)
        return {name: norms[name] / total if total > 0.0 else math.nan for name in MERGED}

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the three gradient groups by component, gate, readiness, bounds, shares of the trunk."""
        groups = {
            group: dict(zip(COMPONENTS, column.tolist(), strict=True))
            for group, column in zip(GRADIENT_GROUPS, self.decomposition.T, strict=True)
        }
        return {
            **groups,
            "trunk_shares": self.shares,
            "gate": dict(self.gate),
            "readiness": dict(self.readiness),
            "bounds": {family: dict(values) for family, values in self.bounds.items()},
        }

    def __str__(self) -> str:
        """For people: a line for gate and readiness, one for each gradient group, one for the bounds."""
        lines = [", ".join(filter(None, (self._gate(), self._readiness())))]
        for group, column in zip(GRADIENT_GROUPS, self.decomposition.T, strict=True):
            norms = "  ".join(f"{name} {norm:.2g}" for name, norm in zip(COMPONENTS, column.tolist(), strict=True))
            lines.append(f"{group:<14}  {norms}")
        lines.append(self._bounds())
        return "\n".join(f"health {self.step:>6}: {line}" for line in lines)

    def _gate(self) -> str:
        if not self.gate:
            return "no gate"
        return (
            f"gate {'open' if self.gate['gate_open'] else 'closed'}, alpha {self.gate['alpha_grad']:.3f}, accuracy "
            f"{self.gate['aux_acc_short']:.3f} short {self.gate['aux_acc_long']:.3f} long, "
            f"disagreement {self.gate['disagree_ema']:.3f}"
        )

    def _readiness(self) -> str:
        if not self.readiness:
            return "no IQN"
        return (
            f"IQN readiness {self.readiness['iqn_readiness']:.3f}, loss {self.readiness['iqn_loss_ema']:.3g} of "
            f"{self.readiness['iqn_loss_ref']:.3g}, share of the trunk gradient {100.0 * self.shares['iqn']:.1f} %"
        )

    def _bounds(self) -> str:
        texts = []
        for family, values in self.bounds.items():
            known = [value for value in values.values() if value > 0.0]
            texts.append(f"{family} {min(known):.2g} to {max(known):.2g}" if known else f"{family} not known yet")
        return "bounds over the groups  " + ", ".join(texts)
