"""How fast a program could be at best: work counted from its records, set against what a device was measured to do.

    floor = step_floor(plan.nodes, H200)
    floor.us, floor.bound            # 41.2, "memory"

Three times bound a step from below: its matrix products at the rate of one large product, the bytes that its records
read and write at the rate of a copy, and its longest chain of nodes at the cost of a hand-off. The largest of them, and
the launch, is the floor. It is that of the program as it is: a program that computes less, moves less or is less deep
has a lower one. Bytes count as if nothing stayed in the cache, so a small step whose tensors do may beat that part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxengine.graphs.program import ZEROED, Launch, Region, entries
from fxengine.graphs.schedule import Node, depth

_PRECISIONS = ("tf32", "bf16")
#: Structs of records that pick rows of what they read: they read as many bytes as they write.
_PICKING = frozenset({"Gather"})


@dataclass(frozen=True)
class Ceilings:
    """What a device was measured to do.

    Attributes:
        name: of the device.
        rates: FLOP/s of one large matrix product, by precision.
        bandwidth: bytes/s of a large copy, read and written together.
        node_us: from the end of one node to the work of the next in a chain.
        launch_us: from one replay to the next of a graph with nothing to do.
    """

    name: str
    rates: Mapping[str, float]
    bandwidth: float
    node_us: float
    launch_us: float


#: tf32, bandwidth, node and launch as measured (docs/performance.md): products by `mma.sync`; `wgmma`, by which large
#: ones are made now, may do more, and cuBLAS reached 190e12. Not measured: fp32, 132 multiprocessors of 128 lanes at
#: 1.98 GHz, and bf16, twice tf32 by the data sheet.
H200 = Ceilings("NVIDIA H200", {"fp32": 66.9e12, "tf32": 316e12, "bf16": 632e12}, 4.27e12, 0.9, 2.7)
#: Devices whose ceilings are known, by name.
KNOWN = {H200.name: H200}


@dataclass(frozen=True)
class Work:
    """FLOP of matrix products by precision, and bytes read and written."""

    flop: Mapping[str, float]
    nbytes: int

    @property
    def total_flop(self) -> float:
        """FLOP in all precisions."""
        return sum(self.flop.values())

    def products_us(self, ceilings: Ceilings) -> float:
        """Time of the products."""
        return sum(1e6 * n / ceilings.rates[precision] for precision, n in self.flop.items())

    def memory_us(self, ceilings: Ceilings) -> float:
        """Time of the bytes."""
        return 1e6 * self.nbytes / ceilings.bandwidth

    def us(self, ceilings: Ceilings) -> float:
        """The longer of both: products and memory traffic overlap."""
        return max(self.products_us(ceilings), self.memory_us(ceilings))


@dataclass(frozen=True)
class Floor:
    """The least time of a step, in µs; the three parts of which the largest counts, and the launch."""

    products_us: float
    memory_us: float
    chain_us: float
    launch_us: float

    @property
    def bound(self) -> str:
        """What the floor is made of: `products`, `memory` or `chain`."""
        parts = {"products": self.products_us, "memory": self.memory_us, "chain": self.chain_us}
        return max(parts, key=lambda name: parts[name])

    @property
    def us(self) -> float:
        """The floor."""
        return max(self.products_us, self.memory_us, self.chain_us) + self.launch_us

    def as_dict(self) -> dict[str, float | str]:
        """Plain data for JSON."""
        parts = {name: round(getattr(self, name), 3) for name in (*self.__dataclass_fields__, "us")}
        return {**parts, "bound": self.bound}


@dataclass(frozen=True)
class Level:
    """The nodes of one level: what they took, each measured by itself, and what they had to take.

    Attributes:
        level: number of the level.
        longest_us: time of the slowest node.
        total_us: time of all its nodes in sum.
        work: theirs, together.
        floor_us: a hand-off and the work, at the ceilings.
        slowest: index of the slowest node.
    """

    level: int
    longest_us: float
    total_us: float
    work: Work
    floor_us: float
    slowest: int

    @property
    def share(self) -> float:
        """The floor over the longest node: a small share is time to be gained."""
        return self.floor_us / self.longest_us

    def as_dict(self) -> dict[str, float | int]:
        """Plain data for JSON."""
        return {
            "level": self.level,
            "us": round(self.longest_us, 3),
            "total_us": round(self.total_us, 3),
            "flop": self.work.total_flop,
            "bytes": self.work.nbytes,
            "floor_us": round(self.floor_us, 3),
            "share": round(self.share, 4),
            "slowest": self.slowest,
        }


def _linear(f: Mapping[str, Any]) -> float:
    return 2.0 * f["m"] * f["n"] * (f["k"] + f["k2"])


def _linear_dx(f: Mapping[str, Any]) -> float:
    columns: tuple[Any, ...] = entries(f["n"])
    return 2.0 * f["m"] * f["k"] * sum(columns)


def _iqn(f: Mapping[str, Any]) -> float:
    return 2.0 * f["rows"] * (f["width"] * (f["features"] + f["outputs"]) + f.get("cosines", 0) * f["features"])


def _heads(f: Mapping[str, Any]) -> float:
    outputs = f["atoms"] * (f["value_depth"] + f["depth"] * f["actions"])
    return 2.0 * f["rows"] * (outputs + 2 * f["bar_depth"])


def _iqn_backward(f: Mapping[str, Any]) -> float:
    """phi again, the gradient of what it is mixed with, and where they are wanted the weights' gradients."""
    first, second, last = f["cosines"] * f["features"], f["features"] * f["width"], f["width"] * f["outputs"]
    weights = (first + second if f["partial"] else 0) + (last if f.get("partial_iq2") else 0)
    return 2.0 * f["rows"] * (first + second + last + weights)


def _iqn_state(f: Mapping[str, Any]) -> float:
    return _iqn_backward({**f, "rows": f["samples"] * f["quantiles"], "partial": 0})


def _attention(f: Mapping[str, Any]) -> float:
    rows, inner = f["batch"] * f["tokens"], f["attn"]
    return 2.0 * rows * inner * (4 * f["features"] + 2 * f["tokens"])


def _attention_backward(f: Mapping[str, Any]) -> float:
    return 2.0 * f["batch"] * f["tokens"] * f["attn"] * (f["features"] + 4 * f["tokens"])


#: FLOP of a record's matrix products from its fields, by the name of its struct. All other records count with their
#: bytes alone.
PRODUCTS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "LinearForward": _linear,
    "LinearDx": _linear_dx,
    "LinearDw": _linear,
    "Heads": _heads,
    "IqnForward": _iqn,
    "IqnWarpgroup": _iqn,
    "IqnBackward": _iqn_backward,
    "IqnWarpgroupBackward": _iqn_backward,
    "IqnState": _iqn_state,
    "AttentionForward": _attention,
    "AttentionBackward": _attention_backward,
}


def record_flop(record: Launch) -> float:
    """FLOP of the record's matrix products; 0 where its family has none."""
    count = PRODUCTS.get(record.family.struct)
    return count(record.fields) if count else 0.0


def record_precision(record: Launch) -> str:
    """Precision of its products, which the name of its family tells."""
    return next((p for p in _PRECISIONS if p in record.family.name.split("_")), "fp32")


def node_work(node: Node, cleared: int = 0) -> Work:
    """Work of a node; `cleared` is the size of the zeroed arena, which the memset writes."""
    flop: dict[str, float] = defaultdict(float)
    for record in node.records:
        flop[record_precision(record)] += record_flop(record)
    picked = [r for r in node.records if r.family.struct in _PICKING]
    others = [r for r in node.records if r.family.struct not in _PICKING]
    # A tensor that several records of a launch read is read once.
    nbytes = _covered(t.region() for r in others for t in r.reads) + _covered(
        t.region() for r in others for t in r.writes
    )
    nbytes += 2 * _covered(t.region() for r in picked for t in r.writes)
    return Work({p: n for p, n in flop.items() if n}, nbytes if node.parts else cleared)


def step_work(nodes: Sequence[Node]) -> Work:
    """Work of all nodes."""
    return _sum(node_work(node, cleared_bytes(nodes)) for node in nodes)


def step_floor(nodes: Sequence[Node], ceilings: Ceilings) -> Floor:
    """The floor of a schedule."""
    work = step_work(nodes)
    chain = depth(nodes) * ceilings.node_us
    return Floor(work.products_us(ceilings), work.memory_us(ceilings), chain, ceilings.launch_us)


def levels(nodes: Sequence[Node], times: Sequence[float], ceilings: Ceilings) -> list[Level]:
    """The levels of a schedule, `times` being the µs of every node by itself (`node_times`)."""
    cleared, found = cleared_bytes(nodes), []
    for level in range(depth(nodes)):
        members = [i for i, node in enumerate(nodes) if node.level == level]
        work = _sum(node_work(nodes[i], cleared) for i in members)
        slowest = max(members, key=lambda i: times[i])
        total, floor = sum(times[i] for i in members), ceilings.node_us + work.us(ceilings)
        found.append(Level(level, times[slowest], total, work, floor, slowest))
    return found


def cleared_bytes(nodes: Sequence[Node]) -> int:
    """Bytes of the zeroed storages that the nodes touch."""
    tensors = [t for node in nodes for r in node.records for t in (*r.reads, *r.writes)]
    return sum({t.storage.name: t.storage.nbytes for t in tensors if t.storage.arena == ZEROED}.values())


def _covered(regions: Iterable[Region]) -> int:
    """Bytes of distinct regions."""
    return sum(region.width * region.rows for region in set(regions))


def _sum(parts: Iterable[Work]) -> Work:
    flop: dict[str, float] = defaultdict(float)
    nbytes = 0
    for part in parts:
        for precision, n in part.flop.items():
            flop[precision] += n
        nbytes += part.nbytes
    return Work(dict(flop), nbytes)
