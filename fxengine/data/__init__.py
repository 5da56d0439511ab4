"""Market data: price bars, look-ahead-free features, labels and chronological training/validation parts.

    from fxengine.data import demo_bars, load_bars, make_dataset
    dataset = make_dataset(load_bars("eurusd.csv"), lookahead=1, regimes=4)
    dataset.train.states            # float32 [n, 48], normalised by training statistics
    print(dataset.describe())

Importing this package needs NumPy at most. Reading files needs pandas (`pip install fxengine[demo]`), which is
imported when a file is read and not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxengine.data.bars import Bars
    from fxengine.data.dataset import Baseline, Dataset, Part, make_dataset
    from fxengine.data.errors import DataError
    from fxengine.data.features import DEFAULT_FEATURES, FAMILIES, Features, FeatureSpec, build_features
    from fxengine.data.files import demo_bars, load_bars, save_bars
    from fxengine.data.labels import next_bar_labels, regime_edges, regime_labels, trailing_volatility
    from fxengine.data.normalizer import Normalizer
    from fxengine.data.transitions import Transitions, TransitionSet, TransitionSettings, make_transitions

_HOME = {
    "Bars": "bars",
    "Baseline": "dataset",
    "DEFAULT_FEATURES": "features",
    "DataError": "errors",
    "Dataset": "dataset",
    "FAMILIES": "features",
    "FeatureSpec": "features",
    "Features": "features",
    "Normalizer": "normalizer",
    "Part": "dataset",
    "TransitionSet": "transitions",
    "TransitionSettings": "transitions",
    "Transitions": "transitions",
    "build_features": "features",
    "demo_bars": "files",
    "load_bars": "files",
    "make_dataset": "dataset",
    "make_transitions": "transitions",
    "next_bar_labels": "labels",
    "regime_edges": "labels",
    "regime_labels": "labels",
    "save_bars": "files",
    "trailing_volatility": "labels",
}

__all__ = [
    "DEFAULT_FEATURES",
    "FAMILIES",
    "Bars",
    "Baseline",
    "DataError",
    "Dataset",
    "FeatureSpec",
    "Features",
    "Normalizer",
    "Part",
    "TransitionSet",
    "TransitionSettings",
    "Transitions",
    "build_features",
    "demo_bars",
    "load_bars",
    "make_dataset",
    "make_transitions",
    "next_bar_labels",
    "regime_edges",
    "regime_labels",
    "save_bars",
    "trailing_volatility",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
