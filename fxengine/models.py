"""The two models of a training session: what they read, what they are judged by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fxengine.config import StepConfig
from fxengine.data import Dataset
from fxengine.data.transitions import BRANCHES, TransitionSet, TransitionSettings, make_transitions
from fxengine.settings import SMALL, TrainSettings

_AUX_LOSSES = {"w_nb": "L_nb", "w_regime": "L_regime"}
_HEAD_LOSSES = {"w_c51": "L_c51", "w_cql": "L_cql", "w_distill": "L_distill", **_AUX_LOSSES}


@dataclass(frozen=True, eq=False)
class Model:
    """What a training session trains.

    Attributes:
        config: the step.
        data: rows of the training part by input, to lie on the device.
        held_out: inputs of an evaluation of the chosen validation rows.
        next_bar: next-bar labels of the validation rows, int32.
        regime: regime labels of the validation rows, int32.
        losses: the losses that make up the total, by the signals that weigh them.
        rates: signals that the schedule of the learning rate sets.
        chunk: validation rows that are evaluated at once.
        interim: validation rows that are evaluated while training runs, evenly spaced; the last validation uses all.
        transitions: of the full model.
    """

    config: StepConfig
    data: dict[str, NDArray[Any]]
    held_out: Callable[[NDArray[np.int64]], dict[str, NDArray[Any]]]
    next_bar: NDArray[np.int32]
    regime: NDArray[np.int32]
    losses: Mapping[str, str]
    rates: tuple[str, ...]
    chunk: int
    interim: int
    transitions: TransitionSet | None = None

    @property
    def is_full(self) -> bool:
        """Whether this is the whole specified step."""
        return self.transitions is not None


def make_model(dataset: Dataset, settings: TrainSettings, kind: str) -> Model:
    """The model that the settings ask for, on a kind of device (`sim` or `cuda`).

    Raises:
        ConfigError: sizes that cannot be built.
        DataError: the bars give no transitions.
    """
    batch = settings.rows(kind)
    if settings.model == "aux":
        return _auxiliary(dataset, batch)
    return _full(dataset, settings, batch, SMALL if settings.chosen_sizes(kind) == "small" else {}, kind)


def _auxiliary(dataset: Dataset, batch: int) -> Model:
    train, held = dataset.train, dataset.validation
    config = StepConfig.aux_only(batch=batch, state=dataset.state_size, regimes=dataset.regimes)
    return Model(
        config,
        {"state": train.states, "nb_label": train.next_bar, "regime_label": train.regime},
        lambda at: {"state": held.states[at], "nb_label": held.next_bar[at], "regime_label": held.regime[at]},
        held.next_bar,
        held.regime,
        _AUX_LOSSES,
        # Not every group's rate: setting all of them takes ten times as long.
        ("lr.aux_trunk", "lr.aux_heads"),
        chunk=8192,
        interim=4096,
    )


def _full(dataset: Dataset, settings: TrainSettings, batch: int, sizes: Mapping[str, Any], kind: str) -> Model:
    config = StepConfig(batch=batch, state=dataset.state_size, regimes=dataset.regimes, branches=BRANCHES, **sizes)
    transitions = make_transitions(
        dataset,
        TransitionSettings(gamma=settings.gamma, v_min=config.v_min, v_max=config.v_max, seed=settings.seed),
    )
    held = transitions.validation

    def held_out(at: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        # Midpoints instead of drawn fractions: the same rows are judged alike at every validation.
        fractions = {
            name: np.broadcast_to((np.arange(n, dtype=np.float32) + np.float32(0.5)) / np.float32(n), (len(at), n))
            for name, n in (("tau", config.iqn_quantiles), ("tau_target", config.iqn_target_quantiles))
        }
        return {**held.inputs(at), **fractions}

    return Model(
        config,
        transitions.train.inputs(),
        held_out,
        held.nb_label,
        held.regime_label,
        _HEAD_LOSSES,
        ("lr",),
        chunk=512,
        interim=512 if kind == "sim" else 4096,
        transitions=transitions,
    )
