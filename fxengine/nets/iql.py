"""Two expectile value nets on the raw state (docs/step.md §3).

Their products are computed in float32 in every precision mode: they are small, and a batch is so thin a sample for them
that a single ReLU which rounding flips moves their gradient by a fifth.
"""

from __future__ import annotations

from fxengine.config import StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.ops import values
from fxengine.train.groups import linear_specs

SIDES = ("high", "low")


def declare(step: StepBuilder, config: StepConfig) -> None:
    """Groups iql_high (4) and iql_low (5)."""
    for side in SIDES:
        specs = [
            *linear_specs(f"iql{side}1", config.iql_h, config.state),
            *linear_specs(f"iql{side}2", 1, config.iql_h),
        ]
        step.group(f"iql_{side}", specs)


def losses(p: Pass, config: StepConfig, state: Tensor, q: Tensor, actions: Tensor) -> None:
    """L_iql_{high,low} of u = sg(mean_d q_d[a_d]) − V(s); q [B, Σn_d] gets no gradient."""
    for side in SIDES:
        hidden = p.linear(state, f"iql{side}1", activation="relu", precision="fp32", name=f"iql{side}1")
        v = p.linear(hidden, f"iql{side}2", precision="fp32", name=f"iql{side}2")
        values.expectile(
            p.program,
            v,
            q,
            actions,
            sizes=config.branches,
            tau=p.step.signal(f"iql_tau_{side}"),
            dv=p.step.loss_gradient(v),
            loss=p.step.report(f"L_iql_{side}"),
            name=f"iql_{side}",
        )
