"""The input of an acting program: what the host wrote to mapped memory, copied to the device (`act.cu`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fxengine.graphs import CONSTANTS, MAPPED, Family, Program, Tensor

# Fewest and most words of a tile, and the blocks that read host memory side by side before tiles grow.
_LEAST_WORDS, _MOST_WORDS, _BLOCKS = 32, 1024, 128


def _tiles(fields: Mapping[str, Any]) -> int:
    return -(-int(fields["words"]) // int(fields["tile_words"]))


ACT_READ = Family("act_read", "act.cu", "fx_act_read", "ActRead", tiles=_tiles)


def tile_words(words: int) -> int:
    """Words of a tile: so many that `_BLOCKS` tiles hold all, a power of two from 32 to 1024."""
    size = _LEAST_WORDS
    while size < _MOST_WORDS and size * _BLOCKS < words:
        size *= 2
    return size


def read(
    program: Program, source: Tensor, target: Tensor, *, slots: Sequence[int] | None = None, label: str | None = None
) -> None:
    """Append: target = source, read from mapped memory past the caches.

    Args:
        program: program to append to.
        source: uint32 [words] in mapped memory.
        target: without gaps; of as many 4-byte words as `source`, or with slots of any number.
        slots: places in `target`, one for each word of `source`, each once; None: all of target, in order.
        label: shown in tables (default: the name of `target`).

    Raises:
        ValueError: source is not mapped, sizes do not match, or a slot is not in the target or given twice.
    """
    label = label or target.name
    if source.dtype != np.uint32 or len(source.shape) != 1 or source.storage.arena != MAPPED:
        raise ValueError(
            f"'{label}': source must be uint32 [words] in mapped memory, "
            f"got {source.dtype} {source.shape} in arena '{source.storage.arena}'"
        )
    words, rest = divmod(target.size * target.dtype.itemsize, 4)
    if rest or not target.contiguous or (slots is None and words != source.size):
        raise ValueError(
            f"'{label}': target must have the {source.size} words of source and no gaps, "
            f"got {target.dtype} {target.shape} with row stride {target.ld}"
        )
    places, written = None, [target]
    if slots is not None:
        chosen = [int(s) for s in slots]
        if len(chosen) != source.size or len(set(chosen)) != len(chosen) or not 0 <= min(chosen) <= max(chosen) < words:
            raise ValueError(
                f"'{label}': {source.size} different slots below {words} are needed, one for each word, got {chosen}"
            )
        data = np.array(chosen, np.int32)
        places = program.tensor(f"{label}.slots", data.shape, np.int32, arena=CONSTANTS, data=data)
        written = [target.flat(s, s + 1) for s in chosen] if target.dtype.itemsize == 4 else [target]
    program.launch(
        ACT_READ,
        {
            "source": source,
            "target": target,
            "slots": places or 0,
            "words": source.size,
            "tile_words": tile_words(source.size),
        },
        reads=[source, places],
        writes=written,
        label=label,
    )
