"""What the replay refuses: specifications, steps that do not fit, engines that cannot use it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from fxengine import Engine
from fxengine.driver import Device
from fxengine.driver.errors import ClosedError
from fxengine.graphs import ProgramError
from fxengine.rl.replay import Field, Memory
from tests.rl.test_replay import CONFIG, FIELDS, fill, make, random_step, reader, replay


def test_a_step_without_a_whole_transition_is_refused(device: Device) -> None:
    spec = replay(n_step=3)
    with make(device, spec) as engine, Memory(engine) as memory:
        fill(memory, spec, 2)
        before = engine.state_hash()
        with pytest.raises(RuntimeError, match="the replay holds 6 of at least 9 transitions; insert more first"):
            engine.step()
        assert engine.state_hash() == before
        fill(memory, spec, 1)
        engine.step()


def test_steps_that_do_not_fit_are_refused_whole(device: Device) -> None:
    spec = replay()
    with make(device, spec) as engine:
        memory = Memory(engine)
        step = random_step(spec, np.random.default_rng(0))
        before = engine.state_hash()
        bad = {**step, "state": step["state"].astype(np.float64), "reward": step["reward"][:2]}
        with pytest.raises(ValueError, match=r"'state' is float32 \(3, 6\), got float64 \(3, 6\); 'reward'.*\(2,\)"):
            memory.add(**bad)
        with pytest.raises(ValueError, match="'terminated' is bool"):
            memory.add(**{**step, "terminated": np.zeros(3)})
        del step["actions"]
        with pytest.raises(ValueError, match=r"a step consists of \['actions'.*\], got \['next_state'"):
            memory.add(**step)
        assert (engine.state_hash(), engine.inserted) == (before, 0)
        with pytest.raises(ValueError, match="'state' is gathered from device-resident data"):
            engine.write(state=np.zeros((CONFIG.batch, 6), np.float32))
        memory.close()
        memory.close()
        with pytest.raises(ClosedError, match="memory is closed"):
            memory.add(**step)
    with Engine(CONFIG, device=device) as plain, pytest.raises(ValueError, match="the engine has no replay"):
        Memory(plain)


def test_arrays_that_cannot_be_bound(device: Device) -> None:
    spec = replay()
    with make(device, spec) as engine:
        memory = Memory(engine)
        step = random_step(spec, np.random.default_rng(0))
        with pytest.raises(ValueError, match="'state' is float32"):
            memory.bind(**{**step, "state": step["state"][:2]})
        with pytest.raises(ValueError, match="only NumPy arrays can be bound; 'terminated' would be a copy"):
            memory.bind(**{**step, "terminated": step["terminated"].tolist()})
        with pytest.raises(ValueError, match="a step consists of"):
            memory.bind(state=step["state"])
        call = memory.bind(**step)
        call()
        assert engine.inserted == 1
        memory.close()
        with pytest.raises(ClosedError, match="memory is closed"):
            call()


def test_steps_that_read_what_the_replay_lacks_are_refused(device: Device) -> None:
    def inputs(*wanted: tuple[str, tuple[int, ...], Any]) -> Any:
        return lambda step: [step.input(name, shape, dtype) for name, shape, dtype in wanted]

    def refused(message: str, *wanted: tuple[str, tuple[int, ...], Any], **options: Any) -> None:
        with pytest.raises(ProgramError, match=message):
            Engine(inputs(*wanted), device=device, groups={0: "x"}, replay=replay(**options))

    state = ("state", (4, 6), np.float32)
    refused(r"input 'ofi' is none of the replay's: it fills actions, discount, next_state", ("ofi", (4, 2), np.float32))
    refused(r"'state' has rows float32 \(7,\), the replay fills float32 \(6,\)", ("state", (4, 7), np.float32))
    refused("'reward' has rows int32", state, ("reward", (4,), np.int32))
    refused("'reward' has 5 rows, the batch of the replay 4", state, ("reward", (5,), np.float32))
    with pytest.raises(ProgramError, match="the step's output 'td'; there is none"):
        Engine(reader((6,)), device=device, groups={0: "head"}, replay=replay(prioritized=True))
    with pytest.raises(ValueError, match="not from both"):
        Engine(CONFIG, device=device, replay=replay(), data={"state": np.zeros((9, 6), np.float32)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "at least one slot"),
        ({"slots": 2**20, "envs": 2**11}, r"fewer than 2\*\*31 transitions"),
        ({"n_step": 0}, "n_step must be between 1 and slots = 8, got 0"),
        ({"n_step": 9}, "n_step must be between 1 and slots = 8, got 9"),
        ({"fields": {"actions": Field(1, "int32")}}, "needs a field 'state'"),
        ({"fields": {**FIELDS, "reward": Field(())}}, "field 'reward': names are identifiers, and none of"),
        ({"fields": {**FIELDS, "a-b": Field(())}}, "field 'a-b'"),
        ({"fields": {**FIELDS, "ofi": 3}}, "field 'ofi' must be a Field, got 3"),
    ],
)
def test_specifications_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(**options)


def test_fields_are_checked() -> None:
    with pytest.raises(ValueError, match=r"extents of at least 1, got shape \(3, 0\)"):
        Field((3, 0))
    with pytest.raises(ValueError, match="'float64'"):
        Field(3, "float64")
    with pytest.raises(ValueError, match=r"scale = 0\.5 of a float32 field"):
        Field(3, scale=0.5)
    assert Field(3).dims == Field((3,)).dims == (3,)


def test_import_of_the_package_leaves_the_replay_alone() -> None:
    code = "import sys, fxengine.rl; assert 'numpy' not in sys.modules; from fxengine.rl import Replay, Memory, Field"
    subprocess.run([sys.executable, "-c", code], check=True)
