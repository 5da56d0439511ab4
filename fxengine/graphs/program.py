"""The step as data: tensors that have no address yet, and records of launches that name what they read and write.

Nothing here touches a device. A `Program` can be printed, compared and checked; `Plan` gives its tensors their
places and its records their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

if TYPE_CHECKING:
    from fxengine.driver import Target

#: Arena whose storages one memset node clears at the start of every replay.
ZEROED = "zeroed"
#: Arena of mapped-pinned host memory (telemetry rows, observations, steps to insert).
MAPPED = "mapped"
#: Arena of data uploaded once, when the program is planned.
CONSTANTS = "constants"
#: Arena of everything a step computes and the next one may overwrite.
ACTIVATIONS = "activations"

#: Elements of 4 bytes in a line of the cache. Where longer rows begin with one, the copy engine asks for half as many.
LINE = 32
#: Elements of 4 bytes that kernels read at once where every row starts at a multiple of them.
QUAD = 4

Scalar: TypeAlias = "Tensor | TensorMap | int | float"
#: Value of a record field; a sequence fills an array field, and unused entries behind it are 0.
Value: TypeAlias = "Scalar | Sequence[Scalar]"


class ProgramError(ValueError):
    """A record or tensor that cannot be part of a program; the message names it and both sides of the conflict."""


@dataclass(eq=False)
class Storage:
    """One allocation to be made: a named run of bytes in an arena.

    Attributes:
        name: unique within its program.
        nbytes: size in bytes.
        arena: which arena it will be placed in (one arena per lifetime).
        data: contents to upload when the program is planned, or None.
    """

    name: str
    nbytes: int
    arena: str
    data: NDArray[Any] | None = None


@dataclass(frozen=True, eq=False)
class Tensor:
    """A typed view into a storage. Views of one storage share memory.

    Attributes:
        storage: where the elements live.
        offset: first element, counted in elements from the start of the storage.
        shape: extent per dimension.
        dtype: NumPy dtype of an element.
        ld: elements from one row to the next (leading dimension); the last dimension is contiguous.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ld: int

    @property
    def name(self) -> str:
        """Name of the storage."""
        return self.storage.name

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether the elements follow each other without gaps."""
        return len(self.shape) < 2 or self.ld == self.shape[-1] or math.prod(self.shape[:-1]) == 1

    @property
    def aligned(self) -> bool:
        """Whether all rows start at multiples of 16 bytes, so that kernels can read four numbers at once."""
        return self.offset % QUAD == 0 and (len(self.shape) < 2 or self.ld % QUAD == 0)

    def columns(self, start: int, stop: int) -> Tensor:
        """Columns start..stop-1 of a matrix, as a strided view."""
        if len(self.shape) != 2 or not 0 <= start < stop <= self.shape[1]:
            raise ProgramError(f"columns {start}:{stop} of {self} do not exist; it has shape {self.shape}")
        return replace(self, offset=self.offset + start, shape=(self.shape[0], stop - start))

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop-1 of a matrix or elements start..stop-1 of a vector."""
        if not self.shape or not 0 <= start < stop <= self.shape[0]:
            raise ProgramError(f"rows {start}:{stop} of {self} do not exist; it has shape {self.shape}")
        step = self.ld if len(self.shape) > 1 else 1
        return replace(self, offset=self.offset + start * step, shape=(stop - start, *self.shape[1:]))

    def flat(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements start..stop-1 of a contiguous tensor, as a vector."""
        stop = self.size if stop is None else stop
        if not self.contiguous:
            raise ProgramError(f"{self} has gaps between its rows and cannot be read as one vector")
        if not 0 <= start < stop <= self.size:
            raise ProgramError(f"elements {start}:{stop} of {self} do not exist; it has {self.size}")
        return replace(self, offset=self.offset + start, shape=(stop - start,), ld=1)

    def reshape(self, *shape: int) -> Tensor:
        """The same elements of a contiguous tensor under another shape."""
        if not self.contiguous or math.prod(shape) != self.size:
            raise ProgramError(f"{self} of shape {self.shape} and row stride {self.ld} cannot take shape {shape}")
        return replace(self, shape=shape, ld=shape[-1] if len(shape) > 1 else 1)

    def region(self) -> Region:
        """The bytes this view covers."""
        item = self.dtype.itemsize
        rows = 1 if self.contiguous else math.prod(self.shape[:-1])
        width = self.size * item if rows == 1 else self.shape[-1] * item
        return Region(self.storage, self.offset * item, width, self.ld * item, rows)

    def __str__(self) -> str:
        return f"tensor '{self.name}'"


@dataclass(frozen=True, eq=False)
class TensorMap:
    """In a field of a record the address of a tensor map (`driver.tensor_map`), by which the kernel copies boxes of a
    float32 matrix.

    Attributes:
        tensor: the matrix, `aligned`.
        box_rows: rows of a box.
        rounded: boxes are rounded to tf32.
    """

    tensor: Tensor
    box_rows: int
    rounded: bool = True

    def __post_init__(self) -> None:
        t = self.tensor
        if len(t.shape) != 2 or t.dtype != np.float32 or not t.aligned:
            raise ProgramError(
                f"{t} of shape {t.shape}, {t.dtype}, offset {t.offset} and row stride {t.ld} has no tensor map; "
                f"expected a float32 matrix whose rows start at multiples of {QUAD} elements: declare it padded=True"
            )


@dataclass(frozen=True)
class Region:
    """`rows` runs of `width` bytes, `stride` bytes apart, from byte `start` of a storage."""

    storage: Storage
    start: int
    width: int
    stride: int
    rows: int

    def overlaps(self, other: Region) -> bool:
        """Whether both touch a common byte. Exact for views of one matrix; else conservative by extent."""
        if self.storage is not other.storage:
            return False
        if self._end() <= other.start or other._end() <= self.start:
            return False
        if self.rows > 1 and other.rows > 1 and self.stride == other.stride:
            further = (other.start - self.start) % self.stride  # within a row that begins where this one does
            return further < self.width or further + other.width > self.stride
        return True

    def _end(self) -> int:
        return self.start + (self.rows - 1) * self.stride + self.width


@dataclass(frozen=True)
class Family:
    """One kernel and what a planner must know to batch its records.

    Attributes:
        name: shown in tables and the census.
        source: file under `fxengine/cu`, or an absolute path.
        kernel: entry point `void kernel(const Struct* table, int count)`.
        struct: name of the record struct in the source; its first fields are `int first_tile; int tiles;`.
        tiles: number of blocks that a record needs, from its fields.
        late: the planner puts such records as late as their readers allow, so that they share one launch
            (weight gradients: nothing but the optimizer waits for them).
        shared: bytes of dynamic shared memory of a block.
        alone: never share a launch with another family.
        early: fields of the record whose tensors the kernel reads before it waits for its predecessors (weights, which
            are seldom new). The planner lets it begin early only where no direct predecessor writes them.
        whole: a block takes up most of a multiprocessor (shared memory, registers).
        gradients: fields of the record whose tensors are gradients of parameters, if the kernel can report their sum of
            squares in parts: to the record's field `squares`, float64 [squares(fields)].
        squares: number of these parts, from the fields of a record.
        defines: macros to compile the source with: sizes that all records of the family have.
    """

    name: str
    source: str
    kernel: str
    struct: str
    tiles: Callable[[Mapping[str, Any]], int]
    late: bool = False
    shared: int = 0
    alone: bool = False
    early: tuple[str, ...] = ()
    whole: bool = False
    gradients: tuple[str, ...] = ()
    squares: Callable[[Mapping[str, Any]], int] | None = None
    defines: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Launch:
    """One record: what one kernel family is to do once per step.

    Attributes:
        family: the kernel family.
        fields: values of the record struct; a Tensor stands for its address, a TensorMap for that of the map.
        reads: views that the record reads.
        writes: views that the record writes (an accumulating record lists them in `reads` too).
        label: what it is for, shown in tables.
    """

    family: Family
    fields: Mapping[str, Value]
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    label: str

    @property
    def early(self) -> tuple[Tensor, ...]:
        """What the kernel reads before it waits for its predecessors."""
        return tuple(t for key in self.family.early for t in tensors_of(self.fields[key]))


@dataclass
class Program:
    """An ordered list of records over named tensors.

    Order carries meaning: a record sees what the records before it wrote. `Plan` keeps every read and write in that
    order and runs everything else side by side.

    Attributes:
        target: the device the program is made for (kernel families may choose their tiles by it).
        precision: how linear products are computed: `fp32`, or on tensor cores `tf32` or `bf16` with float32 sums.
        storages: every storage, by name.
        launches: the records.
    """

    target: Target
    precision: str = "fp32"
    storages: dict[str, Storage] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    _derived: dict[tuple[Hashable, ...], tuple[tuple[Storage, ...], Tensor]] = field(default_factory=dict)

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: DTypeLike = np.float32,
        *,
        arena: str = ACTIVATIONS,
        data: NDArray[Any] | None = None,
        padded: bool = False,
    ) -> Tensor:
        """Declare a new tensor.

        Args:
            name: unique in the program.
            shape: extents, each at least 1.
            dtype: element type.
            arena: lifetime; tensors of one arena share one allocation.
            data: initial contents of this shape and dtype, uploaded when the program is planned.
            padded: start the rows of a matrix of more than 4 columns at multiples of 4 elements, of more than 32 at
                multiples of 32. The gaps between them hold anything. Not with `data`.

        Raises:
            ProgramError: the name is taken, an extent is not positive, or `data` does not fit.
        """
        dims = tuple(int(n) for n in shape)
        kind = np.dtype(dtype)
        if any(n < 1 for n in dims):
            raise ProgramError(f"tensor '{name}' has shape {dims}; every extent must be at least 1")
        if data is not None and (data.shape != dims or data.dtype != kind):
            raise ProgramError(
                f"tensor '{name}' is {kind} {dims}, but its data is {data.dtype} {data.shape}; convert it first"
            )
        if padded and data is not None:
            raise ProgramError(f"tensor '{name}' cannot have both data and gaps between its rows")
        width = dims[-1] if dims else 1
        if padded and len(dims) == 2 and width > QUAD:
            width = row_stride(width, LINE if width > LINE else QUAD)
        storage = self._add(Storage(name, math.prod(dims[:-1]) * width * kind.itemsize, arena, data))
        return Tensor(storage, 0, dims, kind, width if len(dims) > 1 else 1)

    def launch(
        self,
        family: Family,
        fields: Mapping[str, Value],
        *,
        reads: Sequence[Tensor | None],
        writes: Sequence[Tensor | None],
        label: str,
    ) -> Launch:
        """Append a record. None entries of `reads` and `writes` are left out (optional operands).

        Raises:
            ProgramError: a tensor field is neither read nor written, or a tensor belongs to another program.
        """
        record = self._checked(Launch(family, dict(fields), _present(reads), _present(writes), label))
        self.launches.append(record)
        return record

    def amend(self, record: Launch, fields: Mapping[str, Value], *, writes: Sequence[Tensor]) -> Launch:
        """Give fields of a record of this program other values, and let it write more tensors; returns it anew.

        Raises:
            ProgramError: the program does not have the record (any more), or as `launch`.
        """
        if record not in self.launches:
            raise ProgramError(f"'{record.label}' is no record of this program, or was amended before")
        new = replace(record, fields={**record.fields, **fields}, writes=(*record.writes, *writes))
        self.launches[self.launches.index(record)] = self._checked(new)
        return new

    def _checked(self, record: Launch) -> Launch:
        """The record, if it fits the program; what was derived of tensors that it writes is forgotten."""
        touched = {t.storage for t in (*record.reads, *record.writes)}
        for key, value in record.fields.items():
            stray = [t for t in tensors_of(value) if t.storage not in touched]
            if stray:
                raise ProgramError(
                    f"'{record.label}': field {key} is {stray[0]}, which the record neither reads nor writes; "
                    "declare it"
                )
        for storage in touched:
            if self.storages.get(storage.name) is not storage:
                raise ProgramError(f"'{record.label}': tensor '{storage.name}' belongs to another program")
        written = {t.storage for t in record.writes}
        self._derived = {key: kept for key, kept in self._derived.items() if written.isdisjoint(kept[0])}
        return record

    def derived(self, sources: Sequence[Tensor], kind: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """What records of this program have made of tensors: `make` is called where there is none of this kind, or one
        of the tensors was written since."""
        key = (kind, *((t.storage, t.offset, t.shape, t.ld) for t in sources))
        if key not in self._derived:
            self._derived[key] = tuple(t.storage for t in sources), make()
        return self._derived[key][1]

    def _add(self, storage: Storage) -> Storage:
        if storage.name in self.storages:
            raise ProgramError(f"tensor name '{storage.name}' is taken; names are unique within a program")
        self.storages[storage.name] = storage
        return storage

    def __str__(self) -> str:
        lines = [f"program for {self.target.kind}: {len(self.launches)} records"]
        for record in self.launches:
            reads = ", ".join(t.name for t in record.reads)
            writes = ", ".join(t.name for t in record.writes)
            lines.append(f"  {record.label:<28} {record.family.name:<20} {reads} -> {writes}")
        return "\n".join(lines)


def row_stride(columns: int, unit: int = QUAD) -> int:
    """Row stride of a padded matrix: the number of columns, up to a multiple of `unit`."""
    return -(-columns // unit) * unit


def entries(value: Value) -> tuple[Scalar, ...]:
    """The entries of a field value: itself, or those of an array field."""
    return tuple(value) if isinstance(value, Sequence) else (value,)


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """The tensors among the entries of a field value, by address or by map."""
    named = (v.tensor if isinstance(v, TensorMap) else v for v in entries(value))
    return tuple(t for t in named if isinstance(t, Tensor))


def _present(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors if t is not None)
