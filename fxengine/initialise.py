"""Initial parameter values: a pure function of (seed, name, shape), so that adding a component moves no other."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray


def initial_value(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Uniform ±1/√fan_in for matrices `[out, in]` (He et al. 2015 scaled as in common linear layers), 0 for vectors.

    `ln_g`, the gain of a layer norm, starts at 1.
    """
    if name == "ln_g":
        return np.ones(shape, np.float32)
    if len(shape) < 2:
        return np.zeros(shape, np.float32)
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, key], np.uint64)))
    bound = 1.0 / math.sqrt(shape[-1])
    return generator.uniform(-bound, bound, shape).astype(np.float32)
