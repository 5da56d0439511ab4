"""The whole step in small: an engine, the float64 reference's state and batch in it, and its results by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine import Engine, StepConfig
from fxengine.driver import Device
from fxengine.nets.builder import COUNTERS
from tests.reference.config import Config, Tree
from tests.reference.step import State

Arrays = dict[str, NDArray[Any]]

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


def engine_state(engine: Engine, state: State) -> Arrays:
    """A state of the reference as `Engine.load_state` takes it, with no step skipped so far."""
    arrays = engine.state()
    for kind, part in (("param", "params"), ("m", "m"), ("v", "v"), ("target", "target")):
        for name, values in state[part].items():
            arrays[f"{kind}.{name}"] = np.asarray(values, np.float32)
    for name, values in state["sn_v"].items():
        arrays[f"sn_v_{name}"] = np.asarray(values, np.float32)
    slots = arrays["signals.device"]
    for name, value in state["state"].items():
        slots[engine.builder.signals.slot(name).index] = value
    for slot, value in state["bounds"].items():
        slots[slot] = value
    arrays["counters"][COUNTERS.index("step")] = state["step"]
    arrays["counters"][COUNTERS.index("skipped")] = 0
    host = dict(zip(engine.builder.signals.host_names, arrays["signals.host"].tolist(), strict=True))
    arrays["signals.host"] = np.array(list({**host, **state["signals"]}.values()), np.float32)
    return arrays


def load(engine: Engine, state: State) -> None:
    """Put a state of the reference into the engine."""
    engine.load_state(engine_state(engine, state))


def feed(engine: Engine, batch: Mapping[str, Any]) -> None:
    """Write a batch of the reference."""
    tensors = engine.builder.inputs
    assert set(tensors) == set(batch)
    engine.write(**{name: np.asarray(batch[name]).astype(t.dtype).reshape(t.shape) for name, t in tensors.items()})


def run(engine: Engine, batch: Mapping[str, Any] | None = None) -> Tree:
    """One step, on this batch or on what the engine has; everything that came of it, named as by the reference."""
    if batch is not None:
        feed(engine, batch)
    engine.step()
    engine.synchronize()
    report = engine.telemetry()
    assert report is not None
    arrays = engine.state()
    found: Tree = {name: np.asarray(value) for name, value in report.items()}
    found |= {name: a for name, a in arrays.items() if not name.startswith(("signals.", "counters"))}
    found |= gradients(engine)
    found |= {name: engine.output(name) for name in engine.builder.outputs}
    slots = engine.builder.signals.slots.values()
    for slot in slots:
        if slot.device_owned:
            bound = slot.name.startswith("bound.")
            found[f"bound.{slot.index}" if bound else f"state.{slot.name}"] = arrays["signals.device"][slot.index]
    found["step"] = np.asarray(report.step)
    found["skipped"] = np.asarray(float(bool(report.nonfinite_groups)))
    return found


def gradients(engine: Engine) -> Tree:
    """The gradient of every parameter in the last step, as `grad.<name>`."""
    return {f"grad.{p.name}": engine.plan.buffer(p.grad).read() for p in engine.builder.groups.parameters}


def in_groups(engine: Engine, *groups: str) -> list[str]:
    """Names of the parameters of these groups."""
    return [p.name for g in engine.builder.groups if g.name in groups for p in g.parameters]


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """Names whose arrays differ in a bit."""
    assert set(before) == set(after)
    return {n for n in before if np.asarray(before[n]).tobytes() != np.asarray(after[n]).tobytes()}


def shaped_like(found: Mapping[str, Any], reference: Mapping[str, Any]) -> Tree:
    """The results in the reference's shapes: a column may be a vector there, a count of one a scalar."""
    return {
        name: np.asarray(x).reshape(np.shape(reference[name])) if name in reference else np.asarray(x)
        for name, x in found.items()
    }
