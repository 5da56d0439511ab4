"""The shape of a step: one frozen dataclass, one docstring per field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be built; the message names the field, its value and what is allowed."""


@dataclass(frozen=True)
class StepConfig:
    """Sizes of the specified step (docs/step.md). A 0, an empty tuple or False removes a component altogether.

    Attributes:
        batch: rows B per step.
        state: state size S.
        tokens: attention tokens T; the state is read as [T, S/T]. 0: no attention.
        attn: attention width Da.
        ofi: order-flow inputs O. 0: branches from the third on see h2 alone.
        ofi_embed: order-flow embedding E.
        h1: first trunk width H1.
        h2: second trunk width H2.
        value_h: hidden width of the value head.
        adv_h: hidden width A of a branch.
        branches: actions n_d per branch. (): no Q network.
        atoms: atoms K of the value distribution.
        v_min: lowest atom.
        v_max: highest atom.
        iqn_quantiles: online quantiles N. 0: no IQN.
        iqn_target_quantiles: target quantiles N'.
        iqn_cos: cosine features M.
        iqn_h: hidden width I of the IQN head.
        ens: ensemble heads. 0: none.
        aux_h: width Ah of the auxiliary trunk. 0: no auxiliary nets and no wire.
        aux_out: output width Ao of the auxiliary trunk.
        aux_head: hidden width Hh of an auxiliary head.
        regimes: regime classes R. 0: no regime head.
        iql_h: hidden width L of the two IQL value nets. 0: none.
        cur_h: hidden width C of the curiosity model. 0: none.
        huber: κ of the quantile Huber loss.
        rec: reconstruction decoder.
        pred: prediction decoder.
        oracle_every: steps between runs of the param-group oracles.
    """

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
    oracle_every: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "branches", tuple(int(n) for n in self.branches))
        for name in ("batch", "state", "h1", "oracle_every"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in _OPTIONAL_SIZES:
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 (absent) or more")
        _require(len(self.branches) <= 8, "branches", self.branches, "at most 8 branches")
        _require(all(n >= 2 for n in self.branches), "branches", self.branches, "at least 2 actions each")
        if self.tokens:
            _require(self.state % self.tokens == 0, "tokens", self.tokens, f"a divisor of state = {self.state}")
        if self.aux_h:
            for name in ("aux_out", "aux_head"):
                _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1 with auxiliary nets")
            _require(
                self.regimes == 0 or self.regimes >= 2, "regimes", self.regimes, "0 (no regime head) or at least 2"
            )
        if not self.branches:
            extra = [name for name in _ABSENT if getattr(self, name)]
            _require(not extra, "branches", self.branches, f"given, since {', '.join(extra)} need a Q network")
            _require(self.aux_h > 0, "aux_h", self.aux_h, "positive in a step without branches")
        if self.branches:
            for name in ("h2", "value_h", "adv_h"):
                _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1 with branches")
            for name in ("iqn_target_quantiles", "iqn_cos", "iqn_h") if self.iqn_quantiles else ():
                _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1 with IQN")
            _require(not self.tokens or self.attn >= 1, "attn", self.attn, "at least 1 with attention")
            _require(not self.has_ofi or self.ofi_embed >= 1, "ofi_embed", self.ofi_embed, "at least 1 with order flow")
            _require(self.atoms >= 2, "atoms", self.atoms, "at least 2")
            _require(self.v_min < self.v_max, "v_min", self.v_min, f"below v_max = {self.v_max}")
        _require(self.huber > 0, "huber", self.huber, "positive")

    @classmethod
    def aux_only(cls, *, batch: int = 256, state: int = 48, regimes: int = 4, **sizes: Any) -> StepConfig:
        """The auxiliary network alone: first trunk layer as a fixed feature map, aux trunk, two heads."""
        return cls(**{**_ABSENT, "batch": batch, "state": state, "regimes": regimes, **sizes})

    @property
    def is_aux_only(self) -> bool:
        """Whether the auxiliary nets are the only component."""
        return bool(self.aux_h) and all(not getattr(self, name) for name in _ABSENT)

    @property
    def has_ofi(self) -> bool:
        """Whether order flow is read: it feeds the branches from the third on, so two branches have none."""
        return self.ofi > 0 and len(self.branches) > 2

    def to_json(self) -> str:
        """JSON object, in field order."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepConfig:
        """Inverse of `to_json`; also reads the configuration of a golden file.

        Raises:
            ConfigError: an unknown field or a value that is not allowed.
        """
        values: Mapping[str, Any] = json.loads(text)
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown configuration fields {unknown}; known are {[f.name for f in fields(cls)]}")
        return cls(**values)


#: What `aux_only` removes.
_ABSENT: dict[str, Any] = {
    "tokens": 0, "ofi": 0, "branches": (), "iqn_quantiles": 0, "ens": 0, "iql_h": 0, "cur_h": 0,
    "rec": False, "pred": False,
}  # fmt: skip
_OPTIONAL_SIZES = (
    "tokens", "attn", "ofi", "ofi_embed", "h2", "value_h", "adv_h", "iqn_quantiles", "iqn_target_quantiles", "iqn_cos",
    "iqn_h", "ens", "aux_h", "aux_out", "aux_head", "iql_h", "cur_h",
)  # fmt: skip


def _require(condition: bool, name: str, value: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"{name} = {value!r}: it must be {allowed}")
