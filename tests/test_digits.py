"""A user's own network on the public builder: a classifier of handwritten digits, captured, trained and judged."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import fxengine as fx

sklearn = pytest.importorskip("sklearn.datasets", reason="scikit-learn is in the extra `test`")

Digits = dict[str, NDArray[np.generic]]


def classifier(step: fx.StepBuilder, rows: int = 64) -> None:
    step.group(
        "net",
        [
            fx.ParamSpec("w1", (64, 64)),
            fx.ParamSpec("b1", (64,)),
            fx.ParamSpec("w2", (10, 64)),
            fx.ParamSpec("b2", (10,)),
        ],
    )
    image = step.input("image", (rows, 64))
    digit = step.input("digit", (rows,), np.int32)
    hidden = step.tape.linear(image, "w1", "b1", activation="relu", name="hidden")
    logits = step.output("logits", step.tape.linear(hidden, "w2", "b2", name="logits"))
    step.tape.crossentropy(logits, digit, weight=step.signal("w_nb"), loss="loss", accuracy="accuracy", name="ce")


@pytest.fixture(scope="module")
def digits() -> tuple[Digits, Digits]:
    """Training and test part: 1,297 and 500 of the 1,797 images, shuffled."""
    images, labels = sklearn.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    data = {"image": (images / 16.0).astype(np.float32)[order], "digit": labels.astype(np.int32)[order]}
    return {n: a[500:] for n, a in data.items()}, {n: a[:500] for n, a in data.items()}


def test_digits_are_learnt(device: fx.Device, digits: tuple[Digits, Digits]) -> None:
    train, test = digits
    judged = partial(classifier, rows=500)
    with fx.Engine(classifier, groups={0: "net"}, device=device, data=train, signals={"lr": 3e-3}) as engine:
        before = engine.evaluate(test, definition=judged)
        assert before["accuracy"] < 0.3
        for _ in range(400):
            engine.step()
        after = engine.evaluate(test, definition=judged)
        report = engine.telemetry()
        census = engine.graph.census()
        p = {name: engine.params[name].astype(np.float64) for name in engine.params}
    assert after["accuracy"] > 0.95
    assert after["loss"] < 0.2 * before["loss"]
    assert report is not None and (report.step, report.skipped) == (400, 0)
    assert (census.instantiations, census.nodes["memset"]) == (1, 1)

    hidden = np.maximum(test["image"].astype(np.float64) @ p["w1"].T + p["b1"], 0.0)
    guessed = (hidden @ p["w2"].T + p["b2"]).argmax(axis=1)
    assert after["accuracy"] == pytest.approx(np.mean(guessed == test["digit"]), abs=1.0 / 500 + 1e-6)


def test_the_readme_shows_this_network() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert inspect.getsource(classifier) in readme


def test_the_same_seed_learns_the_same_bits(device: fx.Device, digits: tuple[Digits, Digits]) -> None:
    hashes = []
    for captured in (True, False):
        with fx.Engine(classifier, groups={0: "net"}, device=device, data=digits[0], seed=7) as engine:
            for _ in range(20):
                engine.step(captured=captured)
            hashes.append(engine.state_hash())
    assert hashes[0] == hashes[1]
