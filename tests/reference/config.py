"""Sizes, parameter groups and signal slots (docs/step.md, sections 1, 6, 8 and 10)."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import numpy as np

Array = np.ndarray
Tree = dict[str, Array]
Shape = tuple[int, ...]

GROUPS = (
    "trunk",
    "value",
    "branches",
    "iqn",
    "iql_high",
    "iql_low",
    "attn",
    "curiosity",
    "aux_trunk",
    "aux_heads",
    "decoders",
)
TARGET_GROUPS = ("trunk", "value", "branches", "iqn", "attn")
FAMILIES = ("weight", "adam_m", "adam_v", "grad")
GATE_NAMES = (
    "aux_acc_short",
    "aux_acc_long",
    "aux_acc_var",
    "disagree_ema",
    "gate_open",
    "gate_seen",
    "alpha_grad",
)
READINESS_NAMES = ("iqn_seen", "iqn_loss_ema", "iqn_loss_ref", "iqn_readiness")
COMPONENTS = ("iqn", "ens", "c51", "cql", "distill", "rec", "pred", "cql_sx", "c51_bs")

DEFAULT_SIGNALS: dict[str, float] = {
    "w_c51": 1.0,
    "w_cql": 0.1,
    "w_distill": 0.05,
    "w_iqn": 1.0,
    "w_ens": 0.2,
    "w_rec": 0.1,
    "w_pred": 0.1,
    "w_nb": 1.0,
    "w_regime": 0.5,
    "iql_tau_high": 0.9,
    "iql_tau_low": 0.1,
    "w_curiosity": 0.01,
    "curiosity_cap": 1.0,
    "polyak_tau": 0.005,
    "sn_max": 3.0,
    "beta1": 0.9,
    "beta2": 0.999,
    "adam_eps": 1e-8,
    "weight_decay": 0.0,
    "acc_beta_short": 0.1,
    "acc_beta_long": 0.01,
    "gate_margin": 0.02,
    "gate_gain": 2.0,
    "gate_open_margin": 0.03,
    "gate_close_margin": 0.01,
    "alpha_beta": 0.05,
    "disagree_beta": 0.05,
    "readiness_beta": 0.01,
    "readiness_warmup": 64.0,
    "oracle_headroom": 4.0,
    "oracle_beta": 0.05,
    "eps_clamp_floor": 1.0,
}
DEFAULT_LR = 3e-4
DEFAULT_CLIP = 1.0


@dataclass(frozen=True)
class Config:
    """Sizes of the step (docs/step.md, section 10); a 0 or False removes the component."""

    batch: int = 256
    state: int = 48
    tokens: int = 6
    attn: int = 16
    ofi: int = 6
    ofi_embed: int = 8
    h1: int = 256
    h2: int = 256
    value_h: int = 128
    adv_h: int = 128
    branches: tuple[int, ...] = (3, 3, 3, 3)
    atoms: int = 51
    v_min: float = -10.0
    v_max: float = 10.0
    iqn_quantiles: int = 32
    iqn_target_quantiles: int = 32
    iqn_cos: int = 64
    iqn_h: int = 128
    ens: int = 5
    aux_h: int = 128
    aux_out: int = 64
    aux_head: int = 32
    regimes: int = 4
    iql_h: int = 64
    cur_h: int = 64
    huber: float = 1.0
    rec: bool = True
    pred: bool = True
    oracle_every: int = 1

    @classmethod
    def from_json(cls, text: str) -> Config:
        """The configuration of a golden file; unknown names are an error."""
        values: dict[str, Any] = json.loads(text)
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"unknown configuration names: {sorted(unknown)}")
        values["branches"] = tuple(values["branches"])
        return cls(**values)

    @property
    def has_ofi(self) -> bool:
        """Order flow feeds the branches d >= 2; with two branches or fewer nothing reads it."""
        return self.ofi > 0 and len(self.branches) > 2

    @property
    def has_regime(self) -> bool:
        """The regime head exists with the aux nets and at least one class."""
        return self.aux_h > 0 and self.regimes > 0

    @property
    def actions(self) -> int:
        """Sum of the branches' action counts."""
        return sum(self.branches)

    @property
    def offsets(self) -> list[int]:
        """First column of each branch in arrays over all actions, such as q[B, sum n_d]."""
        return [0, *accumulate(self.branches)][:-1]

    @property
    def atoms_z(self) -> Array:
        """z_k, evenly spaced on [v_min, v_max]."""
        return np.linspace(self.v_min, self.v_max, self.atoms)

    def extra(self, d: int) -> int:
        """x_d: columns that branch d's input has besides h2 (section 1)."""
        if d == 0:
            return 1 if self.aux_h else 0
        if d == 1:
            return self.branches[0]
        return self.ofi_embed if self.has_ofi else 0


def _linear(suffix: str, rows: int, columns: int) -> dict[str, Shape]:
    """Weight [rows, columns] and bias [rows] of one linear layer."""
    return {f"w_{suffix}": (rows, columns), f"b_{suffix}": (rows,)}


def _trunk(c: Config) -> dict[str, Shape]:
    shapes = _linear("s1", c.h1, c.state) | _linear("s2", c.h2, c.h1) | _linear("glu", 2 * c.h2, c.h2)
    if c.h1 != c.h2:
        shapes["w_skip"] = (c.h2, c.h1)
    return shapes | {"ln_g": (c.h2,), "ln_b": (c.h2,)}


def _branches(c: Config) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {}
    for d, n in enumerate(c.branches):
        shapes |= _linear(f"b{d}fc", c.adv_h, c.h2 + c.extra(d)) | _linear(f"b{d}out", n * c.atoms, c.adv_h)
    return shapes | (_linear("ofi", c.ofi_embed, c.ofi) if c.has_ofi else {})


def _iqn(c: Config) -> dict[str, Shape]:
    if not c.iqn_quantiles:
        return {}
    phi = _linear("phi", c.h2, c.iqn_cos)
    return phi | _linear("iq1", c.iqn_h, c.h2) | _linear("iq2", c.actions, c.iqn_h)


def _iql(c: Config, side: str) -> dict[str, Shape]:
    return _linear(f"{side}1", c.iql_h, c.state) | _linear(f"{side}2", 1, c.iql_h) if c.iql_h else {}


def _attn(c: Config) -> dict[str, Shape]:
    if not c.tokens:
        return {}
    width = c.state // c.tokens
    names: dict[str, Shape] = dict.fromkeys(("w_q", "w_k", "w_val"), (c.attn, width))
    return names | {"w_o": (width, c.attn)}


def _curiosity(c: Config) -> dict[str, Shape]:
    if not c.cur_h:
        return {}
    return _linear("c1", c.cur_h, c.state + c.actions) | _linear("c2", c.state, c.cur_h)


def _aux_trunk(c: Config) -> dict[str, Shape]:
    if not c.aux_h:
        return {}
    return _linear("a1", c.aux_h, c.h1) | _linear("a2", c.aux_h, c.aux_h) | _linear("a3", c.aux_out, c.aux_h)


def _aux_heads(c: Config) -> dict[str, Shape]:
    if not c.aux_h:
        return {}
    shapes = _linear("nb1", c.aux_head, c.aux_out) | _linear("nb2", 2, c.aux_head)
    if c.has_regime:
        shapes |= _linear("rg1", c.aux_head, c.aux_out) | _linear("rg2", c.regimes, c.aux_head)
    return shapes


def _decoders(c: Config) -> dict[str, Shape]:
    shapes = _linear("rec", c.state, c.h2) if c.rec else {}
    shapes |= _linear("pred", c.h2, c.h2) if c.pred else {}
    return shapes | (_linear("ens", c.ens * c.branches[0], c.h2) if c.ens else {})


def group_shapes(config: Config) -> dict[str, dict[str, Shape]]:
    """Tensors of every group of the configuration in buffer order; absent groups are left out (section 1)."""
    value = _linear("v1", config.value_h, config.h2) | _linear("v2", config.atoms, config.value_h)
    tables = (
        _trunk(config),
        value,
        _branches(config),
        _iqn(config),
        _iql(config, "iqlhigh"),
        _iql(config, "iqllow"),
        _attn(config),
        _curiosity(config),
        _aux_trunk(config),
        _aux_heads(config),
        _decoders(config),
    )
    return {group: table for group, table in zip(GROUPS, tables, strict=True) if table}


def param_shapes(config: Config) -> dict[str, Shape]:
    """Shapes of all parameters, in buffer order."""
    return {name: shape for table in group_shapes(config).values() for name, shape in table.items()}


def target_names(config: Config) -> list[str]:
    """Parameters that have a Polyak copy."""
    return [name for g, table in group_shapes(config).items() if g in TARGET_GROUPS for name in table]


def bound_slot(group: str, family: str) -> int:
    """Signal slot of a group's bound (section 6)."""
    g, f = GROUPS.index(group), FAMILIES.index(family)
    return 136 + 8 * f + g if g < 8 else 400 + 8 * f + (g - 8)


def group_signals(config: Config) -> dict[str, float]:
    """Default lr.{group} and clip.{group} of the groups present."""
    groups = group_shapes(config)
    return {f"lr.{g}": DEFAULT_LR for g in groups} | {f"clip.{g}": DEFAULT_CLIP for g in groups}
