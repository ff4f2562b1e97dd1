"""Decodes the payload of one KV event message of vLLM 0.10 to 0.33.

Theory of operation. A payload is the MessagePack array ``[time, [event, ...], rank]``. Up to vLLM 0.23 an event is an
array that begins with its type, and later releases added fields at its end; since 0.24 it is a map with the field
``type``. Fields that are missing or unknown are accepted, and so are
events of unknown types, which are skipped. Everything else that is not as described raises ``MalformedEventsError`` and
nothing else, whatever the bytes are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

MAX_PAYLOAD_BYTES: Final = 2 << 20  # a step that stores 8,192 tokens takes 40 KB, one that evicts 16,384 blocks 1 MB
MAX_BLOCK_TOKENS: Final = 65_536

BlockHash = int | bytes  # of the engine; bytes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0
FULL_ATTENTION: Final = frozenset({None, "full_attention", "mla_attention"})  # of ``kv_cache_spec_kind``


class MalformedEventsError(ValueError):
    """A payload that is no batch of KV events. The text names the field."""


class BlockStored(Struct):
    """Consecutive blocks of one prompt that the engine has computed; the first one continues ``parent``."""

    hashes: list[BlockHash]
    parent: BlockHash | None  # None: the first block begins the prompt
    tokens: array[int]  # ids of all blocks, each ``block_tokens`` long
    block_tokens: int
    adapter: str  # name or number of the LoRA adapter; "" without one
    extra_keys: list[bytes] | None  # of each block: salt and media, encoded; None: not reported
    medium: str | None
    group: int  # of KV cache layers
    kind: str | None  # of attention
    session: str | None


class BlockRemoved(Struct):
    """Blocks that were evicted, each once for each of its copies."""

    hashes: list[BlockHash]
    medium: str | None
    group: int


class AllBlocksCleared(Struct):
    """The cache is empty."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(Struct):
    """The events of one message, in order."""

    at_s: float  # Unix time of the engine
    events: list[Event]
    rank: int | None  # data-parallel rank; None: not reported
    count: int  # of events as sent


# --- as sent -------------------------------------------------------------------------------------------


class _StoredArray(Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None

    @property
    def session_id(self) -> None:
        """Not reported by these releases."""
        return


class _RemovedArray(Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _StoredMap(Struct, tag_field="type", tag="BlockStored"):
    block_hashes: list[BlockHash]
    token_ids: list[int]
    block_size: int
    parent_block_hash: BlockHash | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    session_id: str | None = None


class _RemovedMap(Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(Struct, tag_field="type", tag="AllBlocksCleared"):
    pass


class _MapBatch(Struct, array_like=True):
    at_s: float
    events: list[_StoredMap | _RemovedMap | _ClearedMap]
    rank: int | None = None


class _ArrayBatch(Struct, array_like=True):
    at_s: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    rank: int | None = None


class _MixedBatch(Struct, array_like=True):
    """Of both forms, or with events of unknown types."""

    at_s: float
    events: list[Raw]
    rank: int | None = None


_Sent = _StoredMap | _RemovedMap | _ClearedMap | _StoredArray | _RemovedArray | _ClearedArray
_TYPES: Final = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
_decode_maps: Final = msgspec.msgpack.Decoder(_MapBatch).decode
_decode_arrays: Final = msgspec.msgpack.Decoder(_ArrayBatch).decode
_decode_mixed: Final = msgspec.msgpack.Decoder(_MixedBatch).decode
_decode_array: Final = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode
_decode_map: Final = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap).decode
_decode_any: Final = msgspec.msgpack.Decoder().decode
_encode: Final = msgspec.msgpack.Encoder(order="deterministic").encode


def decode_batch(payload: bytes) -> Batch:
    """Decode a message's payload; MalformedEventsError. Removals that follow each other become one event.

    2 us, 0.5 us for each removed block, and 0.8 us for each stored one of 16 tokens.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MalformedEventsError(f"a payload of {len(payload):,} bytes, where at most {MAX_PAYLOAD_BYTES:,} are read")
    try:
        return _decode_batch(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedEventsError(str(error)) from None


def _decode_batch(payload: bytes) -> Batch:
    for decode in (_decode_maps, _decode_arrays):
        try:
            batch = decode(payload)
        except msgspec.ValidationError:
            continue
        return Batch(batch.at_s, _events(batch.events), batch.rank, len(batch.events))
    mixed = _decode_mixed(payload)
    events = [event for raw in mixed.events if (event := _decode_event(raw)) is not None]
    return Batch(mixed.at_s, _events(events), mixed.rank, len(mixed.events))


def _events(sent: Sequence[_Sent]) -> list[Event]:
    events: list[Event] = []
    latest: BlockRemoved | None = None
    for event in sent:
        if isinstance(event, _RemovedMap | _RemovedArray):
            group = event.group_idx or 0
            if latest is not None and latest.group == group and latest.medium == event.medium:
                latest.hashes += event.block_hashes
                continue
            latest = BlockRemoved(event.block_hashes, event.medium, group)
            events.append(latest)
        else:
            latest = None
            events.append(_stored(event) if isinstance(event, _StoredMap | _StoredArray) else AllBlocksCleared())
    return events


def _decode_event(raw: Raw) -> _Sent | None:
    """One event; None if its type is unknown."""
    first = bytes(memoryview(raw)[:1])
    is_map = first[0] & 0xF0 == 0x80 or first in {b"\xde", b"\xdf"}
    try:
        sent: _Sent = _decode_map(raw) if is_map else _decode_array(raw)
    except msgspec.ValidationError:
        if _has_unknown_type(raw):
            return None
        raise
    return sent


def _has_unknown_type(raw: Raw) -> bool:
    event = _decode_any(raw)
    name = event.get("type") if isinstance(event, dict) else event[0] if isinstance(event, list) and event else None
    return isinstance(name, str) and name not in _TYPES


def _stored(sent: _StoredMap | _StoredArray) -> BlockStored:
    if not 1 <= sent.block_size <= MAX_BLOCK_TOKENS:
        raise MalformedEventsError(f"block_size {sent.block_size} is not from 1 to {MAX_BLOCK_TOKENS}")
    if len(sent.token_ids) != len(sent.block_hashes) * sent.block_size:
        reason = f"{len(sent.token_ids)} token_ids for {len(sent.block_hashes)} block_hashes of {sent.block_size}"
        raise MalformedEventsError(reason)
    if sent.extra_keys is not None and len(sent.extra_keys) != len(sent.block_hashes):
        raise MalformedEventsError(f"{len(sent.extra_keys)} extra_keys for {len(sent.block_hashes)} block_hashes")
    try:
        tokens = array("I", sent.token_ids)
    except OverflowError:
        raise MalformedEventsError("token_ids: expected numbers from 0 to 4,294,967,295") from None
    adapter = sent.lora_name or ("" if sent.lora_id is None else str(sent.lora_id))
    extra = None if sent.extra_keys is None else [b"" if key is None else _encode(key) for key in sent.extra_keys]
    return BlockStored(
        sent.block_hashes,
        sent.parent_block_hash,
        tokens,
        sent.block_size,
        adapter,
        extra,
        sent.medium,
        sent.group_idx or 0,
        sent.kv_cache_spec_kind,
        sent.session_id,
    )
