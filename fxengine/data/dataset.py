"""Bars as a training and a validation part: states, labels, baselines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.data.bars import Bars
from fxengine.data.errors import DataError
from fxengine.data.features import FeatureSpec, build_features
from fxengine.data.labels import MASKED, next_bar_labels, regime_edges, regime_labels, trailing_volatility
from fxengine.data.normalizer import Normalizer


@dataclass(frozen=True, eq=False)
class Part:
    """Consecutive bars with everything that training needs of them.

    Attributes:
        name: "train" or "validation".
        bars: the bars of these rows, for prices (m of them).
        start: position of row 0 in the bars that the dataset was made of.
        states: float32 [m, S], normalised.
        next_bar: int32 [m]: 1 up, 0 down, -1 masked.
        regime: int32 [m]: 0 calm to regimes-1 wild.
    """

    name: str
    bars: Bars
    start: int
    states: NDArray[np.float32]
    next_bar: NDArray[np.int32]
    regime: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.states)

    @property
    def time(self) -> NDArray[np.datetime64]:
        """datetime64[ns] [m], UTC."""
        return self.bars.time


@dataclass(frozen=True)
class Baseline:
    """What always naming the training part's most frequent class scores; a network must do better.

    Attributes:
        next_bar: share of the part's valid next-bar labels that equal `next_bar_class`.
        regime: the same for the regime.
        next_bar_class: most frequent valid class of the training part (the lower one on ties).
        regime_class: the same for the regime.
        next_bar_rows: number of valid next-bar labels in the part.
        regime_rows: number of valid regime labels in the part.
    """

    next_bar: float
    regime: float
    next_bar_class: int
    regime_class: int
    next_bar_rows: int
    regime_rows: int


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training part and the validation part that follows it in time.

    Attributes:
        train: earlier rows. The next-bar labels of its last `lookahead` rows are masked, because they would be read
            off closes of the validation part; their states and regimes stay.
        validation: later rows.
        spec: the features, in order.
        normalizer: statistics of the training states.
        edges: float64 [regimes - 1], volatility quantiles of the training part.
        lookahead: bars ahead of the next-bar label.
        volatility_window: bars of the trailing volatility that makes the regime.
        source: where the bars came from.
    """

    train: Part
    validation: Part
    spec: FeatureSpec
    normalizer: Normalizer
    edges: NDArray[np.float64]
    lookahead: int
    volatility_window: int
    source: str

    @property
    def state_size(self) -> int:
        """S, the width of the states."""
        return self.spec.size

    @property
    def regimes(self) -> int:
        """Number of regime classes."""
        return len(self.edges) + 1

    def states(self, bars: Bars) -> NDArray[np.float32]:
        """Normalised states of other bars (newer ones, say), float32 [len(bars) - spec.lookback, S].

        Row i belongs to bar spec.lookback + i. Bars that the dataset was made of give the same bits again, also
        when only the last `spec.lookback + 1` of them are passed.

        Raises:
            DataError: fewer than `spec.lookback + 1` bars.
        """
        return self.normalizer.apply(build_features(bars, self.spec).valid)

    def majority_baseline(self, part: Literal["train", "validation"] = "validation") -> Baseline:
        """The most frequent classes of the training part, evaluated on `part`; valid rows only.

        Raises:
            DataError: no valid label in the training part or in `part`.
        """
        if part not in ("train", "validation"):
            raise DataError(f"part is {part!r}, expected 'train' or 'validation'")
        judged = self.train if part == "train" else self.validation
        next_bar = _majority("next-bar", self.train.next_bar, judged.next_bar, judged.name)
        regime = _majority("regime", self.train.regime, judged.regime, judged.name)
        return Baseline(next_bar[1], regime[1], next_bar[0], regime[0], next_bar[2], regime[2])

    def describe(self) -> str:
        """A few lines for people: sizes, dates, class shares, baselines, constant features."""
        lines = [
            f"{self.source}: states of {self.state_size} features, {self.spec.lookback} bars back",
            f"next bar: {self.lookahead} ahead; regime: {self.regimes} classes of volatility over "
            f"{self.volatility_window} bars, edges {', '.join(f'{edge:.3g}' for edge in self.edges)}",
        ]
        for part in (self.train, self.validation):
            span = f"{str(part.time[0])[:16]} to {str(part.time[-1])[:16]}"
            down, up, masked = (int(np.count_nonzero(part.next_bar == label)) for label in (0, 1, MASKED))
            counts = [int(np.count_nonzero(part.regime == label)) for label in range(self.regimes)]
            lines.append(
                f"{part.name}: {len(part)} rows, {span} UTC; down {down}, up {up}, masked {masked}; "
                f"regimes {' '.join(map(str, counts))}"
            )
        try:
            base = self.majority_baseline()
        except DataError as error:
            lines.append(f"no baseline: {error}")
        else:
            lines.append(
                f"majority baseline on validation: next bar {base.next_bar:.4f} (always {base.next_bar_class}), "
                f"regime {base.regime:.4f} (always {base.regime_class})"
            )
        if self.normalizer.constant:
            lines.append(f"constant in training, so always 0: {', '.join(self.normalizer.constant)}")
        return "\n".join(lines)


def make_dataset(
    bars: Bars,
    lookahead: int = 1,
    regimes: int = 4,
    validation: float = 0.2,
    volatility_window: int = 24,
    *,
    features: FeatureSpec | None = None,
    clip: float = 5.0,
    episode_ends: ArrayLike | None = None,
) -> Dataset:
    """Split bars in time and compute states and labels, with every statistic from the training part alone.

    The warm-up of features and volatility is dropped first. Of the rows left the last `validation` share, rounded
    to the nearest, is the validation part. The next-bar labels of the last `lookahead` training rows are masked
    (the purge), so no training label depends on a close of the validation part; validation states may look back
    into the training part, as they could in life.

    Args:
        bars: checked bars.
        lookahead: bars ahead of the next-bar label.
        regimes: number of volatility classes, at least 2.
        validation: share of the validation part, in (0, 1).
        volatility_window: one-bar returns in the trailing volatility.
        features: None: the default 48.
        clip: bound of normalised features, in standard deviations.
        episode_ends: ends of episodes as positions or bool [len(bars)], see `next_bar_labels`.

    Raises:
        DataError: a parameter out of range, too few bars (needed and given are named), too few distinct volatilities.
    """
    spec = FeatureSpec() if features is None else features
    if not 0.0 < validation < 1.0:
        raise DataError(f"validation is {validation}, expected a share between 0 and 1, both excluded")
    labels = next_bar_labels(bars.close, lookahead, episode_ends)
    volatility = trailing_volatility(bars.close, volatility_window)
    first = max(spec.lookback, volatility_window)
    # Each part keeps at least one row whose label is not masked by the purge or the end of the data, and the training
    # part can fill every regime.
    smallest_train = max(lookahead + 1, regimes)
    rows = max(0, len(bars) - first)
    held = _held(rows, validation)
    if held < lookahead + 1 or rows - held < smallest_train:
        bars.require(
            first + _rows_needed(smallest_train, lookahead + 1, validation),
            f"a dataset with {first} warm-up bars, lookahead {lookahead} and a validation share of {validation:g}",
        )
    split = len(bars) - held
    values = build_features(bars, spec).values
    normalizer = Normalizer.fit(values[first:split], names=spec.names, clip=clip)
    edges = regime_edges(volatility[first:split], regimes)
    labels[split - lookahead : split] = MASKED
    regime = regime_labels(volatility, edges)

    def part(name: str, start: int, stop: int) -> Part:
        return Part(
            name,
            bars[start:stop],
            start,
            normalizer.apply(values[start:stop]),
            labels[start:stop].copy(),
            regime[start:stop].copy(),
        )

    return Dataset(
        part("train", first, split),
        part("validation", split, len(bars)),
        spec,
        normalizer,
        edges,
        lookahead,
        volatility_window,
        bars.source,
    )


def _held(rows: int, validation: float) -> int:
    return int(rows * validation + 0.5)


def _rows_needed(train: int, held: int, validation: float) -> int:
    """Fewest rows whose parts hold at least `train` and `held` rows, now and for every larger number."""
    rows = max(int((train - 1) / (1.0 - validation)), int((held - 1) / validation))
    while _held(rows, validation) < held or rows - _held(rows, validation) < train:
        rows += 1
    return rows


def _majority(kind: str, training: NDArray[np.int32], judged: NDArray[np.int32], part: str) -> tuple[int, float, int]:
    """Most frequent valid class of the training labels, its share of the judged valid labels, their number."""
    valid_training, valid = training[training != MASKED], judged[judged != MASKED]
    for name, labels in (("train", valid_training), (part, valid)):
        if len(labels) == 0:
            raise DataError(f"the {name} part has no valid {kind} label")
    majority = int(np.argmax(np.bincount(valid_training)))
    return majority, float(np.mean(valid == majority)), len(valid)
