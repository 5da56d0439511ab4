"""Target networks: slowly moving copies of parameter groups (`targets.cu`).

Polyak averaging of a target network as in Lillicrap et al., "Continuous control with deep reinforcement learning"
(ICLR 2016). A step with polyak_tau 1 copies the network, as every so many steps in Mnih et al., "Human-level control
through deep reinforcement learning" (Nature 2015); a step with 0 leaves the copy as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.train.groups import ParamGroup

if TYPE_CHECKING:
    from fxengine.train.optimizer import Guard, SignalLookup

_TILE = 1024


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["length"]) // _TILE)


POLYAK = Family("polyak", "targets.cu", "fx_polyak", "Polyak", tiles=_tiles)


class TargetGroup:
    """The target copy of a parameter group: one buffer laid out like the group's, and never a gradient.

    `target["w_s1"]` is the copy of the parameter of that name. The padding moves along with the rest and belongs to
    nobody.

    Args:
        program: where the buffer `targets.<group>` is declared, in the arena `targets`.
        group: the group that it follows.
    """

    def __init__(self, program: Program, group: ParamGroup) -> None:
        self.group = group
        self.values = program.tensor(f"targets.{group.name}", (group.size,), arena="targets")
        self._views = {p.name: p.within(self.values) for p in group.parameters}

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


def polyak(
    program: Program,
    targets: Iterable[TargetGroup],
    *,
    signal: SignalLookup,
    guard: Guard,
    only: Collection[str] | None = None,
) -> None:
    """Append, in place: targets += polyak_tau (params - targets).

    To come last, after everything that changes the parameters. `optimize` moves the targets that nothing but Adam
    changes; these are the others. Nothing is written, bit for bit, while the guard's flag is set or polyak_tau is 0;
    with a polyak_tau of 1 the targets become the parameters, bit for bit.

    Args:
        program: program to append to.
        targets: the groups that have targets; they follow the parameters as the records before have left them.
        signal: must know `polyak_tau`.
        guard: what `optimize` returned.
        only: names of the parameters whose targets move; None moves whole groups.
    """
    tau = signal("polyak_tau")
    for target in targets:
        pairs = [(target.name, target.values, target.group.params)]
        if only is not None:
            params = target.group.params
            pairs = [
                (p.name, target.values.flat(p.offset, p.end), params.flat(p.offset, p.end))
                for p in target.group.parameters
                if p.name in only
            ]
        for name, copy, params in pairs:
            program.launch(
                POLYAK,
                {
                    "targets": copy,
                    "params": params,
                    "tau": tau,
                    "skip": guard.skip,
                    "length": params.size,
                },
                reads=[copy, params, tau, guard.skip],
                writes=[copy],
                label=f"polyak.{name}",
            )


def reference_polyak(target: ArrayLike, params: ArrayLike, tau: float) -> NDArray[np.float64]:
    """What `polyak` makes of one tensor, in float64."""
    old, new = np.asarray(target, np.float64), np.asarray(params, np.float64)
    return new.copy() if tau == 1.0 else old + tau * (new - old)
