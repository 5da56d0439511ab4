"""The step in JAX: one jit with donated state.

    python -m tools.peers.jax_step --variant flat --device cuda --precision tf32 --check tests/golden/*.npz --time

flat: parameters, moments and targets as one array for the matrices and one for the vectors of each group, which keeps
the number of arguments of a call low. tree: one array per tensor. The oracles are a second jit that every eighth step
calls. Random numbers come from the device's own generator (implementation "rbg").
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
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
from tools.peers.common import ORACLE_EVERY, blocks_of, bound_table, parser, run, small_outputs
from tools.peers.jax_net import Array, Net, Tree, gradients
from tools.peers.jax_train import Optimizer, gate_update, pack, readiness_update, unpack

VARIANTS = ("flat", "tree")
LAYOUTS = {"flat": "group", "tree": "tree"}
MATMUL = {"fp32": "float32", "tf32": "tensorfloat32"}


class JaxStep:
    """State and step functions of one configuration.

    Args:
        config: sizes.
        start: state to start from, with its signals.
        variant: one of `VARIANTS`.
        dtype: of all floating-point values.
        precision: of matrix products, as `jax.default_matmul_precision` names it.
        complete: return everything that the golden files hold.
    """

    def __init__(
        self, config: Config, start: State, variant: str, dtype: Any, precision: str, *, complete: bool = False
    ) -> None:
        self.config, self.complete, self.precision = config, complete, precision
        self.net = Net(config, start["signals"], complete=complete)
        self.blocks = blocks_of(config, LAYOUTS[variant])
        self.optimizer = Optimizer(config, self.net, self.blocks)

        def place(x: Any) -> Array:
            return jnp.array(np.asarray(x), dtype=dtype)

        shapes = [b.entries[0].shape if variant == "tree" else (sum(e.size for e in b.entries),) for b in self.blocks]
        targets = self.optimizer.targets
        target_shapes = [shape for shape, b in zip(shapes, self.blocks, strict=True) if b.target]
        # Packed on the host: every array is a buffer of its own, so that each can be donated.
        self.state: Tree = {
            part: [place(x) for x in pack(self.blocks, {k: np.asarray(v) for k, v in start[part].items()}, shapes)]
            for part in ("params", "m", "v")
        }
        self.state |= {
            "target": [place(x) for x in pack(targets, dict(start["target"]), target_shapes)],
            "grad": [jnp.zeros(shape, dtype) for shape in shapes],
            "sn_v": {name: place(start["sn_v"][name]) for name in self.optimizer.names},
            "gate": place([start["state"].get(name, 0.0) for name in GATE_NAMES]),
            "readiness": place([start["state"].get(name, 0.0) for name in READINESS_NAMES]),
            "bounds": place(bound_table(config, start)),
            "t": place(float(start["step"])),
            "skipped": place(0.0),
        }
        self.jitted_oracles = jax.jit(self.oracles, donate_argnums=0)

    def step(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        """One step without oracles: the new state (ĝ in `grad`) and outputs."""
        with jax.default_matmul_precision(self.precision):
            config, net = self.config, self.net
            p, target = unpack(self.blocks, state["params"]), unpack(self.optimizer.targets, state["target"])

            def gate(nb: Array, labels: Array, q: Array) -> tuple[Array, Array]:
                new = gate_update(net, state["gate"], nb, labels, q)
                return new, new[6]

            readiness = state["readiness"][3] if config.iqn_quantiles else None
            grads, out, new_gate = gradients(net, p, target, batch, readiness, gate)
            new, more = self.optimizer.apply(state, grads)
            if new_gate is not None:
                new["gate"] = new_gate
            if config.iqn_quantiles:
                new["readiness"] = readiness_update(net, state["readiness"], out["L_iqn"])
            out |= more | ({f"grad.{name}": g for name, g in grads.items()} if self.complete else {})
            return new, out

    def oracles(self, state: Tree, ok: Array) -> Tree:
        """The state with its bounds moved."""
        return state | {"bounds": self.optimizer.oracles(state, ok)}


class JaxChecker:
    """Runs golden batches."""

    def __init__(self, config: Config, start: State, variant: str, dtype: Any, precision: str) -> None:
        self.owner, self.dtype = JaxStep(config, start, variant, dtype, precision, complete=True), dtype
        self.step = jax.jit(self.owner.step, donate_argnums=0)

    def check_step(self, batch: Arrays) -> dict[str, NDArray[Any]]:
        """One step, oracles included."""
        owner = self.owner
        given = {k: jnp.array(x, dtype=self.dtype if x.dtype.kind == "f" else jnp.int32) for k, x in batch.items()}
        owner.state, out = self.step(owner.state, given)
        owner.state = owner.jitted_oracles(owner.state, out["ok"])
        arrays, s = {name: np.array(x) for name, x in out.items()}, owner.state
        ok, norms, sigma = bool(arrays.pop("ok")), arrays.pop("norms"), arrays.pop("sigma")
        arrays |= small_outputs(owner.config, s["gate"], s["readiness"], s["bounds"], norms if ok else None)
        arrays |= {"skipped": np.float64(not ok), "step": np.array(s["t"])}
        arrays |= {f"sn_v_{name}": np.array(v) for name, v in s["sn_v"].items()}
        if ok:
            arrays |= {f"sigma_{name}": x for name, x in zip(owner.optimizer.names, sigma, strict=True)}
        for part, prefix in (("params", "param"), ("m", "m"), ("v", "v"), ("target", "target")):
            blocks = owner.optimizer.targets if part == "target" else owner.blocks
            arrays |= {f"{prefix}.{name}": np.array(x) for name, x in unpack(blocks, s[part]).items()}
        return arrays


class JaxTrainer:
    """Trains on resident data; batches are picked within the jit."""

    def __init__(
        self, config: Config, start: State, data: Mapping[str, NDArray[Any]], variant: str, precision: str
    ) -> None:
        self.owner = JaxStep(config, start, variant, jnp.float32, precision)
        self.data = {name: jnp.array(x) for name, x in data.items()}
        self.rows, self.count = len(data["state"]), 0
        self.key = jax.random.key(0, impl="rbg")
        self.step = jax.jit(self.sampled_step, donate_argnums=(0, 1))
        self.state = self.owner.state
        self.out: Tree = {}

    def sampled_step(self, state: Tree, key: Array, data: Tree) -> tuple[Tree, Array, Tree]:
        """A step on a random batch; what a training loop reads comes out beside the state."""
        config = self.owner.config
        key, rows_key, tau_key = jax.random.split(key, 3)
        index = jax.random.randint(rows_key, (config.batch,), 0, self.rows)
        batch = {name: x[index] for name, x in data.items()}
        if config.iqn_quantiles:
            counts = (config.iqn_quantiles, config.iqn_target_quantiles)
            tau = jax.random.uniform(tau_key, (config.batch, sum(counts)))
            batch |= {"tau": tau[:, : counts[0]], "tau_target": tau[:, counts[0] :]}
        state, out = self.owner.step(state, batch)
        return state, key, out

    def steps(self, count: int) -> None:
        """Start steps, oracles in every eighth."""
        for _ in range(count):
            self.count += 1
            self.state, self.key, self.out = self.step(self.state, self.key, self.data)
            if self.count % ORACLE_EVERY == 0:
                self.state = self.owner.jitted_oracles(self.state, self.out["ok"])

    def synchronize(self) -> None:
        """Wait for the device."""
        jax.block_until_ready((self.state, self.out))

    def elapsed_us(self, count: int) -> float:
        """From a device at rest to the end of the last step."""
        self.synchronize()
        began = time.perf_counter()
        self.steps(count)
        self.synchronize()
        return (time.perf_counter() - began) * 1e6

    def skipped(self) -> int:
        """Skipped steps so far."""
        return int(self.state["skipped"])

    def launches(self) -> None:
        """Not known: XLA decides, and has no count of them to ask for."""


def main(argv: list[str] | None = None) -> int:
    """Check and time JAX."""
    options = parser("The training step in JAX.", VARIANTS).parse_args(argv)
    jax.config.update("jax_platforms", options.device)
    jax.config.update("jax_enable_x64", options.dtype == "float64")
    precision, dtype = MATMUL[options.precision], jnp.dtype(options.dtype)

    def make(config: Config, start: State) -> JaxChecker:
        return JaxChecker(config, start, options.variant, dtype, precision)

    def train(config: Config, start: State, data: Mapping[str, NDArray[Any]]) -> JaxTrainer:
        return JaxTrainer(config, start, data, options.variant, precision)

    def memory() -> float | None:
        statistics = jax.devices()[0].memory_stats() if options.device == "cuda" else None
        return round(statistics["peak_bytes_in_use"] / 2**20, 1) if statistics else None

    return run(options, f"jax-{options.variant}", make, train, memory)


if __name__ == "__main__":
    sys.exit(main())
