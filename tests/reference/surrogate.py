"""The scalar whose complex-step derivative is the gradient of the step (docs/step.md, section 3).

The algorithm's gradient is no gradient of its losses: paths are stopped or scaled. With an imaginary step in
the parameters, `sg` drops the imaginary part and `scale_gradient` scales it while real parts stay as they are, so
the imaginary part of the losses' weighted sum is exactly what the rules let through, with no difference quotient.
What the losses regress to, the gate and the readiness are constants of the step.
"""

from __future__ import annotations

import numpy as np

from .config import Array, Config, Tree
from .forward import PathScales, online
from .gradients import Scene
from .losses import losses
from .step import State, next_gate, scene

TINY = 1e-100
HEAD_WEIGHTS = ("c51", "cql", "distill", "nb", "regime")


class Surrogate:
    """Losses of one step as functions of the parameters, real or complex."""

    def __init__(self, config: Config, state: State, batch: Tree) -> None:
        self.scene, _ = scene(config, state, batch)
        self.alpha = next_gate(self.scene, state).get("alpha_grad", 0.0)
        self.scales = path_scales(self.scene, self.alpha)

    def weighted(self, params: Tree) -> dict[str, Array]:
        """Every loss as it enters the total: w·L for head-level ones, L with scaled paths for the others."""
        s = self.scene
        values = losses(s.config, s.signals, s.batch, online(s.config, params, s.batch, self.scales), s.goal)
        named = {name.removeprefix("L_"): x for name, x in values.items()}
        return {name: s.signals[f"w_{name}"] * x if name in HEAD_WEIGHTS else x for name, x in named.items()}

    def total(self, params: Tree) -> Array:
        """Sum of all weighted losses."""
        return np.sum(list(self.weighted(params).values()))

    def derivative(self, direction: Tree) -> dict[str, float]:
        """Derivative of every weighted loss, and of the total, along a direction of some parameters."""
        moved = {name: self.scene.p[name] + 1j * TINY * x for name, x in direction.items()}
        found = {name: float(np.imag(x)) / TINY for name, x in self.weighted(self.scene.p | moved).items()}
        return found | {"total": sum(found.values())}

    def gradient(self, name: str) -> dict[str, Array]:
        """Gradient of every weighted loss, and of the total, with respect to one tensor, entry by entry."""
        shape = self.scene.p[name].shape
        entries: list[dict[str, float]] = []
        for i in range(int(np.prod(shape))):
            unit = np.zeros(shape)
            unit.flat[i] = 1.0
            entries.append(self.derivative({name: unit}))
        return {loss: np.reshape([e[loss] for e in entries], shape) for loss in entries[0]}


def path_scales(s: Scene, alpha: float) -> PathScales:
    """alpha_grad on the wire, w_iqn·readiness, w_ens, w_rec and w_pred on what these losses send into h2."""
    signals = s.signals
    return PathScales(
        wire=alpha,
        iqn=signals["w_iqn"] * s.readiness,
        ens=signals["w_ens"],
        rec=signals["w_rec"],
        pred=signals["w_pred"],
    )
