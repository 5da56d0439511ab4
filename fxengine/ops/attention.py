"""Attention over the feature tokens of a sample: x = t + softmax(q kᵀ/√A) v w_oᵀ (`attention.cu`).

    saved = attention.Saved.declare(program, batch, tokens, attn, name="attn")  # only if there will be a backward
    attention.forward(program, state, w_q, w_k, w_val, w_o, x, tokens=tokens, saved=saved)
    attention.backward(program, dx, w_o, saved, dq, dk, dv)
    attention.backward_weights(program, dx, state, saved, dq, dk, dv, dw_q, dw_k, dw_val, dw_o)

A sample of `state` [B, T·F] is T tokens of F features; A is the width of queries, keys and values. The state needs no
gradient, so there is none.

Source: scaled dot-product attention of Vaswani et al. 2017, "Attention is all you need", section 3.2.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.graphs.program import Launch, ProgramError
from fxengine.ops import linear
from fxengine.ops.checks import describe, expect

if TYPE_CHECKING:
    from fxengine.driver import Target

# ATTENTION_SHARED of attention.cuh: floats of shared memory of a block.
_SHARED = 8192
# More samples in a block than this save no more weight traffic worth having.
_MAX_SAMPLES = 8
# AttentionPath of attention.cuh, and the sizes of the last one: eight lanes per token.
_MEMORY, _STAGED, _TOKENS = range(3)
_TOKEN_FEATURES, _TOKEN_ATTN, _TOKEN_MOST, _TOKEN_LD, _TOKEN_LD_WEIGHTS = 8, 16, 8, 20, 12


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["batch"]) // int(fields["samples"]))


FORWARD = Family(
    "attention_forward",
    "attention.cu",
    "fx_attention_forward",
    "AttentionForward",
    tiles=_tiles,
    early=("w_q", "w_k", "w_v", "w_o"),
)
BACKWARD = Family(
    "attention_backward",
    "attention.cu",
    "fx_attention_backward",
    "AttentionBackward",
    tiles=_tiles,
    early=("w_o",),
)


@dataclass(frozen=True)
class Saved:
    """What a forward keeps for its backward.

    Attributes:
        q: queries, float32 [B·T, A].
        k: keys, the same shape.
        v: values, the same shape.
        p: attention weights, float32 [B·T, T].
        o: weighted values p·v, float32 [B·T, A].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    o: Tensor

    @classmethod
    def declare(cls, program: Program, batch: int, tokens: int, attn: int, *, name: str) -> Saved:
        """Declare tensors `<name>.q`, `.k`, `.v`, `.p`, `.o` for a forward over `batch` samples."""
        rows = batch * tokens
        widths = {"q": attn, "k": attn, "v": attn, "p": tokens, "o": attn}
        return cls(**{part: program.tensor(f"{name}.{part}", (rows, width)) for part, width in widths.items()})


def choose_samples(
    target: Target, batch: int, floats_shared: int, floats_per_sample: int, most: int = _MAX_SAMPLES
) -> int:
    """Samples of a block, 0 if not even one fits into shared memory; a pure function of its arguments.

    The simulated device pays for blocks, a GPU for multiprocessors that have none.
    """
    fitting = min(max(0, (_SHARED - floats_shared) // floats_per_sample), most)
    if target.kind == "sim" or not fitting:
        return min(fitting, batch)
    rounds = -(-batch // (fitting * target.sm_count))  # blocks of a multiprocessor, all of one size
    return -(-batch // (rounds * target.sm_count))


def _by_token(tokens: int, features: int, attn: int) -> bool:
    """Whether the sizes are those of the path with eight lanes per token."""
    return (features, attn) == (_TOKEN_FEATURES, _TOKEN_ATTN) and tokens <= _TOKEN_MOST


def forward_floats(tokens: int, features: int, attn: int) -> tuple[int, int]:
    """Floats of shared memory that a forward needs per block (weights) and per sample."""
    if _by_token(tokens, features, attn):
        weights = 3 * attn * _TOKEN_LD_WEIGHTS + features * _TOKEN_LD
        return weights, tokens * (features + 2 * attn + _TOKEN_LD + 1)
    padded = attn | 1
    weights = 3 * attn * (features | 1) + features * padded
    return weights, tokens * (features + 3 * padded + tokens)


def backward_floats(tokens: int, features: int, attn: int) -> tuple[int, int]:
    """Floats of shared memory that a backward needs per block (w_o, unless in registers) and per sample."""
    if _by_token(tokens, features, attn):
        return 0, tokens * (features + _TOKEN_MOST + 3 * attn + _TOKEN_LD)
    return features * attn, tokens * (features + 4 * (attn | 1) + 2 * tokens)


def forward(
    program: Program,
    state: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_val: Tensor,
    w_o: Tensor,
    x: Tensor,
    *,
    tokens: int,
    live: Tensor | None = None,
    saved: Saved | None = None,
    samples: int | None = None,
    label: str | None = None,
) -> Launch:
    """Append x = t + softmax(q kᵀ/√A) v w_oᵀ, with t = state as [B, T, F].

    Args:
        program: where the record goes.
        state: float32 [B, T·F], any row stride.
        w_q: float32 [A, F], any row stride, the same for w_k and w_val; without gaps where eight lanes have a token.
        w_k: float32 [A, F].
        w_val: float32 [A, F].
        w_o: float32 [F, A].
        x: float32 [B, T·F], any row stride; must not overlap the state.
        tokens: T.
        live: float32 [B], such as the discount: a sample whose entry is 0 reads as zeros, whatever it holds; anything
            else (NaN included) lets it through. None: all are live.
        saved: receives what a backward needs; None keeps nothing.
        samples: samples of a block; 0 works in global memory, for sizes that do not fit into shared memory
            (default: `choose_samples`).
        label: name of the record (default: x's name).

    Raises:
        ProgramError: shapes, dtypes or options that do not fit each other; both sides are named.
    """
    label = label or x.name
    batch, features, attn = _sizes(label, "state", state, tokens, w_o)
    gaps = not _by_token(tokens, features, attn)
    expect(f"attention '{label}'", "x", x, state.shape, f"state is {describe(state)}")
    for role, weight in (("w_q", w_q), ("w_k", w_k), ("w_val", w_val)):
        expect(f"attention '{label}'", role, weight, (attn, features), f"w_o is {describe(w_o)}", gaps=gaps)
    if not w_q.ld == w_k.ld == w_val.ld:
        strides = f"{w_q.ld}, {w_k.ld} and {w_val.ld}"
        raise ProgramError(f"attention '{label}': w_q, w_k and w_val have row strides {strides}, expected one")
    if live is not None:
        expect(f"attention '{label}'", "live", live, (batch,), f"state is {describe(state)}")
    if x.region().overlaps(state.region()):
        raise ProgramError(
            f"attention '{label}': x {describe(x)} overlaps state {describe(state)}; give it its own memory"
        )
    sizes = (tokens, features, attn)
    samples = _samples(label, program.target, batch, forward_floats(*sizes), samples, by_token=_by_token(*sizes))
    _expect_saved(label, saved, batch * tokens, tokens, attn)
    if saved is None and samples == 0:
        saved = Saved.declare(program, batch, tokens, attn, name=f"{label}#{len(program.launches)}")
    parts = [saved.q, saved.k, saved.v, saved.p, saved.o] if saved else [None] * 5
    fields = {
        "state": state,
        "live": live or 0,
        "w_q": w_q,
        "w_k": w_k,
        "w_v": w_val,
        "w_o": w_o,
        "x": x,
        **{name: part or 0 for name, part in zip("qkvpo", parts, strict=True)},
        "ld_state": state.ld,
        "ld_x": x.ld,
        "ld_w": w_q.ld,
        "ld_o": w_o.ld,
        **_geometry(batch, tokens, features, attn, samples),
    }
    reads = [state, live, w_q, w_k, w_val, w_o]
    return program.launch(FORWARD, fields, reads=reads, writes=[x, *parts], label=label)


def backward(
    program: Program,
    dx: Tensor,
    w_o: Tensor,
    saved: Saved,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *,
    samples: int | None = None,
    label: str | None = None,
) -> Launch:
    """Append dq, dk, dv = the gradients of queries, keys and values; all three overwrite.

    Args:
        program: where the record goes.
        dx: float32 [B, T·F], gradient of the forward's x, any row stride.
        w_o: float32 [F, A].
        saved: what the forward kept.
        dq: float32 [B·T, A].
        dk: float32 [B·T, A].
        dv: float32 [B·T, A].
        samples: see `forward`.
        label: name of the record (default: dx's name).

    Raises:
        ProgramError: shapes, dtypes or options that do not fit each other; both sides are named.
    """
    label = label or dx.name
    tokens = saved.p.shape[-1]
    batch, features, attn = _sizes(label, "dx", dx, tokens, w_o)
    rows = batch * tokens
    _expect_saved(label, saved, rows, tokens, attn)
    for role, grad in (("dq", dq), ("dk", dk), ("dv", dv)):
        expect(
            f"attention '{label}'",
            role,
            grad,
            (rows, attn),
            f"dx is {describe(dx)} and w_o is {describe(w_o)}",
            gaps=False,
        )
    sizes = (tokens, features, attn)
    samples = _samples(label, program.target, batch, backward_floats(*sizes), samples, by_token=_by_token(*sizes))
    scratch: dict[str, Tensor] = {}
    if samples == 0:
        unique = f"{label}#{len(program.launches)}"
        scratch["mixed_grad"] = program.tensor(f"{unique}.mixed_grad", (rows, attn))
        scratch["scores_grad"] = program.tensor(f"{unique}.scores_grad", (rows, tokens))
    fields = {
        "dx": dx,
        "w_o": w_o,
        "q": saved.q,
        "k": saved.k,
        "v": saved.v,
        "p": saved.p,
        "dq": dq,
        "dk": dk,
        "dv": dv,
        "mixed_grad": scratch.get("mixed_grad", 0),
        "scores_grad": scratch.get("scores_grad", 0),
        "ld_dx": dx.ld,
        "ld_o": w_o.ld,
        **_geometry(batch, tokens, features, attn, samples),
    }
    reads = [dx, w_o, saved.q, saved.k, saved.v, saved.p]
    return program.launch(BACKWARD, fields, reads=reads, writes=[dq, dk, dv, *scratch.values()], label=label)


def backward_weights(
    program: Program,
    dx: Tensor,
    state: Tensor,
    saved: Saved,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dw_q: Tensor,
    dw_k: Tensor,
    dw_val: Tensor,
    dw_o: Tensor,
    *,
    accumulate: bool = False,
    label: str | None = None,
) -> None:
    """Append the gradients of the four weights: dqᵀ t, dkᵀ t, dvᵀ t and dxᵀ o, summed over all tokens of the batch.

    Args:
        program: where the records go.
        dx: float32 [B, T·F] without gaps between rows, gradient of the forward's x.
        state: float32 [B, T·F] without gaps between rows, the forward's input.
        saved: what the forward kept.
        dq: float32 [B·T, A], made by `backward`.
        dk: likewise.
        dv: likewise.
        dw_q: float32 [A, F].
        dw_k: float32 [A, F].
        dw_val: float32 [A, F].
        dw_o: float32 [F, A].
        accumulate: add to the weights' gradients instead of overwriting them.
        label: begins the records' names (default: dx's name).

    Raises:
        ProgramError: shapes or dtypes that do not fit each other, or gaps; both sides are named.
    """
    label = label or dx.name
    rows = saved.q.shape[0]
    tokens = state.reshape(rows, state.size // rows)
    dtokens = dx.reshape(rows, dx.size // rows)
    products = (
        ("w_q", dq, tokens, dw_q),
        ("w_k", dk, tokens, dw_k),
        ("w_val", dv, tokens, dw_val),
        ("w_o", dtokens, saved.o, dw_o),
    )
    for name, dy, x, dw in products:  # the last ones of a backward: nothing else shares the device with them
        linear.backward_dw(program, dy, x, dw, accumulate=accumulate, siblings=len(products), label=f"{label}.{name}")


# -- references ---------------------------------------------------------------------------------------------


def reference_forward(
    state: ArrayLike, w_q: ArrayLike, w_k: ArrayLike, w_val: ArrayLike, w_o: ArrayLike, *, tokens: int
) -> dict[str, NDArray[np.float64]]:
    """What `forward` computes, in float64: x [B, T·F], q, k, v, o [B, T, A], p [B, T, T]."""
    flat = _wide(state)
    t = flat.reshape(flat.shape[0], tokens, -1)
    q, k, v = t @ _wide(w_q).T, t @ _wide(w_k).T, t @ _wide(w_val).T
    with np.errstate(invalid="ignore", over="ignore"):
        scores = q @ np.swapaxes(k, 1, 2) / np.sqrt(q.shape[-1])
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p = powers / powers.sum(axis=-1, keepdims=True)
    o = p @ v
    return {"x": (t + o @ _wide(w_o).T).reshape(flat.shape), "q": q, "k": k, "v": v, "p": p, "o": o}


def reference_backward(
    dx: ArrayLike, state: ArrayLike, w_o: ArrayLike, saved: Mapping[str, ArrayLike]
) -> dict[str, NDArray[np.float64]]:
    """What `backward` (dq, dk, dv [B, T, A]) and `backward_weights` (w_q, w_k, w_val, w_o) compute, in float64.

    Args:
        dx: [B, T·F].
        state: [B, T·F].
        w_o: [F, A].
        saved: q, k, v, o [B, T, A] and p [B, T, T], as `reference_forward` returns them.
    """
    q, k, v, p, o = (_wide(saved[name]) for name in "qkvpo")
    t = _wide(state).reshape(*q.shape[:2], -1)
    dtokens = _wide(dx).reshape(t.shape)
    do = dtokens @ _wide(w_o)
    dp = do @ np.swapaxes(v, 1, 2)
    ds = p * (dp - np.sum(dp * p, axis=-1, keepdims=True)) / np.sqrt(q.shape[-1])
    dq, dk, dv = ds @ k, np.swapaxes(ds, 1, 2) @ q, np.swapaxes(p, 1, 2) @ do
    pairs = {"w_q": (dq, t), "w_k": (dk, t), "w_val": (dv, t), "w_o": (dtokens, o)}
    weights = {name: np.einsum("bto,bti->oi", dy, x) for name, (dy, x) in pairs.items()}
    return {"dq": dq, "dk": dk, "dv": dv, **weights}


def _wide(a: ArrayLike) -> NDArray[np.float64]:
    return np.asarray(a, dtype=np.float64)


# -- checks -------------------------------------------------------------------------------------------------


def _geometry(batch: int, tokens: int, features: int, attn: int, samples: int) -> dict[str, int | float]:
    return {
        "batch": batch,
        "tokens": tokens,
        "features": features,
        "attn": attn,
        "samples": max(1, samples),
        "path": _MEMORY if samples == 0 else _TOKENS if _by_token(tokens, features, attn) else _STAGED,
        "scale": 1.0 / math.sqrt(attn),
    }


def _samples(
    label: str, target: Target, batch: int, floats: tuple[int, int], wanted: int | None, *, by_token: bool
) -> int:
    if wanted is None:
        return choose_samples(target, batch, *floats, most=batch if by_token else _MAX_SAMPLES)
    if wanted < 0 or (wanted and floats[0] + wanted * floats[1] > _SHARED):
        fitting = max(0, (_SHARED - floats[0]) // floats[1])
        raise ProgramError(f"attention '{label}': samples={wanted}, but a block of these sizes takes 0 to {fitting}")
    return wanted


def _sizes(label: str, role: str, flat: Tensor, tokens: int, w_o: Tensor) -> tuple[int, int, int]:
    """Batch, features and attention width, from [B, T·F] and w_o [F, A]."""
    if len(flat.shape) != 2 or flat.dtype != np.float32 or tokens < 1 or flat.shape[1] % tokens:
        raise ProgramError(
            f"attention '{label}': {role} is {describe(flat)} of {flat.dtype}, "
            f"expected float32 [B, T·F] with T = tokens = {tokens}"
        )
    features = flat.shape[1] // tokens
    if len(w_o.shape) != 2:
        raise ProgramError(f"attention '{label}': w_o is {describe(w_o)}, expected [{features}, A]")
    attn = w_o.shape[1]
    expect(
        f"attention '{label}'",
        "w_o",
        w_o,
        (features, attn),
        f"{role} is {describe(flat)} of {tokens} tokens",
        gaps=not _by_token(tokens, features, attn),
    )
    return flat.shape[0], features, attn


def _expect_saved(label: str, saved: Saved | None, rows: int, tokens: int, attn: int) -> None:
    if saved is None:
        return
    for role in "qkvpo":
        shape = (rows, tokens if role == "p" else attn)
        expect(
            f"attention '{label}'",
            f"saved.{role}",
            getattr(saved, role),
            shape,
            f"there are {rows} tokens in all",
            gaps=False,
        )
