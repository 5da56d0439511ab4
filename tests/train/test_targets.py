"""Target copies by name, and the formula they follow. What moves them is tested with optimizer and spectral norm."""

from __future__ import annotations

import numpy as np
import pytest

from fxengine.driver import Target
from fxengine.graphs import Program
from fxengine.train.groups import ParamGroup, ParamSpec
from fxengine.train.targets import TargetGroup, reference_polyak
from tests.reference import optimizer as step_reference


def test_agrees_with_the_reference_of_the_step() -> None:
    rng = np.random.default_rng(0)
    old, new = rng.normal(size=(2, 5, 3))
    np.testing.assert_array_equal(
        reference_polyak(old, new, 0.25), step_reference.polyak({"w": old}, {"w": new}, 0.25)["w"]
    )


def test_targets_by_name() -> None:
    program = Program(Target.of("sm_90"))
    group = ParamGroup(program, "trunk", 0, [ParamSpec("w", (2, 3)), ParamSpec("b", (5,))])
    target = TargetGroup(program, group)
    assert list(target) == ["w", "b"]
    assert target.name == "trunk"
    assert target["w"].shape == (2, 3) and target["b"].offset == 8
    assert target["w"].storage is target["b"].storage is target.values.storage
    with pytest.raises(KeyError, match=r"no target of 'x'; group 'trunk' has w, b"):
        target["x"]
