"""First layer of the trunk: h1 = elu(lin(x; w_s1)).

In a step without a Q network nothing sends a gradient here (the auxiliary nets read sg(h1)), so the layer is a fixed
random feature map: declared as an untrained parameter, with no gradient, no moments and no optimizer record.
"""

from __future__ import annotations

from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.ops import linear


def fixed_features(step: StepBuilder, x: Tensor, width: int) -> Tensor:
    """h1 [B, width] of x [B, S] through untrained w_s1 [width, S] and b_s1 [width]."""
    batch, size = x.shape
    w = step.fixed("w_s1", (width, size))
    b = step.fixed("b_s1", (width,))
    h1 = step.program.tensor("h1", (batch, width), padded=True)
    linear.forward(step.program, x, w, b, h1, activation="elu", label="h1.fwd")
    return h1
