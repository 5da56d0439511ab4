"""Random resident data of the step: the same rows for this engine and its peers."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

#: Rows that batches are picked from.
DATA_ROWS = 8192


class Sizes(Protocol):
    """What the data needs of a configuration."""

    @property
    def state(self) -> int:
        """State size."""

    @property
    def ofi(self) -> int:
        """Order-flow inputs."""

    @property
    def has_ofi(self) -> bool:
        """Whether order flow is read."""

    @property
    def branches(self) -> tuple[int, ...]:
        """Actions per branch; none without a Q network."""

    @property
    def aux_h(self) -> int:
        """Width of the auxiliary nets, 0 without."""

    @property
    def regimes(self) -> int:
        """Regime classes."""


def random_rows(config: Sizes, rows: int = DATA_ROWS, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Normal states and rewards, one dead row in twenty, labels of every class and some masked ones. Never zeros.

    Quantile fractions are not among them: the step draws them.
    """
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return random.standard_normal(shape, dtype=np.float32)

    data: dict[str, NDArray[Any]] = {"state": normal(rows, config.state)}
    if config.aux_h:
        data["nb_label"] = random.integers(-1, 2, rows, dtype=np.int32)
        if config.regimes:
            data["regime_label"] = random.integers(-1, config.regimes, rows, dtype=np.int32)
    if not config.branches:
        return data
    data |= {
        "next_state": normal(rows, config.state),
        "reward": normal(rows),
        "discount": np.where(random.random(rows) < 0.05, 0.0, 0.97).astype(np.float32),
        "weight": random.uniform(0.5, 1.5, rows).astype(np.float32),
        "actions": np.stack([random.integers(0, n, rows, dtype=np.int32) for n in config.branches], axis=1),
    }
    if config.has_ofi:
        data |= {"ofi": normal(rows, config.ofi), "next_ofi": normal(rows, config.ofi)}
    return data
