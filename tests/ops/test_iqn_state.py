"""The gradient of a quantile network's state, made apart from those of its weights, against float64."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fxengine.driver import Device, Target
from fxengine.graphs import Plan, Program, Tensor, floor
from fxengine.nets import iqn as nets_iqn
from fxengine.ops import iqn, iqn_fused, linear
from tests.ops.test_iqn_fused import PRECISIONS, TOLERANCE, close, whole_step

Array = np.ndarray[Any, Any]

SIZES = iqn_fused.Sizes(20, 24, 40, 5)
USUAL = iqn_fused.Sizes(64, 256, 128, 12)
BEFORE = 0.5  # what gradients hold before
RUBBISH = 77.0  # and what stands around them


@dataclass
class Case:
    """A quantile network on random data; matrices have `lead` and `pad` columns of NaN before and behind their rows."""

    precision: str
    batch: int = 3
    quantiles: int = 16
    sizes: iqn_fused.Sizes = SIZES
    lead: int = 0
    pad: int = 0
    scale: tuple[float, float] = (0.5, 0.75)
    activation: linear.Activation = "none"
    accumulate: bool = False
    seed: int = 0
    arrays: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        rng, s = np.random.default_rng(self.seed), self.sizes
        arrays = {
            "tau": rng.random((self.batch, self.quantiles)),
            "h2": rng.normal(size=(self.batch, s.features)),
            "w_phi": rng.normal(size=(s.features, s.cosines)) / np.sqrt(s.cosines),
            "b_phi": rng.normal(size=s.features),
            "w_iq1": rng.normal(size=(s.width, s.features)) / np.sqrt(s.features),
            "b_iq1": rng.normal(size=s.width),
            "w_iq2": rng.normal(size=(s.outputs, s.width)) / np.sqrt(s.width),
            "b_iq2": rng.normal(size=s.outputs),
            "dtheta": rng.normal(size=(self.batch * self.quantiles, s.outputs)),
        }
        self.arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
        found = iqn_fused.reference_forward(
            self.arrays["tau"], self.arrays["h2"], self.parameters, precision=self.precision
        )
        self.arrays["hidden"] = found.hidden.astype(np.float32)

    @property
    def parameters(self) -> dict[str, Array]:
        return {name: array for name, array in self.arrays.items() if name[1] == "_"}

    def run(self, device: Device) -> Array:
        program = Program(device.target, self.precision)

        def tensor(name: str, array: Array, around: float = np.nan, arena: str = "inputs") -> Tensor:
            if array.ndim == 1 or name == "tau":
                return program.tensor(name, array.shape, arena=arena, data=array)
            rows, columns = array.shape
            wide = np.full((rows, self.lead + columns + self.pad), around, np.float32)
            wide[:, self.lead : self.lead + columns] = array
            whole = program.tensor(name, wide.shape, arena=arena, data=wide)
            return whole.columns(self.lead, self.lead + columns)

        tensors = {name: tensor(name, array) for name, array in self.arrays.items()}
        scales = [tensor(f"scale{i}", np.array([s], np.float32)) for i, s in enumerate(self.scale)]
        dh2 = tensor("dh2", np.full(self.arrays["h2"].shape, BEFORE, np.float32), RUBBISH, "state")
        iqn_fused.state_gradient(
            program,
            tensors["dtheta"],
            tensors["tau"],
            tensors["h2"],
            iqn_fused.Weights(**{name: tensors[name] for name in self.parameters}),
            tensors["hidden"],
            dh2=dh2,
            weight=scales[0],
            readiness=scales[1],
            activation=self.activation,
            accumulate=self.accumulate,
            name="iqn",
        )
        with device.stream() as stream, Plan(program, device, guard=True) as plan:
            plan.run(stream=stream)
            stream.synchronize()
            plan.check_guards()
            whole = plan.buffer("dh2").read().view(np.float32).reshape(self.batch, -1)
        inside = slice(self.lead, self.lead + self.sizes.features)
        assert (np.delete(whole, inside, axis=1) == RUBBISH).all(), "something was written beside the rows"
        return whole[:, inside]

    def expected(self) -> tuple[Array, Array]:
        """dh2 in float64, and the sums of the absolute values of what it is made of."""
        scale = float(np.prod(self.scale))

        def through(gradient: Array) -> Array:
            return linear.reference_dx(
                gradient, np.eye(self.sizes.features), x=self.arrays["h2"], activation=self.activation
            )

        gradient = iqn_fused.reference_backward(
            self.arrays["dtheta"],
            self.arrays["tau"],
            self.arrays["h2"],
            self.parameters,
            scale=scale,
            precision=self.precision,
        )
        a = {name: np.abs(array.astype(np.float64)) for name, array in self.arrays.items()}
        phi = np.abs(iqn.reference_cosines(self.arrays["tau"], self.sizes.cosines)) @ a["w_phi"].T + a["b_phi"]
        dhidden = (a["dtheta"] @ a["w_iq2"]) * (self.arrays["hidden"] > 0)
        size = (dhidden @ a["w_iq1"] * phi).reshape(self.batch, self.quantiles, -1).sum(axis=1)
        before = BEFORE if self.accumulate else 0.0
        return through(gradient.h2) + before, np.abs(through(scale * size)) + before

    def verify(self, device: Device) -> None:
        found, (expected, size) = self.run(device), self.expected()
        off = np.abs(found - expected) - TOLERANCE[self.precision] * size - 1e-6
        worst = np.unravel_index(int(np.argmax(off)), off.shape)
        assert off[worst] <= 0.0, f"{worst}: {found[worst]} instead of {expected[worst]} +- {size[worst]}"


@settings(max_examples=40)
@given(
    precision=st.sampled_from(PRECISIONS),
    batch=st.integers(1, 9),
    quantiles=st.integers(1, 65),
    sizes=st.builds(
        iqn_fused.Sizes,
        cosines=st.integers(1, 64),
        features=st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129, 144, 260])),
        width=st.integers(1, 128),
        outputs=st.one_of(st.integers(1, 17), st.sampled_from([32, 33, 47])),
    ),
    lead=st.integers(0, 4),
    pad=st.integers(0, 5),
    activation=st.sampled_from(["none", "relu", "elu", "tanh"]),
    accumulate=st.booleans(),
    seed=st.integers(0, 9),
)
@example("tf32", 1, 1, iqn_fused.Sizes(1, 1, 1, 1), 0, 0, "none", False, 0)
@example("tf32", 5, 32, USUAL, 0, 0, "elu", False, 0)
@example("bf16", 5, 32, USUAL, 4, 4, "relu", True, 0)
@example("tf32", 2, 65, iqn_fused.Sizes(60, 132, 124, 36), 0, 0, "elu", True, 0)
@example("bf16", 3, 33, iqn_fused.Sizes(64, 129, 128, 17), 1, 2, "tanh", False, 0)
@example("tf32", 9, 8, iqn_fused.Sizes(64, 30, 128, 16), 2, 0, "none", True, 0)  # pairs of columns, but no quads
def test_any_shape(
    device: Device,
    precision: str,
    batch: int,
    quantiles: int,
    sizes: iqn_fused.Sizes,
    lead: int,
    pad: int,
    activation: linear.Activation,
    accumulate: bool,
    seed: int,
) -> None:
    Case(
        precision,
        batch,
        quantiles,
        sizes,
        lead=lead,
        pad=pad,
        activation=activation,
        accumulate=accumulate,
        seed=seed,
    ).verify(device)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_many_samples_per_block(device: Device, precision: str) -> None:
    Case(precision, batch=3 * device.target.sm_count + 2, quantiles=33, activation="elu").verify(device)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_same_bits_every_time_and_in_any_company(device: Device, precision: str) -> None:
    """Whichever block a sample falls to, and after whichever other one."""
    many = Case(precision, batch=2 * device.target.sm_count + 1, quantiles=40)
    found = many.run(device)
    np.testing.assert_array_equal(many.run(device), found)
    last = Case(precision, batch=2, quantiles=40)
    rows = {"tau": 2, "h2": 2, "dtheta": 80, "hidden": 80}
    last.arrays = {name: array[-rows.get(name, len(array)) :] for name, array in many.arrays.items()}
    np.testing.assert_array_equal(last.run(device), found[-2:])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scale", [(0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_scale_of_zero_is_an_exact_zero(
    device: Device, precision: str, scale: tuple[float, float], accumulate: bool
) -> None:
    """Whatever dtheta holds; accumulating, the bits stay."""
    for sick in (0.0, np.nan, np.inf):
        case = Case(precision, scale=scale, accumulate=accumulate, activation="elu")
        case.arrays["dtheta"][:] = sick
        found = case.run(device)
        np.testing.assert_array_equal(found, np.float32(BEFORE if accumulate else 0.0))
        assert not np.signbit(found).any()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sick", ["dtheta", "tau", "h2"])
def test_nan_stays_with_its_sample(device: Device, precision: str, sick: str) -> None:
    """And h2 is read for its slope only, where there is one."""
    for activation in ("none", "tanh"):
        case = Case(precision, batch=5, quantiles=34, activation=activation)
        well = case.run(device)
        case.arrays[sick][{"dtheta": 2 * 34 + 33, "tau": 2, "h2": 2}[sick]] = np.nan
        ill = case.run(device)
        if sick == "h2" and activation == "none":
            np.testing.assert_array_equal(ill, well)
            continue
        assert np.isnan(ill[2]).all()
        np.testing.assert_array_equal(np.delete(ill, 2, axis=0), np.delete(well, 2, axis=0))


def test_who_is_served_is_a_pure_function() -> None:
    hopper, card, old = (Target.of(arch) for arch in ("sm_90", "sm_120", "sm_75"))
    for target in (hopper, card):
        assert iqn_fused.fits_state(target, "tf32", USUAL) and iqn_fused.fits_state(target, "bf16", USUAL)
    assert not iqn_fused.fits_state(hopper, "fp32", USUAL)
    assert not iqn_fused.fits_state(old, "bf16", USUAL)
    assert not iqn_fused.fits_state(hopper, "tf32", iqn_fused.Sizes(65, 256, 128, 12))
    assert not iqn_fused.fits_state(hopper, "tf32", iqn_fused.Sizes(64, 256, 129, 12))
    assert iqn_fused.apart(hopper, 256) and not iqn_fused.apart(hopper, 1024)
    for target, shares in ((hopper, [2 / 3, 2 / 3]), (card, [0.5, 1.0])):
        assert [iqn_fused.forward_share(target, "tf32", USUAL, n, 32) for n in (64, 4096)] == shares
    assert not iqn_fused.apart(Target.of("sim"), 256)


def test_what_does_not_fit_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match=r"in fp32 on .* \(see fits_state\); use the separate layers"):
        Case("fp32").run(device)
    case = Case("tf32")
    case.arrays["dtheta"] = case.arrays["dtheta"][:, :4]
    with pytest.raises(ValueError, match=r"dtheta must be float32 \(48, 5\).*\(48, 4\)"):
        case.run(device)
    case.arrays["tau"] = np.array(0.5, np.float32)
    with pytest.raises(ValueError, match=r"tau must be float32 \[B, N\]"):
        case.run(device)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_as_with_one_launch_for_all_gradients(
    device: Device, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nets_iqn, "_apart", lambda p, net, h: True)
    apart, launches = whole_step(device, precision)
    assert [n for name, n in launches.items() if name.startswith("iqn_state")] == [1]
    monkeypatch.setattr(nets_iqn, "_apart", lambda p, net, h: False)
    together, others = whole_step(device, precision)
    assert not [name for name in others if name.startswith("iqn_state")]
    for name, expected in together.items():
        close(apart[name], expected, precision, name)


def test_its_products_are_counted() -> None:
    program = Program(Target.of("sm_90"), "tf32")
    s, tensor = USUAL, program.tensor
    weights = iqn_fused.Weights(
        tensor("w_phi", (s.features, s.cosines)),
        tensor("b_phi", (s.features,)),
        tensor("w_iq1", (s.width, s.features)),
        tensor("b_iq1", (s.width,)),
        tensor("w_iq2", (s.outputs, s.width)),
        tensor("b_iq2", (s.outputs,)),
    )
    iqn_fused.state_gradient(
        program,
        tensor("dtheta", (64 * 32, s.outputs)),
        tensor("tau", (64, 32)),
        tensor("h2", (64, s.features)),
        weights,
        tensor("hidden", (64 * 32, s.width)),
        dh2=tensor("dh2", (64, s.features)),
        weight=tensor("weight", (1,)),
        readiness=tensor("readiness", (1,)),
        name="iqn",
    )
    (record,) = program.launches
    assert floor.record_flop(record) == 2 * 64 * 32 * (64 * 256 + 256 * 128 + 128 * 12)
    assert floor.record_precision(record) == "tf32"
