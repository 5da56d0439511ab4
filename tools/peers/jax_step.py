"""The step in JAX, compiled ahead of time, with donated state.

    python -m tools.peers.jax_step --variant scan --device cuda --precision tf32 --check tests/golden/*.npz --time

step: a call runs one step; after every eighth, another runs the oracles. scan: a call runs eight steps in a loop on the
device and then the oracles, which spreads the host's cost of a call over all of them.

Everything that a step changes, results included, is donated, so that no buffer moves: XLA records the step as a CUDA
graph, and would write every node of it anew at each call if buffers did.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed
# Memory as it is needed, as in the other peers, so that several fit on one device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from tests.reference.config import GATE_NAMES, READINESS_NAMES, Config
from tests.reference.config import Tree as Arrays
from tests.reference.step import State
from tools.peers.common import ORACLE_EVERY, bound_table, parser, run, small_outputs
from tools.peers.jax_layout import ROW, Array, Layout
from tools.peers.jax_losses import gradients
from tools.peers.jax_net import Net, Tree
from tools.peers.jax_train import Optimizer, gate_update, readiness_update

VARIANTS = ("step", "scan")
#: Not "tensorfloat32" for tf32: XLA's own products would then be in float32, only those of cuBLAS in tf32.
MATMUL = {"fp32": "highest", "tf32": "default"}


class JaxStep:
    """Step function and start of one configuration.

    Args:
        config: sizes.
        start: state to start from, with its signals.
        dtype: of all floating-point values.
        precision: of matrix products, as `jax.default_matmul_precision` names it.
    """

    def __init__(self, config: Config, start: State, dtype: Any, precision: str) -> None:
        self.config, self.dtype, self.precision = config, dtype, precision
        self.layout = Layout(config)
        self.net = Net(config, self.layout, start["signals"])
        self.optimizer = Optimizer(config, self.net, self.layout)
        self.start = start

    def state(self) -> Tree:
        """The start on the device; every array is a buffer of its own, so that each can be donated."""
        start, layout = self.start, self.layout
        fc = layout.slabs["w_fc"]
        sn_v = np.zeros((fc.shape[0], fc.shape[2]))
        for d, vector in enumerate(start["sn_v"].values()):
            sn_v[d, : len(vector)] = vector
        made = {part: layout.pack(start[part]) for part in ("params", "m", "v", "target")}
        made |= {
            "sn_v": sn_v,
            "gate": np.array([start["state"].get(name, 0.0) for name in GATE_NAMES]),
            "readiness": np.array([start["state"].get(name, 0.0) for name in READINESS_NAMES]),
            "bounds": bound_table(self.config, start),
            "t": np.array(float(start["step"])),
            "skipped": np.array(0.0),
            "grad": np.zeros((layout.rows, ROW)),
        }
        return {name: jnp.array(x, dtype=self.dtype) for name, x in made.items()} | {"ok": jnp.array(True)}

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, Tree, Tree]:
        """One step without oracles: the new state, outputs, and gradients by slab."""
        with jax.default_matmul_precision(self.precision):
            net, optimizer = self.net, self.optimizer
            planes, once = net.parameters(state["params"], state["target"])

            def gate(nb: Array, labels: Array, q: Array) -> tuple[Array, Array]:
                new = gate_update(net, state["gate"], nb, labels, q)
                return new, new[6]

            readiness = state["readiness"][3] if self.config.iqn_quantiles else None
            grads, out, new_gate = gradients(net, planes, once, batch, readiness, gate)
            new, more = optimizer.apply(state, grads)
            if new_gate is not None:
                new["gate"] = new_gate
            if self.config.iqn_quantiles:
                new["readiness"] = readiness_update(net, state["readiness"], out["L_iqn"])
            return new, out | more, grads


class JaxChecker:
    """Runs golden batches."""

    def __init__(self, config: Config, start: State, dtype: Any, precision: str) -> None:
        self.owner, self.dtype = JaxStep(config, start, dtype, precision), dtype
        self.state = self.owner.state()
        self.step = jax.jit(self.owner.step, donate_argnums=0)
        self.oracles = jax.jit(self.owner.optimizer.oracles, donate_argnums=0)

    def check_step(self, batch: Arrays) -> dict[str, NDArray[Any]]:
        """One step, oracles included."""
        owner, layout, config = self.owner, self.owner.layout, self.owner.config
        given = {k: jnp.array(x, dtype=self.dtype if x.dtype.kind == "f" else jnp.int32) for k, x in batch.items()}
        self.state, out, grads = self.step(self.state, given)
        self.state = s = self.oracles(self.state)
        arrays = {name: np.array(x) for name, x in out.items()}
        ok, norms, sigma = bool(s["ok"]), arrays.pop("norms"), arrays.pop("sigma")
        for name in ("q", "q_next", "q_target"):  # [D, B, n], padded, as [B, Σn_d]
            columns = [arrays[name][d, :, :n] for d, n in enumerate(config.branches)]
            arrays[name] = np.concatenate(columns, axis=1)
        arrays["best"] = arrays["best"].T
        arrays |= small_outputs(config, s["gate"], s["readiness"], s["bounds"], norms if ok else None)
        arrays |= {"skipped": np.float64(not ok), "step": np.array(s["t"])}
        for d, (branch, vector) in enumerate(owner.start["sn_v"].items()):
            arrays[f"sn_v_{branch}"] = np.array(s["sn_v"][d, : len(vector)])
            if ok:
                arrays[f"sigma_{branch}"] = sigma[d]
        for part, prefix in (("params", "param"), ("m", "m"), ("v", "v"), ("target", "target")):
            arrays |= {f"{prefix}.{name}": x for name, x in layout.unpack(np.array(s[part])).items()}
        packed = np.array(owner.optimizer.packed(grads))
        return arrays | {f"grad.{name}": x for name, x in layout.unpack(packed).items()}


def _table(data: Mapping[str, NDArray[Any]]) -> tuple[NDArray[np.float32], dict[str, tuple[int, int]]]:
    """Resident data as one table of float32, so that a batch is one gather, and the columns of each array."""
    columns, parts, at = {}, [], 0
    for name, x in data.items():
        parts.append(x.reshape(len(x), -1).astype(np.float32))
        columns[name] = (at, at + parts[-1].shape[1])
        at = columns[name][1]
    return np.concatenate(parts, axis=1), columns


class JaxTrainer:
    """Trains on resident data; batches are picked within the executables.

    Attributes:
        calls: the executables of a period of `ORACLE_EVERY` steps, in order.
    """

    def __init__(
        self, config: Config, start: State, data: Mapping[str, NDArray[Any]], variant: str, precision: str
    ) -> None:
        self.owner = JaxStep(config, start, jnp.float32, precision)
        table, self.columns = _table(data)
        self.integers = {name for name, x in data.items() if x.dtype.kind == "i"}
        self.flat = {name for name, x in data.items() if x.ndim == 1}
        self.table = jnp.array(table)
        self.carry = self.owner.state() | {"key": jnp.arange(4, dtype=jnp.uint32)}
        shapes = jax.eval_shape(self.step, self.carry, self.table)
        self.carry |= {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items() if name not in self.carry}
        if variant == "scan":
            self.calls = [self.compiled(self.period)]
        else:
            self.calls = [self.compiled(self.step)] * ORACLE_EVERY + [self.compiled(self.oracles)]

    def compiled(self, function: Callable[[Tree, Array], Tree]) -> Callable[[Tree, Array], Tree]:
        """A function of the carry and the table, compiled for them."""
        return jax.jit(function, donate_argnums=0, keep_unused=True).lower(self.carry, self.table).compile()

    def batch(self, key: Array, table: Array) -> tuple[Array, Tree]:
        """The next key and a random batch."""
        config = self.owner.config
        counts = (config.iqn_quantiles, config.iqn_target_quantiles) if config.iqn_quantiles else (0, 0)
        size = config.batch
        key, bits = jax.lax.rng_bit_generator(key, (size * (1 + sum(counts)),), dtype=jnp.uint32)
        picked = table[(bits[:size] % table.shape[0]).astype(jnp.int32)]
        batch = {name: picked[:, a:b] for name, (a, b) in self.columns.items()}
        batch = {name: x[:, 0] if name in self.flat else x for name, x in batch.items()}
        batch = {name: x.astype(jnp.int32) if name in self.integers else x for name, x in batch.items()}
        if config.iqn_quantiles:
            tau = (bits[size:] >> 8).astype(jnp.float32) * 2.0**-24
            cut = size * counts[0]
            batch |= {"tau": tau[:cut].reshape(size, -1), "tau_target": tau[cut:].reshape(size, -1)}
        return key, batch

    def step(self, carry: Tree, table: Array) -> Tree:
        """One step on a random batch; what a training loop reads is part of the carry."""
        key, batch = self.batch(carry["key"], table)
        state, out, _ = self.owner.step(carry, batch)
        losses = jnp.stack([x for name, x in out.items() if name.startswith("L_")])
        return state | {"key": key, "td": out["td"], "losses": losses}

    def oracles(self, carry: Tree, table: Array) -> Tree:
        """What runs after every eighth step."""
        return self.owner.optimizer.oracles(carry)

    def period(self, carry: Tree, table: Array) -> Tree:
        """Eight steps and the oracles."""
        carry = jax.lax.fori_loop(0, ORACLE_EVERY, lambda _, x: self.step(x, table), carry)
        return self.oracles(carry, table)

    def steps(self, count: int) -> None:
        """Start steps, whole periods of them."""
        for _ in range(count // ORACLE_EVERY):
            for call in self.calls:
                self.carry = call(self.carry, self.table)

    def synchronize(self) -> None:
        """Wait for the device."""
        jax.block_until_ready(self.carry)

    def elapsed_us(self, count: int) -> float:
        """From a device at rest to the end of the last step."""
        self.synchronize()
        began = time.perf_counter()
        self.steps(count)
        self.synchronize()
        return (time.perf_counter() - began) * 1e6

    def skipped(self) -> int:
        """Skipped steps so far."""
        return int(self.carry["skipped"])

    def launches(self) -> None:
        """Not known: XLA decides, and has no count of them to ask for."""


def main(argv: list[str] | None = None) -> int:
    """Check and time JAX."""
    options = parser("The training step in JAX.", VARIANTS).parse_args(argv)
    jax.config.update("jax_platforms", options.device)
    jax.config.update("jax_enable_x64", options.dtype == "float64")
    precision, dtype = MATMUL[options.precision], jnp.dtype(options.dtype)

    def make(config: Config, start: State) -> JaxChecker:
        return JaxChecker(config, start, dtype, precision)

    def train(config: Config, start: State, data: Mapping[str, NDArray[Any]]) -> JaxTrainer:
        return JaxTrainer(config, start, data, options.variant, precision)

    def memory() -> float | None:
        statistics = jax.devices()[0].memory_stats() if options.device == "cuda" else None
        return round(statistics["peak_bytes_in_use"] / 2**20, 1) if statistics else None

    return run(options, "jax" if options.variant == "step" else f"jax-{options.variant}", make, train, memory)


if __name__ == "__main__":
    sys.exit(main())
