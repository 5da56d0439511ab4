"""Initial parameter values: a pure function of (seed, name, shape), so that adding a component moves no other."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray


def initial_value(name: str, shape: tuple[int, ...], seed: int, *, bound: float | None = None) -> NDArray[np.float32]:
    """Uniform ±1/√fan_in for matrices `[out, in]` (He et al. 2015 scaled as in common linear layers), 0 for vectors.

    `ln_g`, the gain of a layer norm, starts at 1. With a bound anything starts uniform in ±bound: a bias whose bound is
    1/√fan_in of its layer starts as in PyTorch.
    """
    if bound is None:
        if name == "ln_g":
            return np.ones(shape, np.float32)
        if len(shape) < 2:
            return np.zeros(shape, np.float32)
        bound = 1.0 / math.sqrt(shape[-1])
    return _generator(name, seed).uniform(-bound, bound, shape).astype(np.float32)


def unit_vector(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """A random direction of length 1: the start of a power iteration, which a zero vector would end for good."""
    v = _generator(name, seed).standard_normal(shape)
    return (v / np.linalg.norm(v)).astype(np.float32)


def _generator(name: str, seed: int) -> np.random.Generator:
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.Philox(key=np.array([seed, key], np.uint64)))
