"""A forward model whose error is a bonus on the reward (docs/step.md §2)."""

from __future__ import annotations

from fxengine.config import StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.ops import values
from fxengine.train.groups import linear_specs


def declare(step: StepBuilder, config: StepConfig) -> None:
    """Group curiosity (7)."""
    inputs = config.state + sum(config.branches)
    step.group(
        "curiosity", [*linear_specs("c1", config.cur_h, inputs), *linear_specs("c2", config.state, config.cur_h)]
    )


def shaped_reward(
    p: Pass,
    config: StepConfig,
    state: Tensor,
    actions: Tensor,
    next_state: Tensor,
    *,
    reward: Tensor,
    discount: Tensor,
    live: Tensor,
) -> Tensor:
    """r [B] = reward + w_curiosity·live·min(sg(intr), curiosity_cap); adds L_curiosity."""
    onehots = p.step.onehots(actions, config.branches)
    hidden = p.linear((state, onehots), "c1", activation="relu", name="c1")
    prediction = p.linear(hidden, "c2", name="c2")
    shaped = p.tensor("shaped_reward", state.shape[0])
    values.curiosity(
        p.program,
        prediction,
        next_state,
        discount=discount,
        live=live,
        reward=reward,
        w_curiosity=p.step.signal("w_curiosity"),
        cap=p.step.signal("curiosity_cap"),
        shaped=shaped,
        dprediction=p.step.loss_gradient(prediction),
        loss=p.step.report("L_curiosity"),
        name="curiosity",
    )
    return shaped
