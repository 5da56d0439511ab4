"""Stop-gradients of the whole step are structural: walks over what its records read and write find no path."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import pytest

from fxengine import StepBuilder
from fxengine.driver import Target
from fxengine.graphs import Launch, Program
from fxengine.nets.step import specified_step
from tests.reference.config import Config, group_shapes

from .whole import BARE, EVERYTHING, step_config

CONFIGS = {
    "everything": EVERYTHING,
    "equal_widths": replace(EVERYTHING, h1=5),
    "five_branches": replace(EVERYTHING, branches=(3, 2, 4, 2, 3)),
    "one_branch": replace(EVERYTHING, branches=(3,)),
    "no_aux": replace(EVERYTHING, aux_h=0),
    "no_attention": replace(EVERYTHING, tokens=0),
    "bare": BARE,
}
#: By loss: the gradients that its record writes, and the groups that they may and must reach. C51, CQL and
#: distillation share a record.
REACH = {
    "heads": (("d.v2", "d.b0out", "d.b1out", "d.b2out", "d.b3out", "d.b4out"),
              ("branches", "value", "trunk", "attn", "aux_trunk", "aux_heads")),
    "iqn": (("d.theta",), ("iqn", "trunk", "attn")),
    "ens": (("d.ens",), ("decoders", "trunk", "attn")),
    "rec": (("d.rec",), ("decoders", "trunk", "attn")),
    "pred": (("d.pred",), ("decoders", "trunk", "attn")),
    "nb": (("d.nb2",), ("aux_trunk", "aux_heads")),
    "regime": (("d.rg2",), ("aux_trunk", "aux_heads")),
    "iql_high": (("d.iqlhigh2",), ("iql_high",)),
    "iql_low": (("d.iqllow2",), ("iql_low",)),
    "curiosity": (("d.c2",), ("curiosity",)),
}  # fmt: skip
#: Values that only ever appear under a stop: sg(softmax(q_0)), sg(q), sg(intr), everything at s' and of the targets.
STOPPED = ("policy", "q", "lse", "best", "td", "live", "shaped_reward", "onehots", "state", "next_state", "reward")


@cache
def declared(name: str, target: str = "sm_90") -> StepBuilder:
    builder = StepBuilder(Target.of(target))
    specified_step(builder, step_config(CONFIGS[name]))
    builder.finish()
    return builder


@cache
def backward(name: str) -> tuple[Launch, ...]:
    """The records up to the optimizer, which reads every gradient."""
    launches = declared(name).program.launches
    return tuple(launches[: next(i for i, r in enumerate(launches) if r.label.startswith("adam."))])


def is_gradient(storage: str) -> bool:
    return storage.startswith(("d.", "grads."))


def reached(records: Iterable[Launch], seeds: Iterable[str]) -> set[str]:
    """Names of all storages that values may flow to from the storages named, along the order of the program."""
    tainted: set[str] = set(seeds)
    for record in records:
        if any(t.name in tainted for t in record.reads):
            tainted |= {t.name for t in record.writes}
    return tainted


def groups_reached(name: str, seeds: Iterable[str]) -> set[str]:
    storages = reached(backward(name), seeds)
    return {s.removeprefix("grads.") for s in storages if s.startswith("grads.")}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("loss", REACH)
def test_every_loss_reaches_its_groups_and_no_other(config: str, loss: str) -> None:
    program = declared(config).program
    seeds = [s for s in REACH[loss][0] if s in program.storages]
    present = set(group_shapes(CONFIGS[config]))
    if not seeds:  # the loss belongs to a component that this configuration lacks
        assert config != "everything"
        return
    assert groups_reached(config, seeds) == set(REACH[loss][1]) & present


@pytest.mark.parametrize("config", CONFIGS)
def test_every_group_depends_on_its_losses_alone(config: str) -> None:
    """The same from the other end: whatever writes a group's gradient rests on gradients of allowed losses."""
    records = backward(config)
    written_by = [(r, {t.name for t in r.writes}) for r in records]
    allowed = {
        group: {seed for seeds, groups in REACH.values() if group in groups for seed in seeds}
        for group in group_shapes(CONFIGS[config])
    }
    every_seed = {seed for seeds, _ in REACH.values() for seed in seeds}
    for group, seeds in allowed.items():
        needed, roots = {f"grads.{group}"}, set()
        for record, writes in reversed(written_by):
            if writes & needed:
                gradients = {t.name for t in record.reads if is_gradient(t.name)}
                needed |= gradients - {f"grads.{g}" for g in allowed}
                roots |= {n for n in writes & needed if not gradients - writes}
        assert roots <= every_seed | {f"grads.{group}"}, f"{group}: gradients out of nowhere: {roots - every_seed}"
        found = roots & every_seed
        assert found and found <= seeds, f"{group} depends on {sorted(found - seeds)}"


@pytest.mark.parametrize("config", CONFIGS)
def test_loss_gradients_are_written_by_losses(config: str) -> None:
    """The seeds of the walks are what they are taken for: written from no other gradient (the wire's sum apart)."""
    seeds = {seed for names, _ in REACH.values() for seed in names}
    for seed in sorted(seeds & set(declared(config).program.storages)):
        writers = [r for r in backward(config) if any(t.name == seed for t in r.writes)]
        first, later = writers[0], writers[1:]
        assert not [t.name for t in first.reads if is_gradient(t.name)], (seed, first.label)
        assert {r.family.name for r in later} <= ({"wire_backward"} if seed == "d.nb2" else set())


@pytest.mark.parametrize("config", CONFIGS)
def test_no_gradient_buffer_stands_behind_a_stop(config: str) -> None:
    """Nothing at s', nothing of the targets, no policy, value, bonus or input has a gradient."""
    storages = declared(config).program.storages
    gradients = {n for n in storages if n.startswith("d.")}
    assert gradients
    assert not [n for n in gradients if n.endswith((".next", ".target"))]
    assert not gradients & {f"d.{n}" for n in STOPPED}
    assert not gradients & {f"d.{n}" for n in declared(config).inputs}
    assert not [n for n in storages if n.startswith(("grads.", "adam")) and "target" in n]
    assert not [t for t in declared(config).target_parameters.values() if declared(config).tape.tracked(t)]


@pytest.mark.parametrize("config", CONFIGS)
def test_no_backward_record_reads_the_targets(config: str) -> None:
    """A gradient through a target network would multiply with its weights or meet its activations."""
    program = declared(config).program
    targets = {n for n, s in program.storages.items() if s.arena == "targets"}
    assert targets
    backward_records = [r for r in backward(config) if any(is_gradient(t.name) for t in r.reads)]
    for record in backward_records:
        assert not targets & {t.name for t in record.reads}, record.label
        assert not [t.name for t in record.reads if t.name.endswith((".next", ".target"))], record.label


@pytest.mark.parametrize("config", CONFIGS)
def test_targets_are_written_with_the_parameters_or_behind_their_spectral_norm(config: str) -> None:
    records = [r for r in declared(config).program.launches if any(t.name.startswith("targets.") for t in r.writes)]
    assert {r.family.name for r in records} == {"adam", "polyak"}
    late = {r.label for r in records if r.family.name == "polyak"}
    assert late == {f"polyak.w_b{d}fc" for d in range(len(CONFIGS[config].branches))}


@pytest.mark.parametrize("config", [n for n, c in CONFIGS.items() if c.aux_h])
def test_the_auxiliary_nets_send_nothing_to_the_trunk(config: str) -> None:
    """Their first layer has a weight gradient alone: no record multiplies with w_a1 on the way back."""
    records = backward(config)
    seeds = ["d.nb2", "d.rg2", "d.a1", "d.a2", "d.h_aux", "d.nb1", "d.rg1"]
    storages = reached(records, seeds)
    assert {s for s in storages if s.startswith("d.")} == set(seeds)
    assert {s for s in storages if s.startswith("grads.")} == {"grads.aux_trunk", "grads.aux_heads"}
    first_layer = [r for r in records if any(t.name == "d.a1" for t in r.reads)]
    assert [r.label for r in first_layer] == ["a1.dw"]
    assert first_layer[0].family.name.startswith("linear_dw")
    assert not [r for r in first_layer if any(t.name.startswith("params.") for t in r.reads)]


@pytest.mark.parametrize("config", [n for n, c in CONFIGS.items() if c.aux_h])
def test_one_record_leads_from_the_wire_to_the_auxiliary_nets(config: str) -> None:
    records = backward(config)
    gates = [r for r in records if any(t.name == "d.wire" for t in r.reads)]
    assert [r.family.name for r in gates] == ["wire_backward"]
    rest = [r for r in records if r is not gates[0]]
    heads = [s for s in REACH["heads"][0] if s in declared(config).program.storages]
    assert not {"grads.aux_trunk", "grads.aux_heads"} & reached(rest, heads)


def test_what_a_configuration_lacks_leaves_no_trace() -> None:
    program: Program = declared("bare").program
    traces = ("attn", "iq", "theta", "ens", "rec", "pred", "iql", "c1", "c2", "aux", "nb", "rg", "wire", "ofi", "tau")
    names = {n.removeprefix("d.") for n in program.storages if n.startswith("d.")} | set(declared("bare").inputs)
    assert not [n for n in names if n.startswith(traces)]
    assert {n for n in program.storages if n.startswith("grads.")} == {"grads.trunk", "grads.value", "grads.branches"}
    families = {r.family.name for r in program.launches}
    assert not families & {"gate", "wire_backward", "crossentropy", "iqn_loss", "ensemble", "expectile", "readiness"}


def test_the_walk_finds_a_path_where_there_is_one() -> None:
    """A record that added the auxiliary trunk's gradient to h1 would be seen."""
    builder = StepBuilder(Target.of("sm_90"))
    specified_step(builder, step_config(EVERYTHING))
    tape = builder.tape
    h1 = builder.outputs["h1"]
    leak = tape.linear(h1, "w_a1", "b_a1", name="leak")
    builder.loss_gradient(leak)
    tape.backward()
    assert "grads.trunk" in reached(builder.program.launches, ["d.leak"])


@pytest.mark.parametrize("config", ["everything", "bare"])
def test_the_simulated_device_runs_the_same_gradients(config: str) -> None:
    """What holds for the H200's program holds for the one that the other tests run."""
    names = [{n for n in declared(config, target).program.storages if is_gradient(n)} for target in ("sm_90", "sim")]
    assert names[0] == names[1]


def test_sizes_do_not_matter_to_the_walk() -> None:
    """The default configuration of the step has the same gradients as the small one, branch for branch."""
    small = StepBuilder(Target.of("sm_90"))
    large = StepBuilder(Target.of("sm_90"))
    specified_step(small, step_config(replace(EVERYTHING, branches=(3, 3, 3, 3), h1=5)))
    specified_step(large, step_config(Config()))
    for builder in (small, large):
        builder.finish()
    names = [{n for n in b.program.storages if is_gradient(n)} for b in (small, large)]
    assert names[0] == names[1]
