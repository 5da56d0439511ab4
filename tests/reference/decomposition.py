"""Gradient decomposition (docs/step.md, section 7)."""

from __future__ import annotations

import numpy as np

from .config import COMPONENTS, Array, Config, Tree, group_shapes
from .gradients import Component


def slices(config: Config) -> list[list[str]]:
    """Tensors of the three columns: magnitude branch (1), direction branch (0), trunk."""
    names = [[f"{kind}_b{d}{layer}" for layer in ("fc", "out") for kind in ("w", "b")] for d in (1, 0)]
    if len(config.branches) < 2:
        names[0] = []
    return [*names, list(group_shapes(config)["trunk"])]


def norm(grads: Tree, names: list[str]) -> float:
    """L2 norm over the tensors that the component has of a slice."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(sum(np.sum(grads[name] ** 2) for name in names if name in grads)))


def decomposition(config: Config, components: dict[str, Component]) -> Array:
    """The 9×3 norms: merged, except cql (raw; merged it is cql_sx) and c51_bs (c51 before its scale)."""
    trees = {name: c.merged() for name, c in components.items()}
    trees["cql_sx"] = trees["cql"]
    trees["cql"], trees["c51_bs"] = components["cql"].shared, components["c51"].shared
    return np.array([[norm(trees.get(row, {}), names) for names in slices(config)] for row in COMPONENTS])
