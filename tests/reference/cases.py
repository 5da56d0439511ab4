"""Random configurations, states and batches; every value is representable in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from .config import (
    DEFAULT_SIGNALS,
    FAMILIES,
    Array,
    Config,
    Tree,
    bound_slot,
    group_shapes,
    group_signals,
    param_shapes,
    target_names,
)
from .step import State, empty_state

Random = np.random.Generator


def rounded(x: Any) -> Array:
    """The float64 values of x after rounding to float32."""
    return np.asarray(x, dtype=np.float32).astype(np.float64)


def random_param(rng: Random, name: str, shape: tuple[int, ...]) -> Array:
    """Weights of unit gain, small biases, LayerNorm gains near 1."""
    noise = rng.standard_normal(shape)
    if len(shape) > 1:
        return rounded(noise / np.sqrt(shape[1]))
    return rounded((1.0 if name == "ln_g" else 0.0) + 0.1 * noise)


def random_signals(rng: Random, config: Config) -> dict[str, float]:
    """Every signal near its default, betas below 1, weight decay on, clips that bind in some groups."""
    signals = {name: x * rng.uniform(0.7, 1.1) for name, x in DEFAULT_SIGNALS.items()}
    signals |= {"beta1": rng.uniform(0.8, 0.95), "beta2": rng.uniform(0.98, 0.999)}
    signals |= {"weight_decay": 0.1, "readiness_warmup": 64.0, "w_curiosity": 0.3, "polyak_tau": 0.05}
    for name, x in group_signals(config).items():
        signals[name] = x * 10.0 ** rng.uniform(-0.5, 1.0)
    return {name: float(rounded(x)) for name, x in signals.items()}


def random_gate(rng: Random, config: Config) -> dict[str, float]:
    """A warm gate and readiness state; one in four is cold, one in four has its gate shut."""
    state = empty_state(config)
    kind = rng.integers(4)
    if kind == 0:
        return state
    shut = kind == 1
    warm = {
        "aux_acc_short": rng.uniform(0.2, 0.4) if shut else rng.uniform(0.6, 0.8),
        "aux_acc_long": rng.uniform(0.4, 0.6),
        "aux_acc_var": rng.uniform(0.001, 0.01),
        "disagree_ema": rng.uniform(0.0, 0.5),
        "gate_open": 0.0 if shut else 1.0,
        "gate_seen": 1.0,
        "alpha_grad": 0.0 if shut else rng.uniform(0.1, 0.9),
        "iqn_seen": float(rng.integers(1, 200)),
        "iqn_loss_ema": rng.uniform(1.0, 3.0),
        "iqn_loss_ref": rng.uniform(3.0, 5.0),
        "iqn_readiness": rng.uniform(0.1, 0.9),
    }
    return {name: float(rounded(warm[name])) for name in state}


def random_bounds(rng: Random, config: Config) -> dict[int, float]:
    """Bounds of every group and family, one in four unknown (0)."""
    size = dict(zip(FAMILIES, (0.5, 0.02, 1e-3, 0.1), strict=True))
    slots = {bound_slot(g, f): size[f] for g in group_shapes(config) for f in FAMILIES}
    noise = {slot: rng.uniform(0.5, 2.0) * (rng.random() > 0.25) for slot in slots}
    return {slot: float(rounded(x * noise[slot])) for slot, x in slots.items()}


def near(rng: Random, x: Array) -> Array:
    """X with a little noise."""
    return rounded(x + 0.05 * rng.standard_normal(x.shape))


def random_state(rng: Random, config: Config) -> State:
    """Parameters, moments, targets near them, spectral vectors of unit length, gate, signals and bounds."""
    params = {name: random_param(rng, name, shape) for name, shape in param_shapes(config).items()}
    sn_v = {}
    for d in range(len(config.branches)):
        v = rng.standard_normal(params[f"w_b{d}fc"].shape[1])
        sn_v[f"b{d}fc"] = rounded(v / np.linalg.norm(v))
    return {
        "params": params,
        "m": {name: rounded(0.01 * rng.standard_normal(x.shape)) for name, x in params.items()},
        "v": {name: rounded((0.01 * rng.standard_normal(x.shape)) ** 2) for name, x in params.items()},
        "target": {name: near(rng, params[name]) for name in target_names(config)},
        "sn_v": sn_v,
        "state": random_gate(rng, config),
        "signals": random_signals(rng, config),
        "bounds": random_bounds(rng, config),
        "step": int(rng.integers(0, 20)),
    }


def random_batch(rng: Random, config: Config, poison: bool = True) -> Tree:
    """A batch with about one dead row in five, whose s' and next_ofi are NaN unless `poison` is off."""
    b = config.batch
    disc = np.where(rng.random(b) < 0.2, 0.0, rng.uniform(0.9, 0.99, b))
    batch: Tree = {
        "state": rng.standard_normal((b, config.state)),
        "next_state": rng.standard_normal((b, config.state)),
        "reward": rng.standard_normal(b),
        "discount": disc,
        "weight": rng.uniform(0.5, 1.5, b),
    }
    if config.has_ofi:
        batch |= {name: rng.standard_normal((b, config.ofi)) for name in ("ofi", "next_ofi")}
    if config.iqn_quantiles:
        batch["tau"] = rng.uniform(0.01, 0.99, (b, config.iqn_quantiles))
        batch["tau_target"] = rng.uniform(0.01, 0.99, (b, config.iqn_target_quantiles))
    batch = {name: rounded(x) for name, x in batch.items()}
    if poison:
        for name in {"next_state", "next_ofi"} & set(batch):
            batch[name][disc == 0.0] = np.nan
    batch["actions"] = np.stack([rng.integers(0, n, b) for n in config.branches], axis=1).astype(np.int32)
    if config.aux_h:
        batch["nb_label"] = rng.integers(-1, 2, b).astype(np.int32)
    if config.has_regime:
        batch["regime_label"] = rng.integers(-1, config.regimes, b).astype(np.int32)
    return batch


def random_case(seed: int, config: Config, poison: bool = True) -> tuple[State, Tree]:
    """State and batch of a seed; states of other seeds differ in warmth, gate, bounds and signals too."""
    rng = np.random.default_rng(seed)
    return random_state(rng, config), random_batch(rng, config, poison)


def _optional(draw: st.DrawFn, low: int, high: int) -> int:
    """0, which removes a component, or a size."""
    return draw(st.one_of(st.just(0), st.integers(low, high)))


@st.composite
def random_config(draw: st.DrawFn, largest: int = 7) -> Config:
    """Small configurations with every component present or absent, odd sizes, one to five branches."""

    def size(low: int = 1) -> int:
        return draw(st.integers(low, max(low, largest)))

    tokens = _optional(draw, 1, 4)
    h1 = size(2)
    v_min = float(draw(st.integers(-10, -1)))
    return Config(
        batch=draw(st.integers(1, 9)),
        state=tokens * draw(st.integers(1, 4)) if tokens else size(),
        tokens=tokens,
        attn=size(),
        ofi=_optional(draw, 1, 4),
        ofi_embed=draw(st.integers(1, 4)),
        h1=h1,
        h2=draw(st.one_of(st.just(h1), st.integers(2, largest))),
        value_h=size(),
        adv_h=size(),
        branches=tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))),
        atoms=draw(st.integers(2, 12)),
        v_min=v_min,
        v_max=v_min + draw(st.integers(1, 20)),
        iqn_quantiles=_optional(draw, 1, 5),
        iqn_target_quantiles=draw(st.integers(1, 5)),
        iqn_cos=size(),
        iqn_h=size(),
        ens=_optional(draw, 1, 4),
        aux_h=_optional(draw, 1, largest),
        aux_out=size(),
        aux_head=size(),
        regimes=_optional(draw, 2, 4),
        iql_h=_optional(draw, 1, largest),
        cur_h=_optional(draw, 1, largest),
        huber=draw(st.sampled_from((0.5, 1.0, 2.0))),
        rec=draw(st.booleans()),
        pred=draw(st.booleans()),
    )
