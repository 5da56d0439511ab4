"""Branching dueling C51 heads with conditioned inputs (docs/step.md §2).

Branch 0 (direction) sees the wire of the auxiliary nets beside h2, branch 1 (magnitude) the softmax of the direction's
values, without a gradient, and every later branch an embedding of the order flow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fxengine.config import StepConfig
from fxengine.graphs import Tensor
from fxengine.nets.builder import StepBuilder
from fxengine.nets.passes import Pass
from fxengine.ops import dueling, heads
from fxengine.ops.dueling import Heads
from fxengine.ops.heads import Wire
from fxengine.train.groups import linear_specs

#: Branches whose last input columns, of the wire and of the policy, come late.
_LATE = (0, 1)


@dataclass(frozen=True)
class BranchedHeads:
    """Outputs of the heads in one pass.

    Attributes:
        q: [B, Σn_d].
        branches: actions n_d of each branch.
        outputs: value and advantage outputs, q and log-normalisers; None where only q and best were asked for.
        best: int32 [B, D] greedy actions; None unless asked for.
    """

    q: Tensor
    branches: tuple[int, ...]
    outputs: Heads | None
    best: Tensor | None

    @property
    def heads(self) -> Heads:
        """What the losses read."""
        assert self.outputs is not None
        return self.outputs

    @property
    def v(self) -> Tensor:
        """The value head's output [B, K]; plain heads have none."""
        assert self.heads.v is not None
        return self.heads.v

    def branch(self, d: int) -> Tensor:
        """q of one branch [B, n_d], a view."""
        return _columns(self.q, self.branches, d)


def _columns(matrix: Tensor, branches: Sequence[int], d: int) -> Tensor:
    """The columns of a branch in a matrix over all actions."""
    first = sum(branches[:d])
    return matrix.columns(first, first + branches[d])


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


def fuses(step: StepBuilder, config: StepConfig) -> bool:
    """Whether a launch can make a branch from its hidden layer on (`forward`)."""
    program = step.program
    return all(
        heads.fits(
            program.target,
            program.precision,
            heads.Sizes(config.adv_h, config.value_h, config.atoms, n, extra_columns(config, d) if d in _LATE else 0),
        )
        for d, n in enumerate(config.branches)
    )


def forward(
    p: Pass,
    config: StepConfig,
    h2: Tensor,
    *,
    wire: Tensor | Wire | None,
    ofi: Tensor | None,
    greedy: bool = False,
    fused: bool = False,
) -> BranchedHeads:
    """All heads.

    Args:
        p: the pass.
        config: sizes.
        h2: [B, H2].
        wire: [B, 1], or fused what it is to be made of; None without auxiliary nets.
        ofi: order flow [B, O], or None.
        greedy: give the greedy actions too; fused, they and q are all there is.
        fused: what follows the hidden layer of a branch is one launch (`fuses`).
    """
    rows, sizes = h2.shape[0], config.branches
    flow = None
    if ofi is not None:  # in the launch of the trunk's first layer, so that the heads have one node less to wait for
        flow = p.linear(ofi, "ofi", activation="tanh", beside=(config.h1, config.state), name="ofi_embed")
    start = _Start(
        flow=flow,
        value_hidden=p.linear(h2, "v1", activation="relu", siblings=_siblings(config), name="v1"),
        q=p.tensor("q", rows, sum(sizes)),
        best=p.tensor("best", rows, len(sizes), dtype=np.int32) if greedy else None,
        policy=p.tensor("policy", rows, sizes[0]) if len(sizes) > 1 else None,
    )
    if fused:
        assert not isinstance(wire, Tensor)
        return _fused(p, config, h2, wire, start)
    assert not isinstance(wire, Wire)
    return _layer_by_layer(p, config, h2, wire, start)


@dataclass(frozen=True)
class _Start:
    """What the heads begin with, however the rest is made: embedded order flow, the value head's hidden layer, and
    places for the values [B, Σn_d], the greedy actions (None: not wanted) and branch 0's policy."""

    flow: Tensor | None
    value_hidden: Tensor
    q: Tensor
    best: Tensor | None
    policy: Tensor | None

    def best_of(self, d: int) -> Tensor | None:
        return self.best.columns(d, d + 1) if self.best else None


def _layer_by_layer(p: Pass, config: StepConfig, h2: Tensor, wire: Tensor | None, start: _Start) -> BranchedHeads:
    q, policy, sizes, siblings = start.q, start.policy, config.branches, _siblings(config)
    v = p.linear(start.value_hidden, "v2", name="v2")
    lse = p.tensor("lse", *q.shape)
    adv = []
    for d in range(len(sizes)):
        beside = wire if d == 0 else policy if d == 1 else start.flow
        x = h2 if beside is None else (h2, beside)
        hidden = p.linear(x, f"b{d}fc", activation="relu", siblings=siblings, name=f"b{d}fc")
        adv.append(p.linear(hidden, f"b{d}out", name=f"b{d}out"))
        dueling.forward(
            p.program,
            v,
            adv[d],
            _columns(q, sizes, d),
            lse=_columns(lse, sizes, d),
            policy=policy if d == 0 else None,
            best=start.best_of(d),
            v_min=config.v_min,
            v_max=config.v_max,
            label=f"q{d}{p.suffix}",
        )
    return BranchedHeads(q, sizes, Heads(v, tuple(adv), q, lse), start.best)


def _fused(p: Pass, config: StepConfig, h2: Tensor, wire: Wire | None, start: _Start) -> BranchedHeads:
    """The wire and the policy come late: who reads them finishes its hidden layer."""
    q, policy, sizes, siblings = start.q, start.policy, config.branches, _siblings(config)
    rows, greedy = q.shape[0], start.best is not None
    v = lse = None
    if not greedy:
        v = p.linear(start.value_hidden, "v2", y=p.tensor("v2", rows, config.atoms), name="v2")
        lse = p.tensor("lse", *q.shape)
    outputs = []
    for d, n in enumerate(sizes):
        y = late = None
        beside: Wire | Tensor | None = None
        x: Tensor | None = start.flow if d not in _LATE else None
        if d in _LATE and extra_columns(config, d):
            y, late = p.begin_linear(h2, f"b{d}fc", siblings=siblings, name=f"b{d}fc")
            beside = wire if d == 0 else policy
            x = beside.wire if isinstance(beside, Wire) else beside
        hidden = p.linear(
            h2 if x is None else (h2, x), f"b{d}fc", activation="relu", y=y, siblings=siblings, name=f"b{d}fc"
        )
        adv = None
        if not greedy:
            adv = p.linear(hidden, f"b{d}out", y=p.tensor(f"b{d}out", rows, n * config.atoms), name=f"b{d}out")
            outputs.append(adv)
        heads.forward(
            p.program,
            heads.Value(start.value_hidden, p.weight("w_v2"), p.weight("b_v2"), v if d == 0 else None),
            heads.Branch(
                hidden,
                p.weight(f"w_b{d}out"),
                p.weight(f"b_b{d}out"),
                _columns(q, sizes, d),
                late=late,
                adv=adv,
                lse=_columns(lse, sizes, d) if lse else None,
                policy=policy if d == 0 else None,
                best=start.best_of(d),
            ),
            beside=beside,
            keep=p.trained,
            v_min=config.v_min,
            v_max=config.v_max,
            siblings=p.passes * max(1, len(sizes) - 1),
            label=f"q{d}{p.suffix}",
        )
    return BranchedHeads(q, sizes, Heads(v, tuple(outputs), q, lse) if lse else None, start.best)


def _siblings(config: StepConfig) -> int:
    """First layers of the heads of a pass."""
    return 1 + len(config.branches)
