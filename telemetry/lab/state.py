"""A replay's models as bytes, so that another worker goes on with warm caches: at most ``MAX_ENTRIES`` blocks each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import msgspec

from telemetry.lab.caches import Cache
from telemetry.lab.replay import Replay

FORM = 2  # of the bytes: another one is not read, and the replay begins anew


class StateError(ValueError):
    """Bytes of another form."""


def dump(replay: Replay) -> bytes:
    """All that the next window needs. 8 bytes a block, and 4 for each place where prompts part."""
    return msgspec.msgpack.encode(
        {
            "form": FORM,
            "ratio": replay.ratio,
            "at_s": replay.at_s,
            "estimated": replay.estimated,
            "counted": replay.counted,
            "hash_tokens": replay.hash_tokens,
            "lately": _packed(replay.forever.lately),
            "of_old": _packed(replay.forever.of_old),
            "since_s": replay.forever.since_s,
            "whole": _packed_runs(replay.whole),
            "ideal": {name: _packed_runs(replay.ideal.caches[place]) for name, place in replay.ideal.places.items()},
            "placed": {name: _packed_runs(replay.placed.caches[place]) for name, place in replay.placed.places.items()},
        }
    )


def load(state: bytes, rooms: Mapping[str, int] | None) -> Replay:
    """The replay, in a fleet of these rooms; StateError for bytes of another form."""
    try:
        told: dict[str, Any] = msgspec.msgpack.decode(state)
    except msgspec.DecodeError as error:
        raise StateError(str(error)) from None
    if told.get("form") != FORM:
        raise StateError(f"form {told.get('form')}")
    replay = Replay(None, told["ratio"])
    replay.at_s, replay.hash_tokens = told["at_s"], told["hash_tokens"]
    replay.estimated, replay.counted = told["estimated"], told["counted"]
    replay.resize(rooms)
    replay.forever.remember(_unpacked(told["lately"]), _unpacked(told["of_old"]), told["since_s"])
    if rooms:
        replay.whole.remember(_unpacked_runs(told["whole"]))
        for model, caches in ((replay.ideal, told["ideal"]), (replay.placed, told["placed"])):
            for name, packed in caches.items():
                if name in model.places:
                    model.remember(name, _unpacked_runs(packed))
        replay.resize(rooms)
    return replay


def _packed(blocks: Iterable[int]) -> bytes:
    return array("Q", blocks).tobytes()


def _unpacked(packed: bytes) -> array[int]:
    blocks = array("Q")
    blocks.frombytes(packed)
    return blocks


def _packed_runs(cache: Cache) -> tuple[bytes, bytes]:
    """(lengths, blocks)."""
    runs = list(cache.runs())
    return array("I", map(len, runs)).tobytes(), _packed(chain.from_iterable(runs))


def _unpacked_runs(packed: Sequence[bytes]) -> list[list[int]]:
    lengths, blocks = array("I"), iter(_unpacked(packed[1]))
    lengths.frombytes(packed[0])
    return [list(islice(blocks, length)) for length in lengths]
