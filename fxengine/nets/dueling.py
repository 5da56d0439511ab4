"""Branching dueling C51 heads with conditioned inputs (docs/step.md §2).

Branch 0 (direction) sees the wire of the auxiliary nets beside h2, branch 1 (magnitude) the softmax of the direction's
values, without a gradient, and every later branch an embedding of the order flow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fxengine.config import StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.ops import crossentropy, dueling, finish
from fxengine.ops.dueling import Heads
from fxengine.ops.finish import Unfinished
from fxengine.train.groups import linear_specs


@dataclass(frozen=True)
class BranchedHeads:
    """Outputs of the heads in one pass.

    Attributes:
        heads: value and advantage outputs, q [B, Σn_d] and log-normalisers.
        best: int32 [B, D] greedy actions; None unless asked for.
    """

    heads: Heads
    best: Tensor | None

    @property
    def v(self) -> Tensor:
        """The value head's output [B, K]; plain heads have none."""
        assert self.heads.v is not None
        return self.heads.v

    def q(self, branch: int) -> Tensor:
        """q of one branch [B, n_d], a view."""
        first = self.heads.offsets[branch]
        return self.heads.q.columns(first, first + self.heads.sizes[branch])


def extra_columns(config: StepConfig, branch: int) -> int:
    """Columns that a branch reads beside h2."""
    if branch == 0:
        return 1 if config.aux_h else 0
    if branch == 1:
        return config.branches[0]
    return config.ofi_embed if config.has_ofi else 0


def declare(step: StepBuilder, config: StepConfig) -> None:
    """Groups value (1) and branches (2), with target copies; one spectral norm per w_b{d}fc."""
    value = [*linear_specs("v1", config.value_h, config.h2), *linear_specs("v2", config.atoms, config.value_h)]
    step.group("value", value, target=True)
    branches = []
    for d, n in enumerate(config.branches):
        branches += linear_specs(f"b{d}fc", config.adv_h, config.h2 + extra_columns(config, d))
        branches += linear_specs(f"b{d}out", n * config.atoms, config.adv_h)
        step.limit_spectral_norm(f"w_b{d}fc")
    if config.has_ofi:
        branches += linear_specs("ofi", config.ofi_embed, config.ofi)
    step.group("branches", branches, target=True)


def _siblings(p: Pass, config: StepConfig) -> int:
    """First layers of the heads, of all passes of the step: they run side by side."""
    return (1 + len(config.branches)) * (3 if p.step.train else 1)


def begin(p: Pass, config: StepConfig, h2: Tensor) -> dict[int, Unfinished]:
    """First layers of branches 0 and 1 as far as h2 [B, H2] makes them, by branch.

    The wire and the policy come late: the launches that make them finish these layers, instead of one more launch each.
    Left out are layers without such columns, and those that are too large for it.
    """
    layers = {0: crossentropy.LAYERS, 1: 1}  # that one record finishes
    extra = {d: extra_columns(config, d) for d in layers if d < len(config.branches)}
    return {
        d: p.begin_linear(h2, f"b{d}fc", siblings=_siblings(p, config), name=f"b{d}fc")
        for d, columns in extra.items()
        if columns and finish.fits(config.adv_h, columns, layers[d])
    }


def forward(
    p: Pass,
    config: StepConfig,
    h2: Tensor,
    *,
    wire: Tensor | None,
    ofi: Tensor | None,
    begun: Mapping[int, Unfinished] | None = None,
    greedy: bool = False,
) -> BranchedHeads:
    """All heads.

    Args:
        p: the pass.
        config: sizes.
        h2: [B, H2].
        wire: [B, 1]; None without auxiliary nets.
        ofi: order flow [B, O], or None.
        begun: from `begin`; branch 0 of it is finished by who makes the wire. None: every first layer is one product.
        greedy: give the greedy actions too.
    """
    begun = begun or {}
    rows, total = h2.shape[0], sum(config.branches)
    siblings = _siblings(p, config)
    hidden = p.linear(h2, "v1", activation="relu", siblings=siblings, name="v1")
    v = p.linear(hidden, "v2", name="v2")
    q, lse = p.tensor("q", rows, total), p.tensor("lse", rows, total)
    best = p.tensor("best", rows, len(config.branches), dtype=np.int32) if greedy else None
    policy = p.tensor("policy", rows, config.branches[0]) if len(config.branches) > 1 else None
    flow = p.linear(ofi, "ofi", activation="tanh", name="ofi_embed") if ofi is not None else None

    adv, first = [], 0
    for d, n in enumerate(config.branches):
        beside = wire if d == 0 else policy if d == 1 else flow
        x, y = h2 if beside is None else (h2, beside), begun[d].y if d in begun else None
        hidden = p.linear(x, f"b{d}fc", activation="relu", y=y, siblings=siblings, name=f"b{d}fc")
        adv.append(p.linear(hidden, f"b{d}out", name=f"b{d}out"))
        dueling.forward(
            p.program,
            v,
            adv[d],
            q.columns(first, first + n),
            lse=lse.columns(first, first + n),
            policy=policy if d == 0 else None,
            best=best.columns(d, d + 1) if best else None,
            finishes=begun.get(1) if d == 0 else None,
            v_min=config.v_min,
            v_max=config.v_max,
            label=f"q{d}{p.suffix}",
        )
        first += n
    return BranchedHeads(Heads(v, tuple(adv), q, lse), best)
