"""A small auxiliary engine and data for it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine import Engine, StepConfig
from fxengine.driver import Device

CONFIG = StepConfig.aux_only(batch=24, state=10, h1=20, aux_h=16, aux_out=12, aux_head=8, regimes=3)


def rows(n: int, *, state: int = 10, regimes: int = 3, seed: int = 0) -> dict[str, NDArray[Any]]:
    """n rows of inputs whose labels can be learnt from the state; some labels are masked."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, state)).astype(np.float32)
    masked = rng.random((2, n)) < 0.2
    return {
        "state": x,
        "nb_label": np.where(masked[0], -1, x[:, 0] + x[:, 1] > 0).astype(np.int32),
        "regime_label": np.where(masked[1], -1, np.digitize(x[:, 2], np.linspace(-1, 1, regimes - 1))).astype(np.int32),
    }


def make(device: Device, **options: Any) -> Engine:
    """The small engine, fed from 100 resident rows unless told otherwise."""
    return Engine(CONFIG, device=device, **{"data": rows(100), **options})
