"""From values to actions (`policy.cu`), and the fractions and means of acting with quantiles.

    policy(program, q, actions, branches=(3, 3), kind="epsilon_greedy", scalar=epsilon, counters=counters, stream=7)

Random numbers are Philox4x32-10 as in `ops/gather.py`: key = seed, counter = (item, stream, count low, count high), a
pure function of (seed, count, stream, item). What is counted depends on whose counters these are: replays of a training
step, or calls of an acting program.

Sources: epsilon-greedy and softmax: Sutton & Barto 2018, "Reinforcement learning: an introduction", sections 2.2 and
2.8; every branch explores on its own: Tavakoli, Pardo & Kormushev 2018, "Action branching architectures for deep
reinforcement learning"; risk: Dabney, Ostrovski, Silver & Munos 2018, "Implicit quantile networks for distributional
reinforcement learning", section 3 (fractions from [0, level) give the CVaR of that level).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, Tensor
from fxengine.ops.gather import random_bits
from fxengine.ops.random import reference_uniform

PolicyKind = Literal["greedy", "epsilon_greedy", "boltzmann"]
#: How values become actions, in the order of PolicyKind of policy.cu.
KINDS: tuple[PolicyKind, ...] = get_args(PolicyKind)
#: Most branches of one record.
MAX_BRANCHES = 16
_MOST_ITEMS = 2**31 - 256
_MOST_FRACTIONS = 2**34


def _tiles(of: str, tile: int) -> Callable[[Mapping[str, Any]], int]:
    return lambda fields: -(-int(fields[of]) // tile)


POLICY = Family("policy", "policy.cu", "fx_policy", "Policy", tiles=_tiles("items", 256))
FRACTIONS = Family("fractions", "policy.cu", "fx_fractions", "Fractions", tiles=_tiles("n", 1024))
QUANTILE_MEAN = Family("quantile_mean", "policy.cu", "fx_quantile_mean", "QuantileMean", tiles=_tiles("results", 256))


@dataclass(frozen=True)
class Report:
    """Where a policy writes its results once more, for the host: words that carry a tag.

    Attributes:
        tag: uint64 [1]; its low 32 bits are the tag.
        actions: uint64 [B * D] in mapped memory: an action in the low half of each word, the tag in the high half.
        values: uint64 [B * sum n_d] in mapped memory: likewise the values, bit for bit; None for none.
    """

    tag: Tensor
    actions: Tensor
    values: Tensor | None = None


def policy(
    program: Program,
    q: Tensor,
    actions: Tensor,
    *,
    branches: Sequence[int],
    kind: PolicyKind,
    scalar: Tensor | None = None,
    counters: Tensor | None = None,
    stream: int = 0,
    report: Report | None = None,
    label: str = "policy",
) -> None:
    """Append: an action for every row and branch.

    greedy: the largest value; the lowest index on ties, NaN never wins, all NaN gives 0.
    epsilon_greedy: with probability epsilon a uniform action of the branch instead, each branch on its own.
    boltzmann: drawn from softmax(q / temperature); NaN is never drawn, all NaN gives 0.
    Row b and branch d decide by the random numbers of item b * D + d.

    Args:
        program: program to append to.
        q: float32 [B, sum n_d], branches side by side, any row stride.
        actions: int32 [B, D], overwritten.
        branches: actions n_d of each branch, at most `MAX_BRANCHES`.
        kind: one of `KINDS`.
        scalar: float32 [1], usually a signal: epsilon, or the temperature (above 0). Not for greedy.
        counters: uint64 [4] (count, t, skipped, seed). Not for greedy.
        stream: number of the random stream, 32 bits; one that no other record uses.
        report: write the actions, and the values if asked, to mapped memory as well.
        label: shown in tables.

    Raises:
        ValueError: a shape or dtype does not match, or a kind lacks what it needs or is given what it does not read.
    """
    sizes = tuple(int(n) for n in branches)
    if kind not in KINDS:
        raise ValueError(f"'{label}': the policy must be one of {', '.join(KINDS)}, got {kind!r}")
    if not 1 <= len(sizes) <= MAX_BRANCHES or min(sizes) < 1:
        raise ValueError(f"'{label}': branches must be 1 to {MAX_BRANCHES} sizes of at least 1, got {sizes}")
    rows, total = q.shape[0], sum(sizes)
    _expect(label, "q", q, np.float32, (rows, total), f"for branches {sizes}")
    _expect(label, "actions", actions, np.int32, (rows, len(sizes)), f"for q {q.shape} and branches {sizes}")
    if rows * len(sizes) > _MOST_ITEMS:
        raise ValueError(f"'{label}': {rows} rows of {len(sizes)} branches are more than {_MOST_ITEMS} items")
    random = kind != "greedy"
    if random != (scalar is not None) or random != (counters is not None):
        needs = "needs both scalar and counters" if random else "takes neither scalar nor counters"
        raise ValueError(f"'{label}': a {kind} policy {needs}, got scalar {scalar} and counters {counters}")
    _expect(label, "scalar", scalar, np.float32, (1,), "as epsilon or temperature")
    _expect(label, "counters", counters, np.uint64, (4,), "(count, t, skipped, seed)")
    _check_stream(label, stream)
    if report is not None:
        _expect(label, "report.tag", report.tag, np.uint64, (1,), "as the tag")
        _expect(
            label, "report.actions", report.actions, np.uint64, (rows * len(sizes),), f"for actions {actions.shape}"
        )
        _expect(label, "report.values", report.values, np.uint64, (rows * total,), f"for q {q.shape}")
    reported = (report.actions, report.values) if report else (None, None)
    program.launch(
        POLICY,
        {
            "q": q,
            "actions": actions,
            "counters": counters or 0,
            "scalar": scalar or 0,
            "tag": report.tag if report else 0,
            "report": reported[0] or 0,
            "report_q": reported[1] or 0,
            "ld_q": q.ld,
            "ld_actions": actions.ld,
            "items": rows * len(sizes),
            "branches": len(sizes),
            "sizes": list(sizes),
            "offsets": [0, *accumulate(sizes)][:-1],
            "columns": total,
            "kind": KINDS.index(kind),
            "stream": stream,
        },
        reads=[q, counters, scalar, report.tag if report else None],
        writes=[actions, *reported],
        label=label,
    )


def fractions(
    program: Program, tau: Tensor, *, risk: Tensor, counters: Tensor, stream: int, label: str | None = None
) -> None:
    """Append: random quantile fractions to act on, distorted by risk.

    risk 0: uniform in [0, 1), the same numbers as `ops.random.uniform` draws.
    Below 0, averse: uniform in [0, 1 + risk), so that the mean over quantiles estimates the CVaR of level 1 + risk; at
    -1 the interval is empty, and every fraction is exactly 0.
    Above 0, seeking: uniform in [risk, 1); at 1 the interval is empty, and every fraction is exactly 1.

    Args:
        program: program to append to.
        tau: float32 [B, N] without gaps, overwritten; at most 2**34 elements.
        risk: float32 [1] in [-1, 1], usually the signal.
        counters: uint64 [4] (count, t, skipped, seed).
        stream: number of the random stream, 32 bits; one that no other record uses.
        label: shown in tables (default: the name of `tau`).

    Raises:
        ValueError: a shape or dtype does not match, or the stream does not fit 32 bits.
    """
    label = label or tau.name
    if tau.dtype != np.float32 or not tau.contiguous or tau.size > _MOST_FRACTIONS:
        raise ValueError(
            f"'{label}': tau must be float32 without gaps between its rows and have at most 2**34 elements, "
            f"got {tau.dtype} {tau.shape} with row stride {tau.ld}"
        )
    _expect(label, "risk", risk, np.float32, (1,), "as a signal is")
    _expect(label, "counters", counters, np.uint64, (4,), "(count, t, skipped, seed)")
    _check_stream(label, stream)
    program.launch(
        FRACTIONS,
        {"out": tau, "counters": counters, "risk": risk, "n": tau.size, "stream": stream},
        reads=[counters, risk],
        writes=[tau],
        label=label,
    )


def quantile_mean(program: Program, theta: Tensor, q: Tensor, *, quantiles: int, label: str = "quantile_mean") -> None:
    """Append: q = the mean of theta over its quantiles, added in their order.

    Args:
        program: program to append to.
        theta: float32 [B * N, sum n_d], the quantiles of a row one below the other, any row stride.
        q: float32 [B, sum n_d], overwritten.
        quantiles: N.
        label: shown in tables.

    Raises:
        ValueError: a shape or dtype does not match.
    """
    if quantiles < 1 or len(theta.shape) != 2 or theta.shape[0] % quantiles:
        raise ValueError(f"'{label}': theta must be [rows * {quantiles} quantiles, actions], got {theta.shape}")
    rows, columns = theta.shape[0] // quantiles, theta.shape[1]
    _expect(label, "theta", theta, np.float32, theta.shape, "")
    _expect(label, "q", q, np.float32, (rows, columns), f"for theta {theta.shape} of {quantiles} quantiles")
    if rows * columns > _MOST_ITEMS:
        raise ValueError(f"'{label}': {rows} rows of {columns} actions are more than {_MOST_ITEMS} results")
    program.launch(
        QUANTILE_MEAN,
        {
            "theta": theta,
            "q": q,
            "ld_theta": theta.ld,
            "ld_q": q.ld,
            "results": rows * columns,
            "quantiles": quantiles,
            "columns": columns,
        },
        reads=[theta],
        writes=[q],
        label=label,
    )


def _expect(
    label: str, role: str, t: Tensor | None, dtype: type[np.generic], shape: tuple[int, ...], because: str
) -> None:
    if t is not None and (t.dtype != dtype or t.shape != shape):
        raise ValueError(f"'{label}': {role} must be {np.dtype(dtype)} {shape} {because}, got {t.dtype} {t.shape}")


def _check_stream(label: str, stream: int) -> None:
    if not 0 <= stream < 2**32:
        raise ValueError(f"'{label}': stream {stream} does not fit 32 bits without sign")


# -- references --------------------------------------------------------------------------------------------------


def reference_greedy(q: ArrayLike, branches: Sequence[int]) -> NDArray[np.int32]:
    """Greedy actions int32 [B, D] of q [B, sum n_d]: the lowest index on ties, NaN never wins, all NaN gives 0."""
    parts = np.split(np.asarray(q), np.cumsum(branches)[:-1], axis=1)
    ranked = (np.where(np.isnan(part), -np.inf, part) for part in parts)
    best = [np.where(np.isnan(part).all(1), 0, _first(part, top)) for part, top in zip(parts, ranked, strict=True)]
    return np.stack(best, axis=1).astype(np.int32)


def _first(part: NDArray[Any], ranked: NDArray[Any]) -> NDArray[np.intp]:
    """Lowest index of the largest value that is a number (a row may hold nothing but NaN and -inf)."""
    return np.argmax((part == ranked.max(1, keepdims=True)) & ~np.isnan(part), axis=1)


def reference_epsilon_greedy(
    q: ArrayLike, branches: Sequence[int], epsilon: float, *, seed: int, count: int, stream: int
) -> NDArray[np.int32]:
    """What `policy` draws for epsilon_greedy, bit for bit: int32 [B, D]."""
    greedy = reference_greedy(q, branches)
    bits = random_bits(seed, count, stream, np.arange(greedy.size)).reshape(*greedy.shape, 4).astype(np.uint64)
    explores = (bits[..., 0] >> np.uint64(8)) * 2.0**-24 < np.float32(epsilon)
    wide, shift = np.array(branches, np.uint64), np.uint64(32)
    # high half of the 96-bit product (z:y) * size
    drawn = (bits[..., 2] * wide + (bits[..., 1] * wide >> shift)) >> shift
    return np.where(explores, drawn, greedy.astype(np.uint64)).astype(np.int32)


def reference_boltzmann(
    q: ArrayLike, branches: Sequence[int], temperature: float, *, seed: int, count: int, stream: int
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """What `policy` draws for boltzmann, in float64: actions int32 [B, D], and margins [B, D].

    A margin is the distance of the random number to the nearest boundary between two actions: where it is within the
    rounding of float32, the kernel may draw the neighbour.
    """
    values = np.asarray(q, np.float64)
    rows, count_of = values.shape[0], len(branches)
    bits = random_bits(seed, count, stream, np.arange(rows * count_of))[:, 0].reshape(rows, count_of)
    actions, margins = np.zeros((rows, count_of), np.int32), np.zeros((rows, count_of))
    greedy = reference_greedy(values, branches)
    for d, part in enumerate(np.split(values, np.cumsum(branches)[:-1], axis=1)):
        top = np.take_along_axis(part, greedy[:, d, None], axis=1)
        with np.errstate(invalid="ignore", over="ignore"):
            weights = np.where(part == top, 1.0, np.exp((part - top) / np.float64(np.float32(temperature))))
        weights[np.isnan(part)] = 0.0
        sums = weights.sum(1, keepdims=True)
        u = (bits[:, d, None] >> np.uint32(8)) * 2.0**-24
        edges = np.cumsum(weights, axis=1) / np.where(sums > 0.0, sums, 1.0)
        actions[:, d] = np.argmax(edges > u, axis=1)
        margins[:, d] = np.where(weights > 0.0, np.abs(edges - u), np.inf).min(1)
    return actions, margins


def reference_fractions(seed: int, count: int, stream: int, n: int, risk: float) -> NDArray[np.float64]:
    """What `fractions` draws, in float64: [n]."""
    u = reference_uniform(seed, count, stream, n).astype(np.float64)
    level = float(np.float32(risk))
    return u * (1.0 + level) if level < 0.0 else level + u * (1.0 - level)


def reference_quantile_mean(theta: ArrayLike, quantiles: int) -> NDArray[np.float64]:
    """What `quantile_mean` computes, in float64: [B, sum n_d] of theta [B * N, sum n_d]."""
    values = np.asarray(theta, np.float64)
    return values.reshape(-1, quantiles, values.shape[1]).mean(axis=1)
