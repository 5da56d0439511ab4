"""One branch of the C51 heads from its hidden layer to q, in one launch (`heads.cuh`).

    value = heads.Value(value_hidden, w_v2, b_v2, v=v)
    wire = heads.Wire(bar_hidden, w_nb2, b_nb2, logits=logits, wire=wire)
    first = heads.Branch(y0, w_b0out, b_b0out, q0, late=w_b0fc.columns(k, k + 1), policy=policy)
    second = heads.Branch(y1, w_b1out, b_b1out, q1, late=w_b1fc.columns(k, k + 3))
    heads.forward(program, value, first, beside=wire, v_min=-10, v_max=10, label="head0")
    heads.forward(program, value, second, beside=policy, v_min=-10, v_max=10, label="head1")

The hidden layers are ReLU layers; one that lacks the last columns of its input (`late`) is finished here, from the
wire, p_up - p_down of the next-bar head, which is made here too, or from the policy of another branch. Products are
made in the program's precision, everything else in float32.

Sources: as `fxengine.ops.dueling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.graphs import Family, Program, ProgramError, Tensor
from fxengine.ops.checks import matrix, require, require_as, separate
from fxengine.ops.dueling import atom_spacing
from fxengine.ops.shares import beside_heads

if TYPE_CHECKING:
    from fxengine.driver import Target

#: Most atoms, actions and late columns.
MAX_ATOMS = 64
MAX_ACTIONS = 32

# Rows of a block, and the dynamic shared memory of each: fixed sizes, so that the records of a step share launches.
_SHARED = {16: 64 << 10, 32: 96 << 10, 64: 160 << 10}
# Shared memory that the kernel declares itself.
_STATIC = 1024


@dataclass(frozen=True)
class Value:
    """The value head, which the branches share.

    Attributes:
        hidden: float32 [B, Vh], its hidden layer.
        w: float32 [K, Vh].
        b: float32 [K].
        v: float32 [B, K] = hidden wᵀ + b; None if nobody reads it.
    """

    hidden: Tensor
    w: Tensor
    b: Tensor
    v: Tensor | None = None


@dataclass(frozen=True)
class Wire:
    """The last layer of the next-bar head, and p_up - p_down of it.

    Attributes:
        hidden: float32 [B, Hh].
        w: float32 [2, Hh].
        b: float32 [2].
        logits: float32 [B, 2] = hidden wᵀ + b; None if nobody reads them.
        wire: float32 [B, 1] = p[1] - p[0], p the softmax of the logits; None if nobody reads it.
    """

    hidden: Tensor
    w: Tensor
    b: Tensor
    logits: Tensor | None = None
    wire: Tensor | None = None


@dataclass(frozen=True)
class Branch:
    """A hidden layer that is there, and the outputs to be made of it.

    Attributes:
        hidden: float32 [B, A], the hidden layer, to which the ReLU is applied in any case; with `late`, its product
            with the other columns, and the bias.
        w: float32 [n * K, A].
        b: float32 [n * K].
        q: float32 [B, n], with any row stride.
        late: float32 [A, C], the weights of the columns that come late; None if the layer is whole.
        adv: float32 [B, n * K] = hidden wᵀ + b; None if nobody reads it.
        lse: float32 [B, n], as of `dueling.forward`.
        policy: float32 [B, n], likewise.
        best: int32 [B] or [B, 1], likewise.
    """

    hidden: Tensor
    w: Tensor
    b: Tensor
    q: Tensor
    late: Tensor | None = None
    adv: Tensor | None = None
    lse: Tensor | None = None
    policy: Tensor | None = None
    best: Tensor | None = None


@dataclass(frozen=True)
class Sizes:
    """What a block depends on.

    Attributes:
        depth: width A of the hidden layer.
        value_depth: that of the value head.
        atoms: K.
        actions: n.
        late: columns that come late.
    """

    depth: int
    value_depth: int
    atoms: int
    actions: int
    late: int = 0

    def shared(self, precision: str, height: int) -> int:
        """Bytes of shared memory of a block with so many rows (HeadsLayout)."""
        gap = 8 if precision == "bf16" else 16
        operands = _up(self.value_depth, 128) + _up(self.depth, 128) + 2 * gap
        results = _up(self.atoms, 16) + _up(self.actions * self.atoms, 16) + 8
        return 4 * (height * (operands + results) + self.late * _up(self.depth, 128))


def fits(target: Target, precision: str, sizes: Sizes) -> bool:
    """Whether `forward` serves these sizes on this device."""
    return bool(_heights(target, precision, sizes))


def _heights(target: Target, precision: str, sizes: Sizes) -> list[int]:
    """Rows that a block can have on this device, fewest first."""
    if sizes.atoms > MAX_ATOMS or max(sizes.actions, sizes.late) > MAX_ACTIONS:
        return []
    served = {height: room for height, room in _SHARED.items() if room + _STATIC <= target.shared_memory_optin}
    return [height for height, room in served.items() if sizes.shared(precision, height) <= room]


def _up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["rows"]) // int(fields["height"]))


@cache
def _family(precision: str, height: int, early: bool, sizes: Sizes | None) -> Family:
    """`early`: the rows are read before the wait, as the weights are; `sizes`: compiled in.

    Records share a launch if they have the same sizes, late columns apart, which are not compiled in.
    """
    kernel = "heads" if precision == "fp32" else f"heads_{precision}"
    rows = ("value_hidden", "hidden") if early else ()
    return Family(
        f"{kernel}_{height}",
        f"{kernel}.cu",
        f"fx_{kernel}",
        "Heads",
        tiles=_tiles,
        shared=_SHARED[height],
        early=("value_w", "value_b", "late", "w", "b", *rows),
        whole=True,
        defines=(("HEADS_SIZES", _defined(height, sizes)),) if sizes else (),
    )


def _defined(height: int, sizes: Sizes) -> str:
    """Members of HeadsSizes."""
    return f"{height}, {sizes.value_depth}, {sizes.depth}, {sizes.atoms}, {sizes.actions}"


def forward(
    program: Program,
    value: Value,
    branch: Branch,
    *,
    beside: Wire | Tensor | None = None,
    keep: bool = True,
    v_min: float,
    v_max: float,
    siblings: int = 1,
    compiled: bool | None = None,
    label: str,
) -> None:
    """Append the forward pass of a branch. Results overwrite.

    Args:
        program: program to append to.
        value: the value head.
        branch: the branch.
        beside: what the late columns are: the wire, or float32 [B, C]; needed exactly if the branch has some.
        keep: write a hidden layer that is finished here back in place, for the backward.
        v_min: value of the first of the K atoms.
        v_max: value of the last one.
        siblings: number of such records that run side by side.
        compiled: compile the sizes into the kernel (default: on a GPU). Bits do not depend on it.
        label: shown in tables.

    Raises:
        ProgramError: shapes or dtypes do not match, v_min and v_max are no range, or `fits` says no.
    """
    rows, depth = matrix(branch.hidden, "hidden", label)
    atoms, value_depth = matrix(value.w, "w of the value head", label)
    actions = matrix(branch.q, "q", label)[1]
    spacing = atom_spacing(atoms, v_min, v_max, label)
    columns = _check_late(branch, beside, rows, depth, label)
    _check(value, branch, (rows, depth, atoms, value_depth, actions), label)
    sizes = Sizes(depth, value_depth, atoms, actions, columns)
    heights = _heights(program.target, program.precision, sizes)
    if not heights:
        raise ProgramError(f"'{label}': no block of this device has room for {sizes} (heads.fits)")
    room = beside_heads(program.target)  # few rows while that gives all blocks a place
    height = next((h for h in heights if -(-rows // h) * siblings <= room), heights[-1])
    if compiled is None:
        compiled = program.target.kind == "cuda"
    quads = (value.hidden, value.w, branch.hidden, branch.w, value.v, branch.adv)
    compiled = compiled and all(t.aligned for t in quads if t)
    wire = beside if isinstance(beside, Wire) else None
    others = beside if isinstance(beside, Tensor) else None
    early = others is not None
    shared = replace(sizes, late=0)  # what records of one launch have in common
    family = _family(program.precision, height, early, shared if compiled else None)
    kept = branch.hidden if keep and columns else None
    tensors: dict[str, Tensor | None] = {
        "value_hidden": value.hidden,
        "value_w": value.w,
        "v": value.v,
        "hidden": branch.hidden,
        "late": branch.late,
        "others": others,
        "bar_hidden": wire.hidden if wire else None,
        "bar_w": wire.w if wire else None,
        "bar_logits": wire.logits if wire else None,
        "w": branch.w,
        "adv": branch.adv,
        "q": branch.q,
        "lse": branch.lse,
        "policy": branch.policy,
    }
    made = wire.wire if wire else None
    program.launch(
        family,
        {
            **{name: t or 0 for name, t in tensors.items()},
            **{f"ld_{name}": t.ld if t else 0 for name, t in tensors.items()},
            "value_b": value.b,
            "bar_b": wire.b if wire else 0,
            "b": branch.b,
            "wire": made or 0,
            "wire_stride": made.ld if made else 0,
            "best": branch.best or 0,
            "best_stride": branch.best.ld if branch.best else 0,
            "rows": rows,
            "height": height,
            "value_depth": value_depth,
            "bar_depth": wire.hidden.shape[1] if wire else 0,
            "depth": depth,
            "atoms": atoms,
            "actions": actions,
            "columns": columns,
            "kept": int(kept is not None),
            "early": int(early),
            "v_min": v_min,
            "spacing": spacing,
        },
        reads=[
            *(value.hidden, value.w, value.b, branch.hidden, branch.late, branch.w, branch.b, others),
            *((wire.hidden, wire.w, wire.b) if wire else ()),
        ],
        writes=[
            *(value.v, kept, branch.adv, branch.q, branch.lse, branch.policy, branch.best, made),
            wire.logits if wire else None,
        ],
        label=label,
    )


def _check(value: Value, branch: Branch, extents: tuple[int, int, int, int, int], label: str) -> None:
    rows, depth, atoms, value_depth, n = extents
    because = f"q has {n} actions and the value head {atoms} atoms"
    require(value.hidden, np.float32, (rows, value_depth), "hidden of the value head", label)
    require(value.b, np.float32, (atoms,), "b of the value head", label)
    require(value.v, np.float32, (rows, atoms), "v", label)
    require_as(branch.w, (n * atoms, depth), "w", because, label)
    require_as(branch.b, (n * atoms,), "b", because, label)
    require_as(branch.adv, (rows, n * atoms), "adv", because, label)
    require(branch.lse, np.float32, (rows, n), "lse", label)
    require(branch.policy, np.float32, (rows, n), "policy", label)
    best = branch.best
    require(best, np.int32, (rows, 1) if best and len(best.shape) == 2 else (rows,), "best", label)
    separate(
        f"'{label}'", "hidden", branch.hidden, w=branch.w, late=branch.late, value_hidden=value.hidden, value_w=value.w
    )


def _check_late(branch: Branch, beside: Wire | Tensor | None, rows: int, depth: int, label: str) -> int:
    """Columns that come late, whose weights and values fit each other."""
    if (beside is None) != (branch.late is None):
        raise ProgramError(f"'{label}': columns come late exactly if there are weights for them; pass both or none")
    if branch.late is None or beside is None:
        return 0
    if isinstance(beside, Tensor):
        columns = matrix(beside, "beside", label)[1]
        require(beside, np.float32, (rows, columns), "beside", label)
    else:
        columns, width = 1, matrix(beside.hidden, "hidden of the wire", label)[1]
        require(beside.hidden, np.float32, (rows, width), "hidden of the wire", label)
        require(beside.w, np.float32, (2, width), "w of the wire", label)
        require(beside.b, np.float32, (2,), "b of the wire", label)
        require(beside.logits, np.float32, (rows, 2), "logits", label)
        require(beside.wire, np.float32, (rows, 1), "wire", label)
    require(branch.late, np.float32, (depth, columns), "late", label)
    return columns


def reference_finish(hidden: ArrayLike, z: ArrayLike, late: ArrayLike) -> NDArray[np.float64]:
    """relu(hidden + z lateᵀ), the layer whose columns z come late, in float64."""
    hidden, z, late = (np.asarray(a, np.float64) for a in (hidden, z, late))
    return np.maximum(hidden + z @ late.T, 0.0)
