"""Reconstruction, prediction and ensemble heads on h2: own parameters at full scale, trunk scaled (docs/step.md §3)."""

from __future__ import annotations

from collections.abc import Collection

from fxengine.config import StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.train.groups import linear_specs

#: The heads, by the name of their loss: its signal w_<name> scales what flows into the trunk.
HEADS = ("rec", "pred", "ens")


def widths(config: StepConfig) -> dict[str, int]:
    """Output columns of the heads that the configuration has."""
    sizes = {
        "rec": config.state if config.rec else 0,
        "pred": config.h2 if config.pred else 0,
        "ens": config.ens * config.branches[0] if config.ens else 0,
    }
    return {name: width for name, width in sizes.items() if width}


def declare(step: StepBuilder, config: StepConfig) -> None:
    """Group decoders (10), if any head is there."""
    specs = [spec for name, width in widths(config).items() for spec in linear_specs(name, width, config.h2)]
    if specs:
        step.group("decoders", specs)


def forward(p: Pass, config: StepConfig, h2: Tensor, heads: Collection[str]) -> dict[str, Tensor]:
    """Outputs of those of the heads that exist, by name: rec [B, S], pred [B, H2], ens [B, Ens·n_0]."""
    return {
        name: p.linear(h2, name, input_scale=p.step.signal(f"w_{name}"), name=name)
        for name in widths(config)
        if name in heads
    }
