"""The objects behind the handles of the simulated device."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver as cu

from fxengine.driver.sim.runtime import Operation

__all__ = [
    "Edge",
    "Event",
    "Function",
    "Graph",
    "GraphExec",
    "LoadedModule",
    "Node",
    "Record",
    "Sequence",
    "Stream",
]


@dataclass(eq=False)
class Function:
    """A kernel of a loaded module."""

    handle: int
    name: str
    kernel: int
    """Address of its KernelRecord."""
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    max_threads: int
    static_shared: int
    max_dynamic: int
    """Bytes of dynamic shared memory a launch may ask for now."""
    module: LoadedModule

    def pack(self, pointers: int) -> tuple[int, Any]:
        """Copy the argument values behind an array of pointers; (address of a like array, what keeps it alive)."""
        count = len(self.sizes)
        if count == 0:
            return 0, None
        given = (ctypes.c_size_t * count).from_address(pointers)
        block = ctypes.create_string_buffer(self.offsets[-1] + self.sizes[-1] + 16)
        base = (ctypes.addressof(block) + 15) & ~15
        for i in range(count):
            ctypes.memmove(base + self.offsets[i], given[i], self.sizes[i])
        copies = (ctypes.c_void_p * count)(*(base + offset for offset in self.offsets))
        return ctypes.addressof(copies), (block, copies)


@dataclass(eq=False)
class LoadedModule:
    """A loaded shared object."""

    handle: int
    path: str
    library: Any
    shared: dict[str, int]
    """Static shared memory of each kernel, in bytes."""
    functions: dict[str, Function] = field(default_factory=dict)


@dataclass(eq=False)
class Record:
    """One recording of an event: done once its stream has come to it."""

    done: bool = False
    time_ns: int = 0


@dataclass(eq=False)
class Event:
    """An event: its latest recording, on a stream or inside a capture."""

    handle: int
    timing: bool
    record: Record | None = None
    sequence: Sequence | None = None
    """The capture it was last recorded in."""
    edges: list[Edge] = field(default_factory=list)


@dataclass(eq=False)
class Stream:
    """A stream, its queued work, and its part in a capture."""

    handle: int
    blocking: bool
    queue: deque[Callable[[], None] | Record] = field(default_factory=deque)
    """Work to run; a Record stands for waiting until it is done."""
    sequence: Sequence | None = None
    edges: list[Edge] = field(default_factory=list)
    """What the next captured node depends on."""


@dataclass(eq=False)
class Sequence:
    """A capture from its begin to its end."""

    number: int
    graph: Graph
    origin: Stream
    mode: cu.CUstreamCaptureMode
    thread: int
    streams: list[Stream]
    invalidated: bool = False
    ended: bool = False


@dataclass(eq=False)
class Node:
    """A graph node: one operation and what it depends on."""

    handle: int
    graph: Graph
    kind: cu.CUgraphNodeType
    operation: Operation
    edges: list[Edge]
    function: Function | None = None
    keep: Any = None
    fill: tuple[int, int, int] = (0, 0, 0)
    """Of a memset: destination, value, words."""


@dataclass(frozen=True)
class Edge:
    """A dependency on a node; `kind` 1 is programmatic."""

    node: Node
    kind: int = 0
    from_port: int = 0
    to_port: int = 0


@dataclass(eq=False)
class Graph:
    """A graph; nodes are in creation order, which respects every edge."""

    handle: int
    nodes: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class GraphExec:
    """An executable graph: its own copy of the operations, which outlives the graph."""

    handle: int
    nodes: list[Node]
    successors: list[list[int]]
    """By node index."""
    waiting: list[int]
    """By node index: how many nodes it depends on."""
    operations: Any = None
    """Array of Operation in creation order."""
    address: int = 0
    modules: set[int] = field(default_factory=set)
