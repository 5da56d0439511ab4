"""Sizes and parameters of the fused quantile networks (`iqn_fused`), and what their kernels have room for."""

from __future__ import annotations

from dataclasses import dataclass

from fxengine.graphs import Tensor

#: Most cosines and most hidden numbers that the kernels have room for.
MAX_COSINES = 64
MAX_WIDTH = 128

#: Columns of h2 that a block of the backward owns, and outputs whose weights it has in shared memory.
BACKWARD_COLUMNS = 128
BACKWARD_OUTPUTS = 16

#: Shared memory that the kernels declare themselves.
STATIC = 256


@dataclass(frozen=True)
class Sizes:
    """Sizes of a quantile network.

    Attributes:
        cosines: features of a fraction, M.
        features: features of the state, H2.
        width: hidden numbers, I.
        outputs: actions of all branches.
    """

    cosines: int
    features: int
    width: int
    outputs: int


@dataclass(frozen=True)
class Weights:
    """Float32 parameters: w_phi [H2, M], b_phi [H2], w_iq1 [I, H2], b_iq1 [I], w_iq2 [A, I], b_iq2 [A]."""

    w_phi: Tensor
    b_phi: Tensor
    w_iq1: Tensor
    b_iq1: Tensor
    w_iq2: Tensor
    b_iq2: Tensor

    @property
    def sizes(self) -> Sizes:
        """The sizes that the parameters speak of."""
        return Sizes(self.w_phi.shape[1], self.w_phi.shape[0], self.w_iq1.shape[0], self.w_iq2.shape[0])


def extents(sizes: Sizes) -> dict[str, int]:
    """The fields of a record that are sizes."""
    return {
        "cosines": sizes.cosines,
        "features": sizes.features,
        "width": sizes.width,
        "outputs": sizes.outputs,
    }
