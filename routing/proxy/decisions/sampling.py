"""A part of the block hashes, for a reader who wants every record but not every hash.

Which ones those are is a property of the blocks, not of the prompts: the hash lies below that part of its range.
Whoever replays them then sees the same blocks again wherever they come back (SHARDS: Waldspurger et al., "Efficient
MRC Construction with SHARDS", FAST 2015). A smaller part is a subset of a larger one.
"""

from __future__ import annotations

from typing import Any, Final

_HASHES: Final = 1 << 64


def bound(ratio: float) -> int:
    """Hashes below it are in this part of them, 0 to 1."""
    return round(ratio * _HASHES)


def thinned(shown: dict[str, Any], ratio: float) -> dict[str, Any]:
    """A record that is shown with all its blocks, with this part of them."""
    if ratio >= 1:
        return shown
    below = bound(ratio)
    kept = [(place, block) for place, block in enumerate(shown["blocks"]) if int(block, 16) < below]
    return {**shown, "blocks": [block for _, block in kept], "positions": [place for place, _ in kept]}
