"""The step as data, and what becomes of it: program, plan, captured graph."""

from fxengine.graphs.plan import Plan
from fxengine.graphs.program import (
    ACTIVATIONS,
    CONSTANTS,
    MAPPED,
    ZEROED,
    Family,
    Launch,
    Program,
    ProgramError,
    Tensor,
    TensorMap,
    row_stride,
)
from fxengine.graphs.schedule import Node, Part, depth, schedule
from fxengine.graphs.stepgraph import Census, StepGraph, node_times

__all__ = [
    "ACTIVATIONS",
    "CONSTANTS",
    "MAPPED",
    "ZEROED",
    "Census",
    "Family",
    "Launch",
    "Node",
    "Part",
    "Plan",
    "Program",
    "ProgramError",
    "StepGraph",
    "Tensor",
    "TensorMap",
    "depth",
    "node_times",
    "row_stride",
    "schedule",
]
