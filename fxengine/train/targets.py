"""Target networks: slowly moving copies of parameter groups. `optimize` and `spectral_norm` move them.

Polyak averaging of a target network as in Lillicrap et al., "Continuous control with deep reinforcement learning"
(ICLR 2016). A step with polyak_tau 1 copies the network, as every so many steps in Mnih et al., "Human-level control
through deep reinforcement learning" (Nature 2015); a step with 0 leaves the copy as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Program, Tensor
from fxengine.train.groups import ParamGroup


class TargetGroup:
    """The target copy of a parameter group: one buffer laid out like the group's, and never a gradient.

    `target["w_s1"]` is the copy of the parameter of that name. The padding between tensors moves along with the rest
    and belongs to nobody.

    Args:
        program: where the buffer `targets.<group>` is declared, in the arena `targets`.
        group: the group that it follows.
    """

    def __init__(self, program: Program, group: ParamGroup) -> None:
        self.group = group
        self.values = program.tensor(f"targets.{group.name}", (group.size,), arena="targets")
        self._views = {
            p.name: self.values.flat(p.offset, p.offset + math.prod(p.shape)).reshape(*p.shape)
            for p in group.parameters
        }

    @property
    def name(self) -> str:
        """Name of the group."""
        return self.group.name

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._views[name]
        except KeyError:
            raise KeyError(f"no target of '{name}'; group '{self.name}' has {', '.join(self._views)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)


def reference_polyak(target: ArrayLike, params: ArrayLike, tau: float) -> NDArray[np.float64]:
    """target += tau (params - target) of one tensor, in float64."""
    old, new = np.asarray(target, np.float64), np.asarray(params, np.float64)
    return new.copy() if tau == 1.0 else old + tau * (new - old)
