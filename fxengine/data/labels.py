"""Labels of bars: direction of the next move, regime of volatility. -1 is masked: no loss, no accuracy."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fxengine.data.errors import DataError, Place
from fxengine.data.rolling import rolling_sum, shift

MASKED = -1


def next_bar_labels(close: ArrayLike, lookahead: int, episode_ends: ArrayLike | None = None) -> NDArray[np.int32]:
    """Sign of close[t + lookahead] - close[t] as 1 up, 0 down, -1 masked.

    Masked is a bar whose two closes are equal, or whose t + lookahead lies past the data or past the last bar of
    the episode of t. So 100 strictly moving closes with lookahead 60 give 40 labels and 60 masked.

    Args:
        close: float [n].
        lookahead: bars ahead, at least 1.
        episode_ends: bool [n], True at the last bar of an episode, or the positions of those bars (integers, in any
            order). None: one episode. Bars after the last end are an episode that runs to the end of the data.

    Returns:
        int32 [n].

    Raises:
        DataError: close is not one-dimensional or not finite, lookahead < 1, an end outside the data.
    """
    prices = _finite(close, "close")
    count = len(prices)
    lookahead = _whole(lookahead, "lookahead", least=1)
    labels = np.full(count, MASKED, dtype=np.int32)
    if lookahead >= count:
        return labels
    now, then = prices[:-lookahead], prices[lookahead:]
    labels[:-lookahead] = np.where(then > now, 1, np.where(then < now, 0, MASKED))
    if episode_ends is not None:
        ends = _end_mask(episode_ends, count)
        # Number of ends before t: equal at t and t + lookahead exactly if both lie in one episode.
        episode: NDArray[np.int64] = np.cumsum(ends) - ends
        labels[:-lookahead][episode[lookahead:] != episode[:-lookahead]] = MASKED
    return labels


def trailing_volatility(close: ArrayLike, window: int) -> NDArray[np.float64]:
    """Root mean square of the last `window` one-bar log returns, float64 [n]; NaN at the first `window` bars.

    Raises:
        DataError: close is not one-dimensional, not finite or not positive, window < 1.
    """
    prices = _finite(close, "close")
    bad = prices <= 0.0
    if bad.any():
        fault = f"price {prices[np.argmax(bad)]:g} is not positive"
        raise Place("close").error(bad, "close", fault, "Log returns need prices above 0.")
    window = _whole(window, "volatility window", least=1)
    logs = np.log(prices)
    returns = logs - shift(logs, 1)
    return np.sqrt(rolling_sum(returns * returns, window) / window)


def regime_edges(volatility_train: ArrayLike, regimes: int) -> NDArray[np.float64]:
    """Inner edges of `regimes` equally filled buckets of the training part's volatility.

    Args:
        volatility_train: float [n], finite: the training part only, without the warm-up.
        regimes: number of buckets, at least 2.

    Returns:
        float64 [regimes - 1], strictly increasing: the quantiles 1/regimes, 2/regimes, ...

    Raises:
        DataError: fewer values than regimes, or so many equal values that two edges coincide or a bucket would hold
            no training row: then fewer regimes must be asked for (buckets are never merged in silence).
    """
    values = _finite(volatility_train, "volatility")
    regimes = _whole(regimes, "regimes", least=2)
    if len(values) < regimes:
        raise DataError(f"{len(values)} values of volatility given, {regimes} regimes need at least {regimes}")
    edges = np.asarray(np.quantile(values, np.arange(1, regimes) / regimes), dtype=np.float64)
    filled = np.bincount(np.searchsorted(edges, values, side="right"), minlength=regimes)
    if (np.diff(edges) <= 0.0).any() or (filled == 0).any():
        distinct = len(np.unique(values))
        raise DataError(
            f"volatility cannot be cut into {regimes} regimes: edges {[f'{edge:.3g}' for edge in edges]} give buckets "
            f"of {filled.tolist()} rows ({distinct} distinct values in {len(values)}). Ask for fewer regimes or a "
            "longer volatility window."
        )
    return edges


def regime_labels(volatility: ArrayLike, edges: ArrayLike) -> NDArray[np.int32]:
    """Bucket of each volatility: the number of edges <= it, 0 calm to len(edges) wild; NaN (warm-up) is -1 masked.

    A value equal to an edge belongs to the upper bucket.

    Raises:
        DataError: edges are not one-dimensional, finite and strictly increasing.
    """
    bounds = _finite(edges, "edges")
    if len(bounds) == 0 or (np.diff(bounds) <= 0.0).any():
        raise DataError(f"edges are {bounds.tolist()}, expected strictly increasing numbers")
    values = np.asarray(volatility, dtype=np.float64)
    labels = np.searchsorted(bounds, values, side="right").astype(np.int32)
    labels[np.isnan(values)] = MASKED
    return labels


def _whole(value: int, name: str, *, least: int) -> int:
    try:
        whole = operator.index(value)
    except TypeError:
        whole = least - 1
    if whole < least:
        raise DataError(f"{name} is {value!r}, expected a whole number, at least {least}")
    return whole


def _finite(values: ArrayLike, name: str) -> NDArray[np.float64]:
    array = np.ascontiguousarray(values, dtype=np.float64)
    if np.ndim(values) != 1:
        raise DataError(f"{name} has shape {np.shape(values)}, expected one dimension")
    bad = ~np.isfinite(array)
    if bad.any():
        raise Place(name).error(bad, name, f"{array[np.argmax(bad)]} is not finite", "Give finite numbers only.")
    return array


def _end_mask(episode_ends: ArrayLike, count: int) -> NDArray[np.bool_]:
    ends = np.asarray(episode_ends)
    if ends.dtype == np.bool_:
        if ends.shape != (count,):
            raise DataError(f"episode_ends is bool {ends.shape}, close has {count} bars")
        return ends
    if ends.ndim != 1 or (ends.size and ends.dtype.kind not in "iu"):
        raise DataError(f"episode_ends is {ends.dtype} {ends.shape}, expected bool [{count}] or positions")
    outside = (ends < 0) | (ends >= count)
    if outside.any():
        raise DataError(f"episode_ends: position {ends[np.argmax(outside)]} lies outside the {count} bars")
    mask = np.zeros(count, dtype=np.bool_)
    mask[ends.astype(np.int64)] = True
    return mask
