"""The specified step (docs/step.md) as an agent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fxengine.config import ConfigError, StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.step import acting_values, specified_step
from fxengine.rl.networks import check_state


@dataclass(frozen=True)
class FullAgent:
    """The whole specified step (docs/step.md); acts on the means of its dueling distributions.

    Attributes:
        config: sizes of the step; it has branches.
    """

    config: StepConfig

    def __post_init__(self) -> None:
        if not self.config.branches:
            raise ConfigError("FullAgent: config.branches = (): it must have branches, since an agent acts")

    @property
    def state(self) -> int:
        """Size S of a state."""
        return self.config.state

    @property
    def branches(self) -> tuple[int, ...]:
        """Actions n_d per branch."""
        return self.config.branches

    @property
    def batch(self) -> int:
        """Rows B of a training step."""
        return self.config.batch

    @property
    def groups(self) -> None:
        """Those of the specified step."""
        return None

    @property
    def extra(self) -> Mapping[str, int]:
        """Order flow, if the step reads any."""
        return {"ofi": self.config.ofi} if self.config.has_ofi else {}

    def train(self, step: StepBuilder) -> None:
        """Declare the training step; see `Agent`."""
        specified_step(step, self.config)

    def values(self, step: StepBuilder, state: Tensor, extra: Mapping[str, Tensor]) -> Tensor:
        """Declare the values to act on; see `Agent`."""
        check_state(state, self.state)
        missing = [name for name in self.extra if name not in extra]
        if missing:
            raise ConfigError(f"FullAgent: values of this configuration also read {missing}, got {sorted(extra)}")
        return acting_values(step, self.config, state, extra["ofi"] if self.extra else None)
