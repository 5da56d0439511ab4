"""The whole step against the float64 reference, in configurations that no golden file shows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fxengine.driver import Device
from tests.reference.cases import random_batch, random_case, random_config
from tests.reference.config import Config, Tree
from tests.reference.golden import FP32_LIMIT, FP32_UPDATE_LIMIT, Difference, compare
from tests.reference.step import State, state_outputs, step

from .whole import BARE, EVERYTHING, load, make, run, shaped_like

#: Values of q at s' nearer than this may change places in float32.
CLOSE_CALL = 1e-4
#: Roundings on the way through the step, in units of one rounding of everything that it starts from.
CANCELLING = 32.0

#: Each lacks something or is of an unusual size; all else as in EVERYTHING.
VARIANTS = {
    "everything": EVERYTHING,
    "equal_widths": replace(EVERYTHING, h1=6, h2=6),
    "wide_to_narrow": replace(EVERYTHING, h1=19, h2=3),
    "no_attention": replace(EVERYTHING, tokens=0),
    "one_token": replace(EVERYTHING, tokens=1),
    "no_order_flow": replace(EVERYTHING, ofi=0),
    "no_iqn": replace(EVERYTHING, iqn_quantiles=0),
    "one_quantile": replace(EVERYTHING, iqn_quantiles=1, iqn_target_quantiles=1),
    "no_ensemble": replace(EVERYTHING, ens=0),
    "no_aux": replace(EVERYTHING, aux_h=0),
    "no_rec": replace(EVERYTHING, rec=False),
    "no_pred": replace(EVERYTHING, pred=False),
    "no_decoders": replace(EVERYTHING, rec=False, pred=False, ens=0),
    "no_iql": replace(EVERYTHING, iql_h=0),
    "no_curiosity": replace(EVERYTHING, cur_h=0),
    "one_branch": replace(EVERYTHING, branches=(3,)),
    "two_branches": replace(EVERYTHING, branches=(2, 5)),
    "five_branches": replace(EVERYTHING, branches=(4, 3, 2, 5, 2)),
    "eight_branches": replace(EVERYTHING, branches=(3, 2, 4, 2, 3, 2, 2, 3)),
    "one_row": replace(EVERYTHING, batch=1),
    "many_rows": replace(EVERYTHING, batch=67),
    "two_atoms": replace(EVERYTHING, atoms=2),
    "many_atoms": replace(EVERYTHING, atoms=131),
    "wide_branches": replace(EVERYTHING, adv_h=300),
    "rare_oracles": replace(EVERYTHING, oracle_every=2),
    "bare": BARE,
}


def buildable(config: Config) -> Config:
    """With two actions or more in a branch, three columns or more to normalise, two features or more in a token.

    Of two numbers layer norm leaves little but the signs, and attention over single numbers has gradients that are
    differences of nearly equal ones: float32 does not hold them.
    """
    h2 = max(config.h2, 3)
    return replace(
        config,
        state=max(config.state, 2 * config.tokens),
        branches=tuple(max(n, 2) for n in config.branches),
        h1=h2 if config.h1 == config.h2 else config.h1,
        h2=h2,
        regimes=max(config.regimes, 2),
    )


def clear_choice(config: Config, reference: Tree) -> bool:
    """Whether the two best actions at s' lie apart in every branch and row."""
    for first, n in zip(config.offsets, config.branches, strict=True):
        ordered = np.sort(reference["q_next"][:, first : first + n], axis=1)
        if (ordered[:, -1] - ordered[:, -2] < CLOSE_CALL).any():
            return False
    return True


def start(seed: int, config: Config) -> tuple[State, Tree]:
    """A state and a batch, with which the count to the next run of the oracles begins."""
    state, batch = random_case(seed, config)
    return state | {"step": state["step"] - state["step"] % config.oracle_every}, batch


def rounded_anew(rng: np.random.Generator, arrays: Tree) -> Tree:
    """The arrays with every float moved by half a unit in the last place, up or down."""
    return {
        name: x if x.dtype.kind != "f" else x * (1.0 + 2.0**-24 * rng.choice((-1.0, 1.0), x.shape))
        for name, x in arrays.items()
    }


def reference_steps(config: Config, state: State, batches: list[Tree]) -> list[Tree]:
    """The start and both steps, named as the engine's results."""
    outs: list[Tree] = [state_outputs(config, state)]
    for batch in batches:
        state, out = step(config, state, batch)
        outs.append(out)
    return outs


def sensitivity(config: Config, seed: int, batches: list[Tree], reference: list[Tree]) -> list[dict[str, Difference]]:
    """By step and array: how far the reference itself moves when what it starts from is rounded once more."""
    rng = np.random.default_rng(seed)
    found: list[dict[str, Difference]] = [{}, {}]
    for _ in range(3):
        state = start(seed, config)[0]
        state |= {part: rounded_anew(rng, state[part]) for part in ("params", "m", "v", "target")}
        moved = reference_steps(config, state, [rounded_anew(rng, batch) for batch in batches])
        for i, worst in enumerate(found):
            for d in compare(moved[i + 1], reference[i + 1], moved[i], reference[i], rounding=0.0):
                old = worst.get(d.name, Difference(d.name, 0.0))
                worst[d.name] = Difference(d.name, max(d.error, old.error), max(d.update, old.update))
    return found


def beyond(found: list[Difference], moves: dict[str, Difference]) -> list[Difference]:
    """What exceeds the limits of float32 and is no sum that cancels: those move by as much when rounded."""
    return [
        d
        for d in found
        if d.error > max(FP32_LIMIT, CANCELLING * moves[d.name].error)
        or d.update > max(FP32_UPDATE_LIMIT, CANCELLING * moves[d.name].update)
        or (d.name == "best" and d.error)
    ]


def check(device: Device, config: Config, seed: int, *, strict: bool) -> bool:
    """Two steps within the limits; False if the reference itself could go either way.

    Args:
        device: to run on.
        config: of the step.
        seed: of the state and the batches.
        strict: the limits as they are, the second step with its decomposition. Else an array may exceed them as far as
            its own sensitivity to rounding says: a gradient of few numbers may be a sum that cancels.
    """
    state, first = start(seed, config)
    batches = [first, random_batch(np.random.default_rng(seed + 1), config)]
    reference = reference_steps(config, state, batches)
    if not all(clear_choice(config, out) for out in reference[1:]):
        return False
    still: dict[str, Difference] = {name: Difference(name, 0.0) for out in reference for name in out}
    moves = [still, still] if strict else sensitivity(config, seed, batches, reference)
    with make(device, config, guard=True) as engine:
        load(engine, start(seed, config)[0])
        before = reference[0]
        for i, batch in enumerate(batches):
            decompose = strict and i == 1
            expected = {n: x for n, x in reference[i + 1].items() if n != "decomposition" or decompose}
            found = shaped_like(run(engine, batch, decompose=decompose), expected)
            bad = beyond(compare(found, expected, before, reference[i]), moves[i])
            assert not bad, f"step {i}: {len(bad)} arrays beyond the limits, first {bad[:5]}"
            before = found
        engine.check_guards()
        named = {n for n in found if n.startswith(("param.", "m.", "v.", "target.", "grad.", "sn_v_", "L_"))}
        assert named <= set(expected), "a component that the configuration lacks left a trace"
    return True


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_match_the_reference(device: Device, variant: str) -> None:
    assert any(check(device, VARIANTS[variant], seed, strict=True) for seed in (2, 3, 4)), "no seed has a clear choice"


@given(config=random_config(largest=11).map(buildable), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_random_configurations_match_the_reference(device: Device, config: Config, seed: int) -> None:
    assume(check(device, config, seed, strict=False))


def test_a_fault_is_noticed_here() -> None:
    """A gradient that is wrong by one part in a thousand, an infinity in the wrong place, another action."""
    state, batch = random_case(2, EVERYTHING)
    start, out = reference_steps(EVERYTHING, state, [batch])
    still = {name: Difference(name, 1e-7, 1e-6) for name in out}
    assert beyond(compare(out, out, start, start), still) == []
    faults = {
        "grad.w_s2": out["grad.w_s2"] * 1.001,
        "L_c51": np.float64(np.inf),
        "best": 1 - np.minimum(out["best"], 1),
        "m.w_q": start["m.w_q"],
    }
    for name, value in faults.items():
        found = beyond(compare({**out, name: value}, out, start, start), still)
        assert [d.name for d in found] == [name]
