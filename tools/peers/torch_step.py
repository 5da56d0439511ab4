"""The step in PyTorch: eager, captured as a CUDA graph, or compiled and captured.

    python -m tools.peers.torch_step --variant captured --device cuda --precision tf32 --check tests/golden/*.npz --time

eager: autograd, foreach and row-wise operations on one padded buffer for all groups. captured: the same in two CUDA
graphs, one with the oracles. compiled: the whole step (forward, backward, Adam, targets) is traced to one graph,
compiled by torch.compile, and captured; parameters are separate tensors, updated in foreach form. On a CPU nothing is
captured, the rest is the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._dynamo import lookup_backend
from torch.fx.experimental.proxy_tensor import make_fx

from tests.reference.config import Config, Tree
from tests.reference.step import State
from tools.peers.common import ORACLE_EVERY, groups_of, parser, run, small_outputs
from tools.peers.torch_losses import gradients
from tools.peers.torch_net import Net
from tools.peers.torch_train import (
    Rows,
    TorchState,
    gate_update,
    optimize,
    oracles,
    readiness_update,
)

VARIANTS = ("eager", "captured", "compiled")
#: What torch.compile hands a graph to. It is called without torch.compile, which would trace what is traced already.
COMPILER = lookup_backend("inductor")
Outputs = dict[str, Tensor]


class TorchStep:
    """State and step function of one configuration.

    Args:
        config: sizes.
        start: state to start from, with its signals.
        variant: one of `VARIANTS`.
        device: "cpu" or "cuda".
        dtype: of all floating-point values.
        complete: return everything that the golden files hold.
        fusing: write for a compiler (`Net`); default by variant.
    """

    def __init__(
        self,
        config: Config,
        start: State,
        variant: str,
        device: str,
        dtype: torch.dtype = torch.float32,
        *,
        complete: bool = False,
        fusing: bool | None = None,
    ) -> None:
        self.config, self.device, self.dtype, self.variant = config, device, dtype, variant
        self.state = TorchState(config, start, device, dtype)
        self.store = Rows(config, start, device, dtype)
        signals = start["signals"]
        fusing = variant == "compiled" if fusing is None else fusing
        self.net = Net(config, signals, self.state.t, fusing=fusing, complete=complete)
        self.clips = torch.tensor([signals[f"clip.{g}"] for g in groups_of(config)], dtype=dtype, device=device)

    def storage(self) -> list[Tensor]:
        """Every tensor that a step changes and the next one reads."""
        return [*self.store.tensors(), *self.state.small()]

    def step(self, batch: Mapping[str, Tensor]) -> Outputs:
        """One step in place, without oracles; leaves ĝ in `store.grad`."""
        net, s, views = self.net, self.state, self.store.views
        p = {name: x.detach().requires_grad_() for name, x in views["params"].items()}

        def gate(*seen: Tensor) -> Tensor:
            return gate_update(net, s, *seen)

        readiness = s.readiness[3].clone() if self.config.iqn_quantiles else None
        with torch.enable_grad():
            grads, out = gradients(net, p, views["target"], batch, readiness, gate)
        with torch.no_grad():
            out |= optimize(net, s, self.store, self.clips, grads)
            if self.config.iqn_quantiles:
                readiness_update(net, s, out["L_iqn"])
        return out | ({f"grad.{name}": g for name, g in grads.items()} if net.complete else {})

    @torch.no_grad()
    def oracles(self, ok: Tensor) -> None:
        """Bounds from params, moments and ĝ as the step left them."""
        oracles(self.net, self.state, self.store, ok)

    def compiled(self, example: Mapping[str, Tensor]) -> Callable[[Mapping[str, Tensor]], Outputs]:
        """`step` as one compiled graph; ĝ comes out of it as well."""
        names = list(example)
        keys: list[str] = []
        count = len(self.storage())

        def flat(*tensors: Tensor) -> list[Tensor]:
            self._adopt(tensors[:count])
            out = self.step(dict(zip(names, tensors[count:], strict=True)))
            keys[:] = list(out)
            # As copies: an output that is a view of a parameter would show its later values.
            return [*(out[k].detach().clone() for k in keys), self.store.grad]

        own, saved = self.storage(), [x.clone() for x in self.storage()]
        traced = make_fx(flat)(*own, *example.values())
        self._adopt(own)
        for x, y in zip(own, saved, strict=True):
            x.copy_(y)
        with torch.no_grad():
            function = COMPILER(traced, [*own, *example.values()])

        def call(batch: Mapping[str, Tensor]) -> Outputs:
            with torch.no_grad():
                *found, self.store.grad = function(*own, *(batch[name] for name in names))
            return dict(zip(keys, found, strict=True))

        return call

    def _adopt(self, tensors: Sequence[Tensor]) -> None:
        """Take these tensors for the storage (order of `storage`)."""
        count, s = len(self.store.tensors()), self.state
        self.store.adopt(tensors[:count])
        s.gate, s.readiness, s.bounds, s.t, s.skipped, *rest = tensors[count:]
        s.sn_v = dict(zip(s.sn_v, rest, strict=True))

    def function(self, example: Mapping[str, Tensor]) -> Callable[[Mapping[str, Tensor]], Outputs]:
        """The step function of the variant."""
        return self.compiled(example) if self.variant == "compiled" else self.step


class Captured:
    """A function and what follows every eighth call of it, each in a CUDA graph; state is as before afterwards."""

    def __init__(self, owner: TorchStep, body: Callable[[], Outputs]) -> None:
        saved = [x.clone() for x in owner.storage()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                owner.oracles(body()["ok"])
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph, self.graph_with_oracles = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = body()
        with torch.cuda.graph(self.graph_with_oracles, pool=self.graph.pool()):
            self.out_with_oracles = body()
            owner.oracles(self.out_with_oracles["ok"])
        for x, y in zip(owner.storage(), saved, strict=True):
            x.copy_(y)
        torch.cuda.synchronize()

    def replay(self, with_oracles: bool) -> Outputs:
        """One step."""
        (self.graph_with_oracles if with_oracles else self.graph).replay()
        return self.out_with_oracles if with_oracles else self.out


class TorchChecker:
    """Runs golden batches."""

    def __init__(
        self, config: Config, start: State, variant: str, device: str, dtype: torch.dtype, **options: Any
    ) -> None:
        self.owner = TorchStep(config, start, variant, device, dtype, complete=True, **options)
        self.captured: Captured | None = None
        self.static: dict[str, Tensor] = {}
        self.call: Callable[[Mapping[str, Tensor]], Outputs] | None = None

    def check_step(self, batch: Tree) -> dict[str, NDArray[Any]]:
        """One step, oracles included."""
        owner = self.owner
        given = {
            name: torch.from_numpy(x.astype(np.int64 if x.dtype.kind == "i" else np.float64))
            .to(owner.dtype if x.dtype.kind == "f" else torch.int64)
            .to(owner.device)
            for name, x in batch.items()
        }
        if self.call is None:
            self.static = given
            self.call = owner.function(given)
            if owner.variant != "eager" and owner.device == "cuda":
                call = self.call
                self.captured = Captured(owner, lambda: call(self.static))
        for name, x in given.items():
            self.static[name].copy_(x)
        if self.captured is not None:
            out = self.captured.replay(True)
        else:
            out = self.call(self.static)
            owner.oracles(out["ok"])
        return self._named(out)

    def _named(self, out: Outputs) -> dict[str, NDArray[Any]]:
        owner, arrays = self.owner, {name: x.detach().cpu().numpy() for name, x in out.items()}
        ok, s = bool(arrays.pop("ok")), owner.state
        norms, sigma = arrays.pop("norms"), arrays.pop("sigma")
        small = small_outputs(owner.config, s.gate.cpu(), s.readiness.cpu(), s.bounds.cpu(), norms if ok else None)
        arrays |= small | {"skipped": np.float64(not ok), "step": s.t.cpu().numpy()}
        arrays |= {f"sn_v_{name}": v.cpu().numpy().copy() for name, v in s.sn_v.items()}
        if ok:
            arrays |= {f"sigma_{name}": x for name, x in zip(s.sn_v, sigma, strict=True)}
        for part, prefix in (("params", "param"), ("m", "m"), ("v", "v"), ("target", "target")):
            views = owner.store.views[part]
            arrays |= {f"{prefix}.{name}": x.detach().cpu().numpy().copy() for name, x in views.items()}
        return arrays


class TorchTrainer:
    """Trains on resident data; batches are picked on the device, within the graph where there is one."""

    def __init__(
        self, config: Config, start: State, data: Mapping[str, NDArray[Any]], variant: str, device: str
    ) -> None:
        self.owner = TorchStep(config, start, variant, device)
        self.count = 0
        self.rows = len(data["state"])
        floats = ("next_state", "ofi", "next_ofi", "reward", "discount", "weight")
        self.state_rows = torch.from_numpy(data["state"]).to(device)
        # One gather for the rest: columns side by side, rows padded to 16 bytes.
        self.floats = _packed([(n, data[n]) for n in floats if n in data], np.float32, device)
        integers = ("actions", "nb_label", "regime_label")
        self.integers = _packed([(n, data[n]) for n in integers if n in data], np.int64, device)
        self.function = self.owner.function(self.sample())
        self.captured: Captured | None = None
        if variant != "eager" and device == "cuda":
            self.captured = Captured(self.owner, lambda: self.function(self.sample()))

    def sample(self) -> dict[str, Tensor]:
        """A random batch."""
        config, device = self.owner.config, self.owner.device
        index = torch.randint(self.rows, (config.batch,), device=device)
        batch = {"state": self.state_rows[index]}
        for table, columns in (self.floats, self.integers):
            picked = table[index]
            batch |= {name: picked[:, column] for name, column in columns.items()}
        if config.iqn_quantiles:
            counts = (config.iqn_quantiles, config.iqn_target_quantiles)
            tau = torch.rand(sum(counts) * config.batch, device=device)
            cut = counts[0] * config.batch
            batch |= {"tau": tau[:cut].view(-1, counts[0]), "tau_target": tau[cut:].view(-1, counts[1])}
        return batch

    def steps(self, count: int) -> None:
        """Start steps, oracles in every eighth."""
        for _ in range(count):
            self.count += 1
            due = self.count % ORACLE_EVERY == 0
            if self.captured is not None:
                self.captured.replay(due)
                continue
            out = self.function(self.sample())
            if due:
                self.owner.oracles(out["ok"])

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.owner.device == "cuda":
            torch.cuda.synchronize()

    def elapsed_us(self, count: int) -> float:
        """Between two events on the stream (on a CPU by the clock)."""
        if self.owner.device != "cuda":
            began = time.perf_counter()
            self.steps(count)
            return (time.perf_counter() - began) * 1e6
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.steps(count)
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3

    def skipped(self) -> int:
        """Skipped steps so far."""
        return int(self.owner.state.skipped)

    def launches(self) -> float:
        """Kernels, copies and fills per step on the device, oracles spread over their period, by the profiler."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            self.steps(ORACLE_EVERY)
            self.synchronize()
        on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return len(on_device) / ORACLE_EVERY


def _packed(arrays: list[tuple[str, NDArray[Any]]], dtype: Any, device: str) -> tuple[Tensor, dict[str, int | slice]]:
    """Arrays [rows] or [rows, n] side by side in one table, and the column or columns of each."""
    columns: dict[str, int | slice] = {}
    parts, at = [], 0
    for name, x in arrays:
        width = 1 if x.ndim == 1 else x.shape[1]
        columns[name] = at if x.ndim == 1 else slice(at, at + width)
        parts.append(x.reshape(len(x), width).astype(dtype))
        at += width
    parts.append(np.zeros((len(parts[0]), -at % 4), dtype))
    return torch.from_numpy(np.concatenate(parts, axis=1)).to(device), columns


def main(argv: list[str] | None = None) -> int:
    """Check and time PyTorch."""
    options = parser("The training step in PyTorch.", VARIANTS).parse_args(argv)
    if options.device == "cpu" and options.variant != "eager":
        print("note: on a CPU nothing is captured")
    torch.set_float32_matmul_precision("high" if options.precision == "tf32" else "highest")
    device, dtype = options.device, getattr(torch, options.dtype)

    def make(config: Config, start: State) -> TorchChecker:
        return TorchChecker(config, start, options.variant, device, dtype)

    def train(config: Config, start: State, data: Mapping[str, NDArray[Any]]) -> TorchTrainer:
        return TorchTrainer(config, start, data, options.variant, device)

    def memory() -> float | None:
        return round(torch.cuda.memory_reserved() / 2**20, 1) if device == "cuda" else None

    return run(options, f"torch-{options.variant}", make, train, memory)


if __name__ == "__main__":
    sys.exit(main())
