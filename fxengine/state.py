"""What an engine's run consists of: its first values, all that a resumed run needs, and its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fxengine import signals as signal_rows
from fxengine.initialise import initial_value, unit_vector

if TYPE_CHECKING:
    from fxengine.engine import Engine


def initialise(engine: Engine) -> None:
    """First values: parameters by name and seed, targets equal to them, everything else 0."""
    plan, builder = engine.plan, engine.builder
    for arena in ("params", "grads", "adam_m", "adam_v"):
        for group in builder.groups:
            plan.buffer(f"{arena}.{group.name}").fill_u32(0)
    plan.buffer(builder.snapshot).fill_u32(0)
    if builder.sampling is not None:
        for tensor in builder.sampling.stored.tensors:
            plan.buffer(tensor.name).fill_u32(0)
    engine._set_counters(np.array([0, 0, 0, engine.seed], np.uint64))
    bounds = {p.name: p.bound for p in builder.groups.parameters}
    for name, buffer in engine._parameter_buffers().items():
        engine._write(buffer, initial_value(name, buffer.shape, engine.seed, bound=bounds.get(name)))
    for target in builder.target_groups:
        plan.buffer(target.values).copy_from(plan.buffer(target.group.params), stream=engine.stream)
    for name, tensor in builder.spectral_vectors.items():
        engine._write(plan.buffer(tensor), unit_vector(name, tensor.shape, engine.seed))
    engine.synchronize()


def collect(engine: Engine) -> dict[str, NDArray[Any]]:
    """Parameters, moments, counters, signals and whatever else the step keeps, as host arrays."""
    plan, builder = engine.plan, engine.builder
    arrays = {f"param.{n}": engine.params[n] for n in engine.params}
    for p in builder.groups.parameters:
        arrays[f"m.{p.name}"] = engine._read(plan.buffer(p.m))
        arrays[f"v.{p.name}"] = engine._read(plan.buffer(p.v))
    for name, tensor in builder.persistent.items():
        arrays[name] = engine._read(plan.buffer(tensor))
    arrays["counters"] = engine._read(plan.buffer("counters")).view(np.uint64)
    arrays["signals.device"] = engine._read(plan.buffer(builder.snapshot))
    arrays["signals.device"][: signal_rows.HOST_SLOTS] = 0.0  # the host's, which signals.host has
    host = engine.signals.as_dict()
    arrays["signals.host"] = np.array([host[n] for n in builder.signals.host_names], np.float32)
    return arrays


def restore(engine: Engine, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Inverse of `collect`. Nothing is changed if an array is missing or has another shape.

    Raises:
        ValueError: names every array that is missing or does not fit.
    """
    plan, builder, expected = engine.plan, engine.builder, collect(engine)
    problems = [f"{n} is missing" for n in expected if n not in arrays]
    problems += [
        f"{n} is {arrays[n].dtype} {arrays[n].shape}, expected {a.dtype} {a.shape}"
        for n, a in expected.items()
        if n in arrays and (arrays[n].shape != a.shape or arrays[n].dtype != a.dtype)
    ]
    if problems:
        raise ValueError("the state does not belong to this step: " + "; ".join(problems))
    for name in engine.params:
        engine.params[name] = arrays[f"param.{name}"]
    for p in builder.groups.parameters:
        engine._write(plan.buffer(p.m), arrays[f"m.{p.name}"])
        engine._write(plan.buffer(p.v), arrays[f"v.{p.name}"])
    for name, tensor in builder.persistent.items():
        engine._write(plan.buffer(tensor), arrays[name])
    if builder.sampling is not None:
        engine.inserted = int(arrays[builder.sampling.stored.ring.counters.name][0])
    engine._set_counters(arrays["counters"])
    slots = arrays["signals.device"][signal_rows.HOST_SLOTS :]
    owned = plan.buffer(builder.snapshot).view(4 * signal_rows.HOST_SLOTS, slots.shape, slots.dtype)
    engine._write(owned, slots)
    engine.signals.update(dict(zip(builder.signals.host_names, map(float, arrays["signals.host"]), strict=True)))


def digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 over arrays and their names."""
    found = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        found.update(name.encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()
