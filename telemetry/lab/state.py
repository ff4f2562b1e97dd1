"""A replay as bytes, so that another worker goes on with warm caches: at most ``MAX_ENTRIES`` blocks of each model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from telemetry.lab.chains import Hashes
from telemetry.lab.ladder import Sums
from telemetry.lab.replay import Replay
from telemetry.lab.tally import Tally

FORM = 4  # of the bytes: another one is not read, and the replay begins anew
FACTS = ("ratio", "estimated", "counted", "hash_tokens", "since_s", "written")


class StateError(ValueError):
    """Bytes of another form."""


def dump(replay: Replay, tally: Tally) -> bytes:
    """All that the next requests need, and what those of the bin before them came to. 8 bytes a block."""
    return msgspec.msgpack.encode(
        {
            "form": FORM,
            "facts": {name: getattr(replay, name) for name in FACTS},
            "seen": [_packed(replay.of_old), _packed(replay.lately)],
            "whole": _packed(replay.whole),
            "ideal": {name: _packed(blocks) for name, blocks in replay.ideal.items()},
            "placed": {name: _packed(blocks) for name, blocks in replay.placed.items()},
            "sums": {group: asdict(sums) for group, sums in tally.sums.items()},
            "reason": tally.reason,
            "partings": {group: [_packed(at), tokens.tobytes()] for group, (at, tokens) in tally.partings.items()},
        }
    )


def load(state: bytes) -> tuple[Replay, Tally]:
    """Both; StateError for bytes of another form."""
    try:
        told: dict[str, Any] = msgspec.msgpack.decode(state)
    except msgspec.DecodeError as error:
        raise StateError(str(error)) from None
    if told.get("form") != FORM:
        raise StateError(f"form {told.get('form')}")
    replay, tally = Replay(None), Tally()
    for name in FACTS:
        setattr(replay, name, told["facts"][name])
    replay.of_old, replay.lately = map(_unpacked, told["seen"])
    replay.whole = _unpacked(told["whole"])
    replay.ideal = {name: _unpacked(blocks) for name, blocks in told["ideal"].items()}
    replay.placed = {name: _unpacked(blocks) for name, blocks in told["placed"].items()}
    tally.sums = {group: Sums(**sums) for group, sums in told["sums"].items()}
    tally.reason = told["reason"]
    tally.partings = {group: (_unpacked(at), np.frombuffer(tokens)) for group, (at, tokens) in told["partings"].items()}
    return replay, tally


def _packed(blocks: Hashes) -> bytes:
    return blocks.tobytes()


def _unpacked(packed: bytes) -> Hashes:
    return np.frombuffer(packed, np.uint64)
