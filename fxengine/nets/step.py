"""The specified step (docs/step.md), component by component. What the configuration lacks leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fxengine.config import StepConfig
from fxengine.graphs import CONSTANTS, Tensor
from fxengine.nets import attention, aux, curiosity, decoders, dueling, iql, iqn, split, trunk
from fxengine.nets.builder import StepBuilder
from fxengine.nets.dueling import BranchedHeads
from fxengine.nets.encoder import fixed_features
from fxengine.nets.passes import Pass
from fxengine.nets.tape import Gradients
from fxengine.ops import c51, gate
from fxengine.ops import decoders as decoder_losses
from fxengine.ops import iqn as iqn_losses
from fxengine.ops.heads import Wire

#: Philox streams of the quantile fractions.
TAU_STREAM, TAU_TARGET_STREAM = 2, 3


@dataclass(frozen=True)
class Batch:
    """Inputs of a step [B, ...].

    Rows whose discount is 0 may hold anything at s'. They are zeros in next_ofi and, without attention, in next_state;
    attention and curiosity leave them out by themselves.
    """

    state: Tensor
    next_state: Tensor
    reward: Tensor
    discount: Tensor
    weight: Tensor
    actions: Tensor
    ofi: Tensor | None
    next_ofi: Tensor | None


def specified_step(step: StepBuilder, config: StepConfig) -> None:
    """Declare the step of a configuration.

    Inputs (float32 unless said): state, next_state [B, S], reward, discount, weight [B], actions [B, D] int32, with
    auxiliary nets nb_label, regime_label [B] int32, with IQN tau [B, N] and tau_target [B, N'], with order flow ofi and
    next_ofi [B, O]. A step of the auxiliary nets alone reads state, nb_label and regime_label.
    """
    if config.is_aux_only:
        _auxiliary_step(step, config)
        return
    step.signals.include("policy")
    _declare_groups(step, config)
    batch = _inputs(step, config)
    at_s = Pass(step, trained=step.train)
    after = Pass(step, ".next")
    target = Pass(step, ".target", target=True)

    # §2 at s: attention, trunk, auxiliary nets, heads
    fused = dueling.fuses(step, config)
    here = trunk.forward(at_s, config, attention.forward(at_s, config, batch.state))
    bars, wire = _wire(at_s, config, here.h1, fused)
    heads = dueling.forward(at_s, config, here.h2, wire=wire, ofi=batch.ofi, fused=fused)
    if bars is not None:
        _auxiliary_losses(step, config, bars)
    ensemble = decoders.forward(at_s, config, here.h2, ("ens",))

    # §2 at s': greedy actions of the online networks, values of the target networks, the same wire for both
    there = trunk.forward(after, config, attention.forward(after, config, batch.next_state, live=batch.discount))
    goal = trunk.forward(target, config, attention.forward(target, config, batch.next_state, live=batch.discount))
    _, wire = _wire(after, config, there.h1, fused)
    choice = dueling.forward(after, config, there.h2, wire=wire, ofi=batch.next_ofi, greedy=True, fused=fused)
    values = dueling.forward(target, config, goal.h2, wire=wire, ofi=batch.next_ofi, fused=fused)
    assert choice.best is not None

    # §2 reward, §3 losses
    live = step.program.tensor("live", (1,), np.int32)
    decoder_losses.count_live(step.program, batch.discount, live, label="live")
    reward = batch.reward
    if config.cur_h:
        reward = curiosity.shaped_reward(
            at_s, config, batch.state, batch.actions, batch.next_state,
            reward=batch.reward, discount=batch.discount, live=live,
        )  # fmt: skip
    transition = c51.Transition(batch.actions, choice.best, reward, batch.discount, batch.weight)
    theta = _quantile_losses(step, config, at_s, target, here.h2, goal.h2, transition) if config.iqn_quantiles else None
    # Behind the quantile networks, so that backward they come before: their part of h2's gradient is there early.
    decoded = {**decoders.forward(at_s, config, here.h2, ("rec", "pred")), **ensemble}
    _head_losses(step, config, heads, values, transition, theta)
    _decoder_losses(step, config, decoded, batch, goal.h2, values, transition, live)
    if config.iql_h:
        iql.losses(at_s, config, batch.state, heads.q, batch.actions)

    if step.train:
        _decomposition(step, config, heads, values, transition, theta, decoded)

    # §4 the gate, before the backward reads alpha_grad
    if config.aux_h and step.train:
        gate.produce(
            step.program, step.outputs["nb_logits"], step.inputs["nb_label"], heads.branch(0), signal=step.signal
        )
        step.mirror(gate.GATE_STATE)
    if config.iqn_quantiles:
        step.mirror(gate.READINESS_STATE)
    step.run_oracles(config.oracle_every)
    _outputs(step, here, heads, choice, values)


def acting_values(step: StepBuilder, config: StepConfig, state: Tensor, ofi: Tensor | None) -> Tensor:
    """Declare the online forward of a configuration alone; returns q [rows, Σn_d] of state [rows, S], ofi [rows, O].

    Groups that the step has already are used; the name of the state ends those of the tensors made here.
    """
    if "trunk" in step.absent_groups:
        _declare_groups(step, config)
    p = Pass(step, f".{state.name}")
    here = trunk.forward(p, config, attention.forward(p, config, state))
    wire = aux.wire(p, aux.forward(p, here.h1, regime=False)) if config.aux_h else None
    return dueling.forward(p, config, here.h2, wire=wire, ofi=ofi).q


def _auxiliary_step(step: StepBuilder, config: StepConfig) -> None:
    """The auxiliary nets on a fixed random feature map: no Q network, nothing that trains the first layer."""
    aux.declare(step, config)
    h1 = fixed_features(step, step.input("state", (config.batch, config.state)), config.h1)
    step.output("h1", h1)
    p = Pass(step, trained=step.train)
    bars = aux.forward(p, h1, regime=bool(config.regimes))
    _auxiliary_losses(step, config, bars)
    step.output("wire", aux.wire(p, bars))


def _wire(p: Pass, config: StepConfig, h1: Tensor, fused: bool) -> tuple[aux.AuxHeads | None, Tensor | Wire | None]:
    """The auxiliary nets at s or s' and the wire, which fused is made by the heads; at s it is an output."""
    if not config.aux_h:
        return None, None
    at_s = not p.suffix
    bars = aux.forward(p, h1, regime=at_s and bool(config.regimes), late=fused, wanted=at_s)
    wire = aux.late_wire(p, bars) if fused else aux.wire(p, bars)
    made = wire.wire if isinstance(wire, Wire) else wire
    if at_s and made is not None:
        p.step.output("wire", made)
    return bars, wire


def _auxiliary_losses(step: StepBuilder, config: StepConfig, bars: aux.AuxHeads) -> None:
    """L_nb and L_regime."""
    next_bar = step.input("nb_label", (config.batch,), np.int32)
    regime = step.input("regime_label", (config.batch,), np.int32) if config.regimes else None
    assert bars.next_bar is not None
    step.output("nb_logits", bars.next_bar)
    if bars.regime is not None:
        step.output("regime_logits", bars.regime)
    aux.losses(step, bars, next_bar, regime)


def _declare_groups(step: StepBuilder, config: StepConfig) -> None:
    trunk.declare(step, config)
    dueling.declare(step, config)
    if config.iqn_quantiles:
        iqn.declare(step, config)
    if config.iql_h:
        iql.declare(step, config)
    if config.tokens:
        attention.declare(step, config)
    if config.cur_h:
        curiosity.declare(step, config)
    if config.aux_h:
        aux.declare(step, config)
    decoders.declare(step, config)


def _inputs(step: StepBuilder, config: StepConfig) -> Batch:
    rows = config.batch
    state = step.input("state", (rows, config.state))
    reward, discount, weight = (step.input(name, (rows,)) for name in ("reward", "discount", "weight"))
    next_state = step.input("next_state", (rows, config.state), mask=None if config.tokens else discount)
    actions = step.input("actions", (rows, len(config.branches)), np.int32)
    ofi = next_ofi = None
    if config.has_ofi:
        ofi = step.input("ofi", (rows, config.ofi))
        next_ofi = step.input("next_ofi", (rows, config.ofi), mask=discount)
    return Batch(state, next_state, reward, discount, weight, actions, ofi, next_ofi)


def _head_losses(
    step: StepBuilder,
    config: StepConfig,
    heads: BranchedHeads,
    values: BranchedHeads,
    transition: c51.Transition,
    theta: Tensor | None,
) -> None:
    """L_c51, L_cql and L_distill, with their weights, into the heads; td [B] is the replay priority."""
    weights = {name: step.signal(f"w_{name}") if step.train else None for name in ("c51", "cql", "distill")}
    td = step.output("td", step.program.tensor("td", (config.batch,)))
    c51.losses(
        step.program,
        heads.heads,
        values.heads,
        transition,
        v_min=config.v_min,
        v_max=config.v_max,
        theta=theta,
        w_c51=weights["c51"],
        w_cql=weights["cql"],
        w_distill=weights["distill"] if theta else None,
        dv=step.loss_gradient(heads.v),
        dadv=[step.tape.training.output(adv) for adv in heads.heads.adv] if step.train else (),
        td=td,
        loss_c51=step.report("L_c51"),
        loss_cql=step.report("L_cql"),
        loss_distill=step.report("L_distill") if theta else None,
        name="c51",
    )


def _quantile_losses(
    step: StepBuilder,
    config: StepConfig,
    at_s: Pass,
    target: Pass,
    h2: Tensor,
    next_h2: Tensor,
    transition: c51.Transition,
) -> Tensor:
    """L_iqn and, at the end of the step, the readiness that follows from it; returns θ [B·N, Σn_d] at s."""
    tau = step.noise("tau", (config.batch, config.iqn_quantiles), stream=TAU_STREAM)
    tau_target = step.noise("tau_target", (config.batch, config.iqn_target_quantiles), stream=TAU_TARGET_STREAM)
    theta = iqn.forward(at_s, config, h2, tau)
    theta_target = iqn.forward(target, config, next_h2, tau_target)
    loss = step.report("L_iqn")
    iqn_losses.loss(
        step.program,
        theta,
        theta_target,
        tau,
        actions=transition.actions,
        best=transition.best,
        reward=transition.reward,
        discount=transition.discount,
        weight=transition.weight,
        branches=config.branches,
        kappa=config.huber,
        dtheta=step.loss_gradient(theta),
        loss=loss,
        name="iqn",
    )
    step.at_end(lambda: gate.update_readiness(step.program, loss, signal=step.signal))
    return step.output("theta", theta)


def _decoder_losses(
    step: StepBuilder,
    config: StepConfig,
    decoded: dict[str, Tensor],
    batch: Batch,
    next_h2: Tensor,
    values: BranchedHeads,
    transition: c51.Transition,
    live: Tensor,
) -> None:
    """L_rec, L_pred and L_ens of the heads that exist."""
    for name, y in decoded.items():
        dy, loss = step.loss_gradient(y), step.report(f"L_{name}")
        if name == "rec":
            decoder_losses.mean_squares(step.program, y, batch.state, dy=dy, loss=loss, name="rec.loss")
        elif name == "pred":
            decoder_losses.mean_squares(
                step.program, y, next_h2, discount=batch.discount, live=live, dy=dy, loss=loss, name="pred.loss"
            )
        else:
            decoder_losses.ensemble(
                step.program,
                y,
                heads=config.ens,
                action=transition.actions.columns(0, 1),
                best=transition.best.columns(0, 1),
                value=values.branch(0),
                reward=transition.reward,
                discount=transition.discount,
                weight=transition.weight,
                dy=dy,
                loss=loss,
                name="ens.loss",
            )


def _decomposition(
    step: StepBuilder,
    config: StepConfig,
    heads: BranchedHeads,
    values: BranchedHeads,
    transition: c51.Transition,
    theta: Tensor | None,
    decoded: dict[str, Tensor],
) -> None:
    """§7 in the decomposing variant of the step; the plain step only keeps the telemetry values free for it."""
    entries = split.declare(step)
    if not step.decompose:
        return
    one = step.program.tensor("one", (1,), arena=CONSTANTS, data=np.ones(1, np.float32))

    def head_loss(name: str, **weight: Tensor) -> Callable[[Gradients], None]:
        def write(gradients: Gradients) -> None:
            c51.losses(
                step.program,
                heads.heads,
                values.heads,
                transition,
                v_min=config.v_min,
                v_max=config.v_max,
                theta=theta,
                dv=gradients.output(heads.v),
                dadv=[gradients.output(adv) for adv in heads.heads.adv],
                name=f"split.{name}",
                **weight,
            )

        return write

    def append() -> None:
        parts = split.Split(step, config, entries)
        signal = step.signal
        parts.losses("c51", head_loss("c51", w_c51=one), {"c51_bs": None, "c51": signal("w_c51")})
        parts.losses("cql", head_loss("cql", w_cql=one), {"cql": None, "cql_sx": signal("w_cql")})
        if theta is not None:
            parts.losses("distill", head_loss("distill", w_distill=signal("w_distill")), {"distill": None})
            parts.head("iqn", theta)
        for name, y in decoded.items():
            parts.head(name, y)

    step.after_backward(append)


def _outputs(
    step: StepBuilder, here: trunk.Trunk, heads: BranchedHeads, choice: BranchedHeads, values: BranchedHeads
) -> None:
    """Names under which the host reads what the step computed at s and s'."""
    step.output("h1", here.h1)
    step.output("h2", here.h2)
    step.output("q", heads.q)
    step.output("q_next", choice.q)
    step.output("q_target", values.q)
    if choice.best is not None:
        step.output("best", choice.best)
