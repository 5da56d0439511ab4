"""A program with a place in memory: arenas, record tables, uncaptured execution, capture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine.driver import (
    Arena,
    Arguments,
    Buffer,
    Capture,
    Device,
    Kernel,
    KernelSource,
    MappedBuffer,
    Stream,
    StridedBuffer,
    capture,
    tensor_map,
)
from fxengine.driver.errors import ClosedError
from fxengine.graphs.fusion import Fusion, fused_kernel, fused_shared, fused_source
from fxengine.graphs.program import (
    MAPPED,
    ZEROED,
    Family,
    Launch,
    Program,
    ProgramError,
    Storage,
    Tensor,
    TensorMap,
    Value,
    entries,
)
from fxengine.graphs.schedule import Node, schedule
from fxengine.graphs.stepgraph import StepGraph

_ALIGNMENT = 256


@dataclass(frozen=True)
class Step:
    """A node ready to run: the kernel with its table bound, or the memset."""

    node: Node
    kernel: Kernel | None
    arguments: Arguments | None
    blocks: int
    shared: int


class Plan:
    """Allocates a program's tensors, uploads its record tables, and runs or captures it.

    One arena per lifetime; everything that must be cleared lies in one arena, so that one memset node clears it.
    The plan owns the memory: keep it as long as its buffers or graphs are in use.

    Args:
        program: the program to place. It must not grow afterwards.
        device: where it runs.
        guard: put guard words between the buffers of every arena; `check_guards()` then finds stray writes.
        base: a plan whose memory this one uses for tensors of the same name (an evaluation, a diagnostic variant of
            the same step). It must stay open as long as this plan is used.
        share: arenas of which tensors are taken from the base; None for all.
        fuse: let small launches of different families at one level share a kernel that is generated for them. It halves
            the number of nodes and with it the host's cost of a launch; the device is about as fast either way, and so
            are the bits. Costs compile time at the first use of a configuration.

    Raises:
        ProgramError: a record's fields do not match its kernel's struct.
        CudaError: out of memory, or another driver failure.
    """

    def __init__(
        self,
        program: Program,
        device: Device,
        *,
        guard: bool = False,
        base: Plan | None = None,
        share: Collection[str] | None = None,
        fuse: bool = False,
    ) -> None:
        self.program = program
        self.device = device
        self.nodes = schedule(program, fuses=Fusion(device).fuses if fuse else None)
        self._arenas: dict[str, Arena] = {}
        self._mapped: dict[str, MappedBuffer] = {}
        self._owned_mapped: dict[str, MappedBuffer] = {}
        self._buffers: dict[str, Buffer] = {}
        self._maps: dict[TensorMap, int] = {}
        self._cleared: Arena | None = None
        self._closed = False
        try:
            self._place(guard, self._borrow(base, share) if base is not None else frozenset())
            self._steps = self._bind(guard)
        except BaseException:
            self.close()
            raise

    # -- memory ------------------------------------------------------------------------------------------------

    def buffer(self, tensor: Tensor | str) -> Buffer:
        """Device buffer of a tensor (or of a whole storage, by name).

        That of a tensor with gaps between its rows can be read and written, and nothing else.

        Raises:
            ProgramError: the program has no such tensor, or it is mapped memory (use `mapped`).
        """
        self._check_open()
        name = tensor if isinstance(tensor, str) else tensor.name
        if name not in self._buffers:
            known = "it is mapped memory, use mapped()" if name in self._mapped else "the program has no such tensor"
            raise ProgramError(f"no device buffer for '{name}': {known}")
        whole = self._buffers[name]
        if isinstance(tensor, str):
            return whole
        start = tensor.offset * tensor.dtype.itemsize
        if tensor.contiguous:
            return whole.view(start, tensor.shape, tensor.dtype, tensor.name)
        rows, columns = tensor.shape
        span = whole.view(start, ((rows - 1) * tensor.ld + columns,), tensor.dtype, tensor.name)
        return StridedBuffer(span, tensor.shape, tensor.ld)

    def mapped(self, name: str) -> MappedBuffer:
        """Mapped-pinned buffer of a tensor in the `mapped` arena, with its NumPy view."""
        self._check_open()
        try:
            return self._mapped[name]
        except KeyError:
            raise ProgramError(f"no mapped buffer '{name}'; there are {sorted(self._mapped)}") from None

    def arena_bytes(self) -> dict[str, int]:
        """Bytes per arena."""
        sizes = {name: arena.nbytes for name, arena in self._arenas.items()}
        if self._owned_mapped:
            sizes[MAPPED] = sum(m.nbytes for m in self._owned_mapped.values())
        return dict(sorted(sizes.items()))

    def check_guards(self) -> None:
        """Raise if any write went past a buffer (plans made with guard=True)."""
        for arena in self._arenas.values():
            arena.check_guards()

    # -- execution ---------------------------------------------------------------------------------------------

    def run(self, *, stream: Stream) -> None:
        """Run the program launch by launch, without a graph. Same kernels, same tables, same bits."""
        self._check_open()
        with self.device.activate():
            for step in self._steps:
                self._issue(step, stream, pdl=False)

    def capture(self, *, stream: Stream) -> StepGraph:
        """Capture the program as one CUDA graph with exact edges and instantiate it."""
        return self.capture_nodes(range(len(self._steps)), stream=stream)

    def capture_nodes(self, indices: Sequence[int], *, stream: Stream, chain: int = 1) -> StepGraph:
        """Capture some of the nodes, `chain` times one after another (for timing a node by itself)."""
        return _capture_all([(self, indices)] * chain, stream)

    def _record(
        self, recording: Capture, indices: Sequence[int], stream: Stream, tail: Sequence[tuple[Any, bool]]
    ) -> list[tuple[Any, bool]]:
        """Capture some of the nodes behind `tail`; returns those that nothing follows, and whether they are kernels."""
        captured: dict[int, tuple[Any, bool]] = {}
        for i in indices:
            step = self._steps[i]
            kernel = step.kernel is not None
            depends: Sequence[tuple[Any, bool]] = [captured[d] for d in step.node.after if d in captured]
            overlaps = step.node.overlaps and bool(depends)
            if not depends:
                depends = tail
                overlaps = kernel and bool(tail) and all(is_kernel for _, is_kernel in tail)
            if tail and any(record.early for record in step.node.records):
                overlaps = False  # what came before in this graph may have written what is read early
            recording.set_dependencies([node for node, _ in depends], programmatic=overlaps)
            self._issue(step, stream, pdl=overlaps)
            captured[i] = recording.last_node(), kernel
        return [captured[i] for i in indices if not self._followed(i, indices)]

    def _followed(self, index: int, indices: Sequence[int]) -> bool:
        return any(index in self._steps[j].node.after for j in indices)

    def _issue(self, step: Step, stream: Stream, *, pdl: bool) -> None:
        if step.kernel is None or step.arguments is None:
            assert self._cleared is not None  # the schedule has a memset only if something is to be cleared
            clear = self.device.driver.cuMemsetD32Async
            clear(self._cleared.address, 0, self._cleared.nbytes // 4, stream.handle)
            return
        step.kernel.launch(step.blocks, step.kernel.threads, step.arguments, stream=stream, shared=step.shared, pdl=pdl)

    # -- construction ------------------------------------------------------------------------------------------

    def _borrow(self, base: Plan, share: Collection[str] | None) -> frozenset[str]:
        """Take the base's memory for tensors of the same name and arena; returns their names."""
        names = set()
        for storage in self.program.storages.values():
            theirs = base.program.storages.get(storage.name)
            if theirs is None or not (share is None or storage.arena in share):
                continue
            if (theirs.nbytes, theirs.arena) != (storage.nbytes, storage.arena):
                raise ProgramError(
                    f"tensor '{storage.name}' has {storage.nbytes} bytes in arena {storage.arena}, but "
                    f"{theirs.nbytes} in {theirs.arena} in the plan whose memory it is to use"
                )
            home: dict[str, Any] = self._mapped if storage.arena == MAPPED else self._buffers
            home[storage.name] = base.mapped(storage.name) if storage.arena == MAPPED else base.buffer(storage.name)
            names.add(storage.name)
            if storage.arena == ZEROED:
                self._cleared = base._cleared
        return frozenset(names)

    def _place(self, guard: bool, borrowed: Collection[str]) -> None:
        by_arena: dict[str, list[Storage]] = defaultdict(list)
        own = [s for s in self.program.storages.values() if s.name not in borrowed]
        for storage in own:
            if storage.arena == MAPPED:
                self._mapped[storage.name] = self._owned_mapped[storage.name] = MappedBuffer(
                    self.device, (storage.nbytes,), np.uint8, name=storage.name
                )
            else:
                by_arena[storage.arena].append(storage)
        if ZEROED in by_arena and self._cleared is not None:
            raise ProgramError(
                f"'{by_arena[ZEROED][0].name}' is to be cleared, but not by the memset of the plan whose memory is used"
            )
        for name, storages in by_arena.items():
            nbytes = Arena.required(tuple(s.nbytes for s in storages), guard=guard)
            # The one memset covers the whole zeroed arena, so its guard words are zeros.
            pattern = {"guard_byte": 0} if name == ZEROED else {}
            arena = self._arenas[name] = Arena(self.device, name, nbytes, guard=guard, **pattern)
            for storage in storages:
                self._buffers[storage.name] = arena.place(storage.name, (storage.nbytes,), np.uint8)
            if name == ZEROED:
                self._cleared = arena
        for storage in own:
            if storage.data is not None:
                self._buffers[storage.name].write(np.ascontiguousarray(storage.data).reshape(-1).view(np.uint8))

    def _bind(self, guard: bool) -> tuple[Step, ...]:
        families = dict.fromkeys(p.family for node in self.nodes for p in node.parts)
        sources = {family: _source(family) for family in families}
        fused = [fused_source(node.parts) for node in self.nodes if len(node.parts) > 1]
        self.device.compile_all([*sources.values(), *fused])
        self._place_maps()
        bound = [self._kernel(node, sources) for node in self.nodes]
        sizes = [table.nbytes for _, tables, _ in bound for table in tables]
        arena = self._arenas["tables"] = Arena(
            self.device, "tables", Arena.required(tuple(sizes), guard=guard), guard=guard
        )
        steps = []
        for index, (node, (kernel, tables, blocks)) in enumerate(zip(self.nodes, bound, strict=True)):
            if kernel is None:
                steps.append(Step(node, None, None, 0, 0))
                continue
            arguments: list[int] = []
            for part, table in enumerate(tables):
                place = arena.place(f"table {index}.{part}", (table.nbytes,), np.uint8)
                place.write(table.view(np.uint8).reshape(-1))
                arguments += [place.address, len(table)]
                if len(tables) > 1:  # a fused kernel also needs to know where the blocks of a part end
                    arguments.append(int(table["first_tile"][-1] + table["tiles"][-1]))
            shared = max(part.family.shared for part in node.parts)
            if len(tables) > 1:
                shared = max(shared, fused_shared(self.device, node.parts))
            if shared:
                kernel.set_dynamic_shared(shared)
            steps.append(Step(node, kernel, kernel.bind(*arguments), blocks, shared))
        return tuple(steps)

    def _place_maps(self) -> None:
        """Put the tensor maps that records ask for into device memory."""
        values = (v for record in self.program.launches for field in record.fields.values() for v in entries(field))
        maps = [v for v in values if isinstance(v, TensorMap)]
        if not maps:
            return
        with self.device.activate():
            encoded = [
                tensor_map(
                    self.device.driver,
                    self._address(v.tensor),
                    (v.tensor.shape[0], v.tensor.shape[1]),
                    stride=v.tensor.ld * v.tensor.dtype.itemsize,
                    box_rows=v.box_rows,
                    rounded=v.rounded,
                )
                for v in maps
            ]
        self._maps = dict(zip(maps, self.device.tensor_maps.place(encoded), strict=True))

    def _kernel(
        self, node: Node, sources: Mapping[Family, str | KernelSource]
    ) -> tuple[Kernel | None, list[NDArray[Any]], int]:
        """Kernel of a node, record tables of its parts, and the number of blocks."""
        tables: list[NDArray[Any]] = []
        blocks = 0
        for part in node.parts:
            module = self.device.module(sources[part.family])
            table, blocks = self._table(part.records, module.struct(part.family.struct), blocks)
            tables.append(table)
        if not tables:
            return None, [], 0
        if len(tables) > 1:
            return fused_kernel(self.device, node.parts), tables, blocks
        family = node.parts[0].family
        return self.device.module(sources[family]).kernel(family.kernel), tables, blocks

    def _table(self, records: Sequence[Launch], struct: np.dtype[Any], blocks: int) -> tuple[NDArray[Any], int]:
        """Records as the kernel reads them, from block number `blocks` on; and the number of the block after them."""
        expected = set(struct.names or ()) - {"first_tile", "tiles"}
        table = np.zeros(len(records), struct)
        for row, record in zip(table, records, strict=True):
            if set(record.fields) != expected:
                missing, unknown = (
                    sorted(expected - set(record.fields)),
                    sorted(set(record.fields) - expected),
                )
                raise ProgramError(
                    f"'{record.label}': fields do not match struct {record.family.struct} of {record.family.source}; "
                    f"missing {missing}, unknown {unknown}"
                )
            tiles = record.family.tiles(record.fields)
            if tiles < 1:
                raise ProgramError(f"'{record.label}': {record.family.name} needs at least one block, got {tiles}")
            row["first_tile"], row["tiles"] = blocks, tiles
            for key, value in record.fields.items():
                row[key] = self._field(value, struct[key], record)
            blocks += tiles
        return table, blocks

    def _field(self, value: Value, dtype: np.dtype[Any], record: Launch) -> Any:
        """What a field of the table holds: numbers as they are, tensors as addresses, arrays padded with 0."""
        numbers = [self._address(v) if isinstance(v, Tensor | TensorMap) else v for v in entries(value)]
        if not isinstance(value, Sequence):
            return numbers[0]
        length = int(np.prod(dtype.shape))
        if len(numbers) > length:
            raise ProgramError(f"'{record.label}': {len(numbers)} values given for an array field of {length}")
        return np.array(numbers + [0] * (length - len(numbers)), dtype.base)

    def _address(self, value: Tensor | TensorMap) -> int:
        if isinstance(value, TensorMap):
            return self._maps[value]
        home = self._mapped if value.storage.arena == MAPPED else self._buffers
        return home[value.name].address + value.offset * value.dtype.itemsize

    # -- lifetime ----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the plan is closed")

    def close(self) -> None:
        """Free the plan's memory. Idempotent; graphs captured from it must not be launched afterwards."""
        if self._closed:
            return
        self._closed = True
        for mapped in self._owned_mapped.values():
            mapped.close()
        for arena in self._arenas.values():
            arena.close()

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def capture_sequence(plans: Sequence[Plan], *, stream: Stream) -> StepGraph:
    """Capture programs as one graph, each behind all of the one before it. The plans must stay open."""
    return _capture_all([(plan, range(len(plan.nodes))) for plan in plans], stream)


def _source(family: Family) -> str | KernelSource:
    return KernelSource.defining(family.source, dict(family.defines)) if family.defines else family.source


def _capture_all(parts: Sequence[tuple[Plan, Sequence[int]]], stream: Stream) -> StepGraph:
    """Capture nodes of plans, part behind part. Counts of the graph show the memory of the first plan."""
    first = parts[0][0]
    for plan, _ in parts:
        plan._check_open()
    with first.device.activate():
        with capture(stream) as recording:
            tail: list[tuple[Any, bool]] = []
            for plan, indices in parts:
                tail = plan._record(recording, indices, stream, tail)
            recording.set_dependencies([node for node, _ in tail])
        return StepGraph(first, recording.graph, tuple(plan._steps[i] for plan, indices in parts for i in indices))
