"""The networks of tools/bench_act.py in PyTorch, JAX and ONNX Runtime: observations in, greedy actions out.

    python -m tools.peers.acting torch-captured step case.npz rows.json --device cuda --calls 2000

The file holds parameters, inputs and the values to agree with. Writes rows {batch, by, p50, p99}, or a line that says
what cannot be imported. Every peer gets NumPy arrays and gives one back.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

import numpy as np
from numpy.typing import NDArray

from tests.reference.config import Config
from tools.bench_act import latencies

Inputs = Mapping[str, NDArray[np.float32]]
Call = Callable[[], "tuple[NDArray[Any], NDArray[Any]]"]
CONFIG = Config()


class Forward:
    """q of both models, written once for PyTorch and JAX.

    Args:
        linear, softmax, layer_norm, cat, elu, relu, tanh, sigmoid: the framework's functions.
        z: its array of the atoms.
    """

    def __init__(self, z: Any, **functions: Any) -> None:
        self.z = z
        self.f = functions

    def layer(self, p: Mapping[str, Any], name: str, x: Any, activation: str = "") -> Any:
        """act(x·wᵀ + b)."""
        y = self.f["linear"](x, p[f"w_{name}"], p[f"b_{name}"])
        return self.f[activation](y) if activation else y

    def dqn(self, p: Mapping[str, Any], obs: Any) -> Any:
        """Three layers."""
        return self.layer(p, "3", self.layer(p, "2", self.layer(p, "1", obs, "relu"), "relu"))

    def step(self, p: Mapping[str, Any], obs: Any, ofi: Any) -> Any:
        """The online forward of the default step (docs/step.md §2)."""
        f, layer = self.f, self.layer
        h1 = layer(p, "s1", self._attention(p, obs), "elu")
        glu = layer(p, "glu", layer(p, "s2", h1, "elu"))
        half = CONFIG.h2
        h2 = f["layer_norm"](h1 + glu[:, :half] * f["sigmoid"](glu[:, half:]), p["ln_g"], p["ln_b"])
        aux = layer(p, "a3", layer(p, "a2", layer(p, "a1", h1, "elu"), "elu"))
        nb = layer(p, "nb2", layer(p, "nb1", aux, "elu"))
        wire = f["tanh"](0.5 * (nb[:, 1:] - nb[:, :1]))
        flow = layer(p, "ofi", ofi, "tanh")
        value = layer(p, "v2", layer(p, "v1", h2, "relu"))
        q: list[Any] = []
        for d, n in enumerate(CONFIG.branches):
            beside = wire if d == 0 else f["softmax"](q[0]) if d == 1 else flow
            hidden = layer(p, f"b{d}fc", f["cat"]([h2, beside]), "relu")
            adv = layer(p, f"b{d}out", hidden).reshape(-1, n, CONFIG.atoms)
            logits = value[:, None, :] + adv - adv.mean(1)[:, None, :]
            q.append((f["softmax"](logits) * self.z).sum(-1))
        return f["cat"](q)

    def _attention(self, p: Mapping[str, Any], obs: Any) -> Any:
        f, t = self.f, obs.reshape(-1, CONFIG.tokens, CONFIG.state // CONFIG.tokens)
        q, k, v = (f["linear"](t, p[f"w_{name}"], None) for name in ("q", "k", "val"))
        scores = f["softmax"](q @ k.swapaxes(1, 2) / CONFIG.attn**0.5)
        return obs + f["linear"](scores @ v, p["w_o"], None).reshape(obs.shape)


def branches_of(model: str, columns: int) -> tuple[int, ...]:
    """Actions per branch; all branches have equally many."""
    return CONFIG.branches if model == "step" else (columns,)


# -- PyTorch -----------------------------------------------------------------------------------------------------


def torch_forward(device: str) -> Any:
    """The forward in PyTorch."""
    import torch
    from torch.nn import functional

    torch.backends.cuda.matmul.allow_tf32 = False
    return Forward(
        torch.tensor(CONFIG.atoms_z, dtype=torch.float32, device=device),
        linear=functional.linear,
        softmax=lambda x: x.softmax(-1),
        layer_norm=lambda x, g, b: functional.layer_norm(x, x.shape[1:], g, b, 1e-5),
        cat=lambda parts: torch.cat(parts, dim=1),
        elu=functional.elu,
        relu=functional.relu,
        tanh=torch.tanh,
        sigmoid=torch.sigmoid,
    )


def torch_call(model: str, params: Inputs, inputs: Inputs, device: str, *, captured: bool) -> Call:
    """Eager: copy in, forward, copy out. Captured: all of it in one graph, from and to page-locked memory."""
    import torch

    forward = getattr(torch_forward(device), model)
    p = {name: torch.from_numpy(x).to(device) for name, x in params.items()}
    branches = branches_of(model, params["b_3"].size if model == "dqn" else 0)

    @torch.inference_mode()
    def decide(arrays: list[Any]) -> Any:
        q = forward(p, *arrays)
        return q.view(q.shape[0], len(branches), -1).argmax(-1).int(), q

    if not captured:

        def eager() -> tuple[NDArray[Any], NDArray[Any]]:
            actions, q = decide([torch.from_numpy(x).to(device) for x in inputs.values()])
            return actions.cpu().numpy(), q

        return eager

    pinned = [torch.from_numpy(x.copy()).pin_memory() for x in inputs.values()]
    places = [x.to(device) for x in pinned]
    out = decide(places)[0].cpu().pin_memory()
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            decide(places)
    side.synchronize()
    with torch.cuda.graph(graph):
        for place, host in zip(places, pinned, strict=True):
            place.copy_(host, non_blocking=True)
        actions, q = decide(places)
        out.copy_(actions, non_blocking=True)
    hosts, result, stream = [x.numpy() for x in pinned], out.numpy(), torch.cuda.current_stream()

    def replay() -> tuple[NDArray[Any], NDArray[Any]]:
        for host, x in zip(hosts, inputs.values(), strict=True):
            host[...] = x
        graph.replay()
        stream.synchronize()
        return result.copy(), q

    return replay


# -- JAX ---------------------------------------------------------------------------------------------------------


def jax_call(model: str, params: Inputs, inputs: Inputs, device: str) -> Call:
    """One jitted function; NumPy arrays are its arguments and its result is read back."""
    import jax
    import jax.numpy as jnp

    where = jax.devices("gpu" if device == "cuda" else "cpu")[0]

    def linear(x: Any, w: Any, b: Any) -> Any:
        y = jnp.matmul(x, w.T, precision="highest")
        return y if b is None else y + b

    def layer_norm(x: Any, g: Any, b: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * g + b

    forward = getattr(
        Forward(
            np.asarray(CONFIG.atoms_z, np.float32),
            linear=linear,
            softmax=jax.nn.softmax,
            layer_norm=layer_norm,
            cat=lambda parts: jnp.concatenate(parts, axis=1),
            elu=jax.nn.elu,
            relu=jax.nn.relu,
            tanh=jnp.tanh,
            sigmoid=jax.nn.sigmoid,
        ),
        model,
    )
    branches = branches_of(model, params["b_3"].size if model == "dqn" else 0)
    p = {name: jax.device_put(x, where) for name, x in params.items()}

    @jax.jit
    def decide(p: Any, *arrays: Any) -> Any:
        q = forward(p, *arrays)
        return q.reshape(q.shape[0], len(branches), -1).argmax(-1).astype(jnp.int32), q

    def call() -> tuple[NDArray[Any], NDArray[Any]]:
        actions, q = decide(p, *inputs.values())
        return np.asarray(actions), q

    return call


# -- ONNX Runtime ------------------------------------------------------------------------------------------------


def onnx_call(model: str, params: Inputs, inputs: Inputs, device: str) -> tuple[Call, str]:
    """The forward, exported from PyTorch; also the provider that runs it."""
    import torch

    onnxruntime: Any = import_module("onnxruntime")

    forward = torch_forward("cpu")
    branches = branches_of(model, params["b_3"].size if model == "dqn" else 0)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, x in params.items():
                self.register_buffer(name, torch.from_numpy(x))

        def forward(self, *arrays: Any) -> Any:
            q = getattr(forward, model)(dict(self.named_buffers()), *arrays)
            return q.view(q.shape[0], len(branches), -1).argmax(-1).int(), q

    wanted = ["CUDAExecutionProvider"] if device == "cuda" else []
    providers = [name for name in wanted if name in onnxruntime.get_available_providers()] + ["CPUExecutionProvider"]
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "net.onnx")
        arrays = tuple(torch.from_numpy(x) for x in inputs.values())
        torch.onnx.export(Net(), arrays, path, input_names=list(inputs), output_names=["actions", "q"])
        session = onnxruntime.InferenceSession(path, providers=providers)
    feed = dict(inputs)

    def call() -> tuple[NDArray[Any], NDArray[Any]]:
        actions, q = session.run(None, feed)
        return actions, q

    return call, f"onnxruntime {session.get_providers()[0].removesuffix('ExecutionProvider')}"


def make_call(peer: str, model: str, params: Inputs, inputs: Inputs, device: str) -> tuple[Call, str]:
    """The timed function of a peer, and its name in the table."""
    if peer == "jax":
        return jax_call(model, params, inputs, device), "jax jit"
    if peer == "onnxruntime":
        return onnx_call(model, params, inputs, device)
    return torch_call(model, params, inputs, device, captured=peer == "torch-captured"), peer


def measure(peer: str, model: str, case: Inputs, device: str, calls: int) -> list[dict[str, Any]]:
    """Rows of a peer. Raises RuntimeError where its values are not those of the file."""
    params = {name.removeprefix("param."): x for name, x in case.items() if name.startswith("param.")}
    rows = []
    for batch in sorted({int(name.split(".")[0]) for name in case if name[0].isdigit()}):
        inputs = {n: case[f"{batch}.{n}"] for n in ("obs", "ofi") if f"{batch}.{n}" in case}
        call, name = make_call(peer, model, params, inputs, device)
        actions, q = call()
        values = np.asarray(q.cpu() if hasattr(q, "cpu") else q)
        worst = float(np.abs(values - case[f"{batch}.q"]).max())
        if not worst <= case["tolerance"] or actions.shape[0] != batch:
            raise RuntimeError(f"{peer}, {model} at batch {batch}: values differ by up to {worst}")
        rows.append({"batch": batch, "by": name, **latencies(call, calls, calls // 10 + 1)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="One peer of tools/bench_act.py.")
    parser.add_argument("peer")
    parser.add_argument("model", choices=("step", "dqn"))
    parser.add_argument("case", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--calls", type=int, default=2000)
    options = parser.parse_args()
    if options.peer == "torch-captured" and options.device == "cpu":
        result: Any = "needs a GPU"
    else:
        try:
            with np.load(options.case) as case:
                result = measure(options.peer, options.model, dict(case), options.device, options.calls)
        except ImportError as error:
            result = f"left out, {error}"
    options.output.write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
