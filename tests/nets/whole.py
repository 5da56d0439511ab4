"""The whole step in small: an engine, the float64 reference's state and batch in it, and its results by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from fxengine import Engine, StepConfig
from fxengine.driver import Device
from fxengine.graphs import Tensor
from fxengine.ops.step import COUNTERS
from fxengine.signals import HOST_SLOTS
from fxengine.train.groups import ParamGroup
from tests.reference.config import Config, Tree
from tests.reference.step import State

#: Every component, H1 other than H2, branches of different action counts.
EVERYTHING = Config(
    batch=9, state=6, tokens=3, attn=3, ofi=2, ofi_embed=2, h1=7, h2=5, value_h=6, adv_h=6, branches=(3, 2, 4), atoms=7,
    v_min=-3.0, v_max=3.0, iqn_quantiles=3, iqn_target_quantiles=2, iqn_cos=4, iqn_h=4, ens=2, aux_h=5, aux_out=4,
    aux_head=3, regimes=3, iql_h=3, cur_h=3, huber=0.7,
)  # fmt: skip
#: C51 alone: one branch, nothing optional.
BARE = replace(
    EVERYTHING, tokens=0, ofi=0, branches=(4,), iqn_quantiles=0, ens=0, aux_h=0, iql_h=0, cur_h=0, rec=False, pred=False
)
#: Random inputs that the tests write instead of the device drawing them.
FEED = ("tau", "tau_target")


def step_config(config: Config) -> StepConfig:
    """The same sizes as the engine takes them."""
    return StepConfig(**asdict(config))


def make(device: Device, config: Config = EVERYTHING, **options: Any) -> Engine:
    """An engine of the configuration, fed by the tests."""
    return Engine(step_config(config), device=device, **{"feed": FEED, **options})


def snapshot(engine: Engine) -> Tree:
    """What `Engine.state` gives, and the gradients, read in few pieces: copies of whole groups, cut into parameters."""
    engine.synchronize()
    found: Tree = {}
    pieces = [(group, kind, t) for group in engine.builder.groups for kind, t in _buffers(group)]
    pieces += [(target.group, "target", target.values) for target in engine.builder.target_groups]
    for group, kind, tensor in pieces:
        flat = engine.plan.buffer(tensor).read()
        for p in group.parameters:
            found[f"{kind}.{p.name}"] = p.cut(flat)
    found |= {name: engine.plan.buffer(t).read() for name, t in engine.builder.spectral_vectors.items()}
    found["counters"] = engine.plan.buffer("counters").read().view(np.uint64)
    found["signals.device"] = engine.plan.buffer(engine.builder.snapshot).read()
    found["signals.device"][:HOST_SLOTS] = 0.0  # the host's own copy counts
    return found


def restore(engine: Engine, arrays: Mapping[str, Any]) -> None:
    """Put a snapshot back, all but the number of replays and the gradients."""
    engine.synchronize()
    pieces = [(group, kind, t) for group in engine.builder.groups for kind, t in _buffers(group) if kind != "grad"]
    pieces += [(target.group, "target", target.values) for target in engine.builder.target_groups]
    for group, kind, tensor in pieces:
        flat = np.zeros(tensor.shape, np.float32)
        for p in group.parameters:
            p.cut(flat)[...] = arrays[f"{kind}.{p.name}"]
        engine.plan.buffer(tensor).write(flat)
    for name, tensor in engine.builder.spectral_vectors.items():
        engine.plan.buffer(tensor).write(np.asarray(arrays[name], np.float32))
    counters = engine.plan.buffer("counters")
    now = counters.read().view(np.uint64)
    now[1:3] = arrays["counters"][1:3]
    counters.write(now.view(np.uint8))
    slots = np.asarray(arrays["signals.device"][HOST_SLOTS:], np.float32)
    engine.plan.buffer(engine.builder.snapshot).view(4 * HOST_SLOTS, slots.shape, slots.dtype).write(slots)


def _buffers(group: ParamGroup) -> list[tuple[str, Tensor]]:
    return [("param", group.params), ("m", group.m), ("v", group.v), ("grad", group.grads)]


def load(engine: Engine, state: State) -> None:
    """Put a state of the reference into the engine, with no step skipped so far."""
    arrays: Tree = {}
    for kind, part in (("param", "params"), ("m", "m"), ("v", "v"), ("target", "target")):
        arrays |= {f"{kind}.{name}": x for name, x in state[part].items()}
    arrays |= {f"sn_v_{name}": x for name, x in state["sn_v"].items()}
    slots = engine.plan.buffer(engine.builder.snapshot).read()
    for name, value in state["state"].items():
        slots[engine.builder.signals.slot(name).index] = value
    for slot, value in state["bounds"].items():
        slots[slot] = value
    counters = np.zeros(len(COUNTERS), np.uint64)
    counters[COUNTERS.index("step")] = state["step"]
    restore(engine, {**arrays, "counters": counters, "signals.device": slots})
    engine.signals.update(state["signals"])


def feed(engine: Engine, batch: Mapping[str, Any]) -> None:
    """Write a batch of the reference."""
    tensors = engine.builder.inputs
    assert set(tensors) == set(batch)
    engine.write(**{name: np.asarray(batch[name]).astype(t.dtype).reshape(t.shape) for name, t in tensors.items()})


def run(engine: Engine, batch: Mapping[str, Any] | None = None, *, decompose: bool = False) -> Tree:
    """One step, on this batch or on what the engine has; everything that came of it, named as by the reference."""
    if batch is not None:
        feed(engine, batch)
    engine.step(decompose=decompose)
    engine.synchronize()
    report = engine.telemetry()
    assert report is not None
    found: Tree = {name: np.asarray(value) for name, value in report.items()}
    if report.decomposition is not None:
        found["decomposition"] = report.decomposition
    arrays = snapshot(engine)
    found |= {name: a for name, a in arrays.items() if name not in ("signals.device", "counters")}
    found |= {name: engine.output(name) for name in engine.builder.outputs}
    slots = engine.builder.signals.slots.values()
    for slot in slots:
        if slot.device_owned:
            bound = slot.name.startswith("bound.")
            found[f"bound.{slot.index}" if bound else f"state.{slot.name}"] = arrays["signals.device"][slot.index]
    found["step"] = np.asarray(report.step)
    found["skipped"] = np.asarray(float(bool(report.nonfinite_groups)))
    return found


def in_groups(engine: Engine, *groups: str) -> list[str]:
    """Names of the parameters of these groups."""
    return [p.name for g in engine.builder.groups if g.name in groups for p in g.parameters]


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Names whose arrays differ in a bit."""
    assert set(before) == set(after)
    return {n for n in before if np.asarray(before[n]).tobytes() != np.asarray(after[n]).tobytes()}


def trained(arrays: Tree) -> Tree:
    """What training leaves behind, the counters and slots apart: parameters, moments, targets, spectral vectors."""
    return {n: x for n, x in arrays.items() if not n.startswith("grad.") and n not in ("counters", "signals.device")}


def shaped_like(found: Mapping[str, Any], reference: Mapping[str, Any]) -> Tree:
    """The results in the reference's shapes: a column may be a vector there, a count of one a scalar."""
    return {
        name: np.asarray(x).reshape(np.shape(reference[name])) if name in reference else np.asarray(x)
        for name, x in found.items()
    }
