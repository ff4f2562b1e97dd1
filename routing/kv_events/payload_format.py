"""KV event payloads as engines send them: the fields of each release, as msgspec structures.

What is costly and mostly unused stays undecoded: the ids of tokens.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

BlockHash = int | bytes  # of the engine; bytes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0


class StoredArray(Struct, array_like=True, tag="BlockStored"):
    """Up to vLLM 0.23."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Raw
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class RemovedArray(Struct, array_like=True, tag="BlockRemoved"):
    """Up to vLLM 0.23."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class ClearedArray(Struct, array_like=True, tag="AllBlocksCleared"):
    """Up to vLLM 0.23."""


class StoredMap(Struct, tag_field="type", tag="BlockStored"):
    """Since vLLM 0.24."""

    block_hashes: list[BlockHash]
    token_ids: Raw
    block_size: int
    parent_block_hash: BlockHash | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class RemovedMap(Struct, tag_field="type", tag="BlockRemoved"):
    """Since vLLM 0.24."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class ClearedMap(Struct, tag_field="type", tag="AllBlocksCleared"):
    """Since vLLM 0.24."""


class _MapBatch(Struct, array_like=True):
    at_s: float
    events: list[StoredMap | RemovedMap | ClearedMap]
    rank: int | None = None


class _ArrayBatch(Struct, array_like=True):
    at_s: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    rank: int | None = None


class _MixedBatch(Struct, array_like=True):
    """Of both forms, or with events of unknown types."""

    at_s: float
    events: list[Raw]
    rank: int | None = None


Sent = StoredMap | RemovedMap | ClearedMap | StoredArray | RemovedArray | ClearedArray
_TYPES: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_decode_maps: Final = msgspec.msgpack.Decoder(_MapBatch).decode
_decode_arrays: Final = msgspec.msgpack.Decoder(_ArrayBatch).decode
_decode_mixed: Final = msgspec.msgpack.Decoder(_MixedBatch).decode
_decode_array: Final = msgspec.msgpack.Decoder(StoredArray | RemovedArray | ClearedArray).decode
_decode_map: Final = msgspec.msgpack.Decoder(StoredMap | RemovedMap | ClearedMap).decode
_decode_any: Final = msgspec.msgpack.Decoder().decode


def decode(payload: bytes) -> tuple[float, list[Any], int | None, int]:
    """Time, events (``Sent``) of known types, rank and the number of all events; a MsgspecError."""
    for decoder in (_decode_maps, _decode_arrays):
        try:
            batch = decoder(payload)
        except msgspec.ValidationError:
            continue
        return batch.at_s, batch.events, batch.rank, len(batch.events)
    mixed = _decode_mixed(payload)
    events = [event for raw in mixed.events if (event := _decode_event(raw)) is not None]
    return mixed.at_s, events, mixed.rank, len(mixed.events)


def _decode_event(raw: Raw) -> Sent | None:
    """One event; None if its type is unknown."""
    first = bytes(memoryview(raw)[:1])
    is_map = first[0] & 0xF0 == 0x80 or first in {b"\xde", b"\xdf"}
    try:
        sent: Sent = _decode_map(raw) if is_map else _decode_array(raw)
    except msgspec.ValidationError:
        if _has_unknown_type(raw):
            return None
        raise
    return sent


def _has_unknown_type(raw: Raw) -> bool:
    event = _decode_any(raw)
    name = event.get("type") if isinstance(event, dict) else event[0] if isinstance(event, list) and event else None
    return isinstance(name, str) and name not in _TYPES
