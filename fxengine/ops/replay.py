"""A replay of transitions in device memory (`replay.cu`): random n-step transitions out; NumPy references.

The replay is a ring of `slots` steps of `envs` environments. Row r = slot * envs + environment; what a row holds lies
in one tensor per field. A batch starts at rows drawn as `ops/gather.py` draws them, or by priority
(`ops/priorities.py`).

n-step returns: Sutton, "Learning to predict by the methods of temporal differences" (Machine Learning 3, 1988); with
replay: Hessel et al., "Rainbow: combining improvements in deep reinforcement learning" (AAAI 2018). With m = number of
steps up to the first that ended its episode, at most n:

    reward = sum_{k<m} gamma^k r_{t+k}      discount = gamma^m, or 0 where step t+m-1 terminated
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fxengine.graphs import Family, Program, ProgramError, Tensor
from fxengine.ops.checks import require
from fxengine.ops.gather import reference_indices

#: Arena of everything that a replay holds: programs that share it share the replay.
ARENA = "replay"
#: Bits of a row's done word.
TERMINATED, TRUNCATED = 1, 2

_TILE = 256
_GATHER_WORDS = 2048
_GATHER_COLUMNS = 4096


def _sample_tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // _TILE)


def _gather_tiles(fields: Mapping[str, Any]) -> int:
    across = -(-int(fields["width"]) // int(fields["tile_columns"]))
    return across * -(-int(fields["rows"]) // int(fields["tile_rows"]))


SAMPLE = Family("replay_sample", "replay.cu", "fx_replay_sample", "ReplaySample", tiles=_sample_tiles)
GATHER = Family("replay_gather", "replay.cu", "fx_replay_gather", "ReplayGather", tiles=_gather_tiles)


@dataclass(frozen=True)
class Format:
    """How the elements of a field are stored.

    Attributes:
        kind: what the kernels call it.
        stored: dtype in the replay.
        given: dtype of what is inserted.
        served: dtype of what a step reads.
    """

    kind: int
    stored: np.dtype[Any]
    given: np.dtype[Any]
    served: np.dtype[Any]


def _format(kind: int, stored: DTypeLike, given: DTypeLike, served: DTypeLike) -> Format:
    return Format(kind, np.dtype(stored), np.dtype(given), np.dtype(served))


#: Formats by name. bfloat16 is rounded to nearest even when it is inserted.
FORMATS = {
    "float32": _format(0, np.float32, np.float32, np.float32),
    "int32": _format(0, np.int32, np.int32, np.int32),
    "uint8": _format(1, np.uint8, np.uint8, np.float32),
    "bfloat16": _format(2, np.uint16, np.float32, np.float32),
}


@dataclass(frozen=True)
class Column:
    """One field of a replay.

    Attributes:
        data: [slots, envs, ld]; a row's elements are followed by padding, up to a multiple of four elements.
            [slots, envs] where a row is one element of four bytes.
        width: elements of a row.
        format: how they are stored.
        scale: factor of uint8 elements as a step reads them.
    """

    data: Tensor
    width: int
    format: Format
    scale: float = 1.0

    @property
    def ld(self) -> int:
        """Elements between rows."""
        return self.data.shape[2] if len(self.data.shape) == 3 else 1


@dataclass(frozen=True)
class Ring:
    """The order of the rows, and what n-step returns are made of.

    Attributes:
        counters: uint64 [2]: steps inserted so far, the slot of the next one.
        rewards: float32 [slots, envs].
        done: int32 [slots, envs]: 0, or bits `TERMINATED` and `TRUNCATED`.
        n_step: most steps that a transition spans.
    """

    counters: Tensor
    rewards: Tensor
    done: Tensor
    n_step: int

    @property
    def slots(self) -> int:
        """Steps that the replay holds."""
        return self.done.shape[0]

    @property
    def envs(self) -> int:
        """Environments of a step."""
        return self.done.shape[1]


@dataclass(frozen=True)
class Sampled:
    """What `sample` says of a batch, each [B].

    Attributes:
        start: int32, row of the first step.
        end: int32, row of the last one.
        reward: float32, n-step return without the value at its end.
        discount: float32, factor of the value at its end; 0 after a termination.
        weight: float32, importance weight.
    """

    start: Tensor
    end: Tensor
    reward: Tensor
    discount: Tensor
    weight: Tensor


def column(
    program: Program, name: str, slots: int, envs: int, width: int, form: Format, *, scale: float = 1.0
) -> Column:
    """Declare the tensor of a field; its contents start undefined."""
    single = width == 1 and form.stored.itemsize == 4
    shape = (slots, envs) if single else (slots, envs, -(-width // 4) * 4)
    return Column(program.tensor(name, shape, form.stored, arena=ARENA), width, form, scale)


def sample(
    program: Program,
    ring: Ring,
    out: Sampled,
    *,
    counters: Tensor,
    stream: int,
    gamma: Tensor,
    drawn_by: Tensor | None = None,
    beta: Tensor | None = None,
    label: str,
) -> None:
    """Append: reward, discount, weight and end row of every transition of a batch.

    Args:
        program: program to append to.
        ring: the replay.
        out: overwritten, but for `start` with `drawn_by`.
        counters: uint64 [4] (replays finished, t, skipped, seed).
        stream: number of the random stream, 32 bits.
        gamma: float32 [1], discount of one step.
        drawn_by: float32 [B], the leaves that `priorities.sample` drew `out.start` by. None: the starts are drawn here,
            and every weight is 1.
        beta: float32 [1], exponent of the weights; needed with `drawn_by`.
        label: shown in tables.

    Raises:
        ProgramError: a shape or dtype does not match.
        ValueError: the stream does not fit 32 bits.
    """
    batch = out.reward.shape[0]
    _check_draw(counters, stream, label)
    for role in ("start", "end"):
        require(getattr(out, role), np.int32, (batch,), role, label)
    for role in ("reward", "discount", "weight"):
        require(getattr(out, role), np.float32, (batch,), role, label)
    require(gamma, np.float32, (1,), "gamma", label)
    require(beta, np.float32, (1,), "beta", label)
    require(drawn_by, np.float32, (batch,), "drawn_by", label)
    if (drawn_by is None) != (beta is None):
        raise ProgramError(f"'{label}': drawn_by and beta go together, got {drawn_by} and {beta}")
    reads = (counters, ring.counters, ring.done, ring.rewards, gamma, beta, drawn_by)
    outputs = (out.end, out.reward, out.discount, out.weight)
    program.launch(
        SAMPLE,
        {
            "counters": counters,
            "ring": ring.counters,
            "done": ring.done,
            "rewards": ring.rewards,
            "gamma": gamma,
            "beta": beta or 0,
            "starts": out.start if drawn_by else 0,
            "leaves": drawn_by or 0,
            "start_out": 0 if drawn_by else out.start,
            "end_out": out.end,
            "reward": out.reward,
            "discount": out.discount,
            "weight": out.weight,
            "slots": ring.slots,
            "envs": ring.envs,
            "n": ring.n_step,
            "rows": batch,
            "stream": stream,
        },
        reads=(*reads, out.start) if drawn_by else reads,
        writes=outputs if drawn_by else (*outputs, out.start),
        label=label,
    )


def gather(
    program: Program,
    ring: Ring,
    field: Column,
    target: Tensor,
    *,
    counters: Tensor,
    stream: int,
    starts: Tensor | None = None,
    at_end: bool = False,
    label: str,
) -> None:
    """Append: target[b] = the field in the row that transition b starts at, or ends at, as a step reads it.

    Args:
        program: program to append to.
        ring: the replay.
        field: the field.
        target: [B, ...] of the format's served dtype, overwritten.
        counters: uint64 [4] (replays finished, t, skipped, seed).
        stream: number of the random stream; every record of one stream draws the same starts.
        starts: int32 [B], rows that `priorities.sample` drew; None: drawn here.
        at_end: the row of the transition's last step instead of its first.
        label: shown in tables.

    Raises:
        ProgramError: a shape or dtype does not match.
        ValueError: the stream does not fit 32 bits.
    """
    batch = target.shape[0]
    _check_draw(counters, stream, label)
    require(starts, np.int32, (batch,), "starts", label)
    stride = row_stride(target, field.width, "target", label)
    if target.dtype != field.format.served:
        raise ProgramError(f"'{label}': the field is served as {field.format.served}, target is {target.dtype}")
    columns = min(field.width, _GATHER_COLUMNS)
    program.launch(
        GATHER,
        {
            "data": field.data,
            "target": target,
            "counters": counters,
            "ring": ring.counters,
            "starts": starts or 0,
            "done": ring.done if at_end else 0,
            "ld": field.ld,
            "target_stride": stride,
            "scale": field.scale,
            "kind": field.format.kind,
            "width": field.width,
            "rows": batch,
            "tile_rows": max(1, min(_TILE, _GATHER_WORDS // columns)),
            "tile_columns": -(-columns // 4) * 4,
            "slots": ring.slots,
            "envs": ring.envs,
            "n": ring.n_step,
            "stream": stream,
        },
        reads=[field.data, counters, ring.counters, starts, ring.done if at_end else None],
        writes=[target],
        label=label,
    )


def _check_draw(counters: Tensor, stream: int, label: str) -> None:
    require(counters, np.uint64, (4,), "counters", label)
    if not 0 <= stream < 2**32:
        raise ValueError(f"'{label}': stream {stream} does not fit 32 bits without sign")


def row_stride(tensor: Tensor, width: int, role: str, label: str) -> int:
    """Elements between the rows of [n, ...] with `width` elements to a row."""
    if math.prod(tensor.shape[1:]) != width:
        raise ProgramError(f"'{label}': a row has {width} elements, {role} has shape {tensor.shape}")
    if len(tensor.shape) == 2:
        return tensor.ld
    if not tensor.contiguous:
        raise ProgramError(f"'{label}': {role} of shape {tensor.shape} has gaps between its rows")
    return width


def reference_starts(
    inserted: int, slots: int, envs: int, n_step: int, *, seed: int, replay: int, stream: int, batch: int
) -> NDArray[np.int64]:
    """The rows that a uniform batch starts at: int64 [batch]. Valid starts are counted from the oldest row.

    Args:
        inserted: steps inserted so far, at least n_step.
        slots: steps that the replay holds.
        envs: environments of a step.
        n_step: most steps that a transition spans.
        seed: 64-bit seed.
        replay: replays finished before this one.
        stream: number of the random stream.
        batch: how many.
    """
    filled = min(inserted, slots)
    index = reference_indices(seed, replay, stream, batch, (filled - n_step + 1) * envs)
    slot = ((inserted - filled) + index // envs) % slots
    return slot * envs + index % envs


def reference_transitions(
    rewards: ArrayLike, done: ArrayLike, starts: ArrayLike, *, gamma: float, n_step: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Rewards, discounts and end rows of n-step transitions, in float64.

    Args:
        rewards: [slots, envs].
        done: [slots, envs], bits `TERMINATED` and `TRUNCATED`.
        starts: [batch] rows; their windows are full.
        gamma: discount of one step.
        n_step: most steps.
    """
    r, bits = np.asarray(rewards, np.float64), np.asarray(done)
    slots, envs = r.shape
    starts = np.asarray(starts, np.int64)
    reward, discount, end = np.zeros(len(starts)), np.zeros(len(starts)), starts.copy()
    for b, start in enumerate(starts):
        slot, env = divmod(int(start), envs)
        history = [(slot + k) % slots for k in range(n_step)]
        over = [k for k, t in enumerate(history) if bits[t, env]]
        m = over[0] + 1 if over else n_step
        reward[b] = sum(gamma**k * r[t, env] for k, t in enumerate(history[:m]))
        last = history[m - 1]
        discount[b] = 0.0 if bits[last, env] & TERMINATED else gamma**m
        end[b] = last * envs + env
    return reward, discount, end
