"""Ceilings of a device, measured: the rate of one large matrix product and the bandwidth of a large copy.

`tools/bench_step.py --measure-floor` sets the step against them, instead of against what is known of an H200. Where
PyTorch is installed its product (cuBLAS) is measured as well, and the faster one counts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fxengine.driver import Arena, Buffer, Device, Stream
from fxengine.graphs import Plan, Program, node_times
from fxengine.graphs.floor import H200, Ceilings
from fxengine.ops import linear
from fxengine.ops.linear_tiles import served

#: Rows, columns and depth of the large product.
PRODUCT = (8192, 4096, 4096)
COPY_BYTES = 1 << 30
_REPEATS = 10


def own_rate(device: Device, stream: Stream, precision: str, sizes: tuple[int, int, int] = PRODUCT) -> float:
    """FLOP/s of the project's own forward product, with the tile that does best."""
    m, n, k = sizes
    best = 0.0
    for tile in served(device.target, precision, "forward"):
        program = Program(device.target, precision)
        x, w, y = (program.tensor(name, shape) for name, shape in (("x", (m, k)), ("w", (n, k)), ("y", (m, n))))
        linear.forward(program, x, w, None, y, tile=tile)
        with Plan(program, device) as plan:
            for tensor in (x, w):
                plan.buffer(tensor).write(np.random.default_rng(0).standard_normal(tensor.shape, dtype=np.float32))
            (us,) = node_times(plan, stream=stream, chain=2, repeats=3)
        best = max(best, 2e6 * m * n * k / us)
    return best


def torch_rate(precision: str, sizes: tuple[int, int, int] = PRODUCT) -> float | None:
    """FLOP/s of the same product in PyTorch; None where it is not installed or has no GPU."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    m, n, k = sizes
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x, w = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((m, k), (n, k)))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(_REPEATS):
        start.record()
        x @ w.t()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return 2e3 * m * n * k / min(times)


def copy_bandwidth(device: Device, stream: Stream, nbytes: int = COPY_BYTES) -> float:
    """Bytes/s of a copy on the device, read and written together."""
    with Arena(device, "copy", Arena.required((nbytes, nbytes))) as arena:
        source, target = (arena.place(name, (nbytes,), np.uint8) for name in ("source", "target"))
        source.fill_u32(1)
        best = min(_copy_ms(device, stream, source, target) for _ in range(_REPEATS))
    return 2e3 * nbytes / best


def _copy_ms(device: Device, stream: Stream, source: Buffer, target: Buffer) -> float:
    with device.event(timing=True) as start, device.event(timing=True) as stop:
        start.record(stream=stream)
        target.copy_from(source, stream=stream)
        stop.record(stream=stream)
        stop.synchronize()
        return float(stop.elapsed_ms(start))


def measure(device: Device, precision: str) -> Ceilings:
    """Ceilings of a GPU for steps of one precision; hand-off and launch are those of the H200's table.

    Raises:
        ValueError: the device is simulated.
    """
    if device.kind == "sim":
        raise ValueError("ceilings are measured on a GPU; the simulated device has none")
    with device.stream() as stream:
        rates = {mode: own_rate(device, stream, mode) for mode in dict.fromkeys(("fp32", precision))}
        bandwidth = copy_bandwidth(device, stream)
    rates[precision] = max(rates[precision], torch_rate(precision) or 0.0)
    return replace(H200, name=f"{device.name}, measured now", rates=rates, bandwidth=bandwidth)
