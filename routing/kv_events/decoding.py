"""Decodes the payload of one KV event message of vLLM 0.24 to 0.33.

Theory of operation. A payload is the MessagePack array ``[time, [event, ...], rank]``; an event is a map with the field
``type``. Unknown fields and events of unknown types are skipped. Any other deviation raises ``MalformedEventsError``;
no bytes raise another exception. The ids of tokens are most of a payload, and are skipped without being decoded.

Blocks in a lower cache tier, such as the host's memory, are often reported by their hashes alone, with a block size of
0: of these only the hashes count.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

MAX_PAYLOAD_BYTES: Final = 2 << 20  # a step that stores 8,192 tokens takes 40 KB, one that evicts 16,384 blocks 1 MB
MAX_BLOCK_TOKENS: Final = 65_536
MAX_EVENT_BLOCKS: Final = 16_384  # of one event: 262,144 tokens in blocks of 16
DEVICE: Final = frozenset({None, "GPU"})  # the name of device memory on every platform
FULL_ATTENTION: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})  # of a group
STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"  # types of events

BlockHash = int | bytes  # of the engine; bytes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0
_MISSING: Final[list[BlockHash]] = []


class MalformedEventsError(ValueError):
    """A payload that is not a batch of KV events. The message names the field."""


class KvEvent(Struct):
    """What an engine reports: consecutive blocks of one prompt that it stored, blocks that it evicted, or a clear."""

    type: str
    hashes: Annotated[list[BlockHash], Meta(max_length=MAX_EVENT_BLOCKS)] = msgspec.field(
        default_factory=lambda: _MISSING, name="block_hashes"
    )
    parent: BlockHash | None = msgspec.field(default=None, name="parent_block_hash")  # None: a prompt's first block
    block_tokens: Annotated[int, Meta(ge=0, le=MAX_BLOCK_TOKENS)] = msgspec.field(default=0, name="block_size")
    medium: str | None = None
    group: int | None = msgspec.field(default=None, name="group_idx")  # of KV cache layers
    kind: str | None = msgspec.field(default=None, name="kv_cache_spec_kind")  # of attention

    def piece(self, first: int, blocks: int) -> KvEvent:
        """An event of at most so many of its blocks, from the one at ``first`` on."""
        parent = self.hashes[first - 1] if first else self.parent
        return msgspec.structs.replace(self, hashes=self.hashes[first : first + blocks], parent=parent)


class Batch(Struct, array_like=True):
    """The events of one message, in order."""

    at_s: float  # Unix time of the engine
    events: list[KvEvent]
    rank: int | None = None  # data-parallel rank; None: not reported


_decode: Final = msgspec.msgpack.Decoder(Batch).decode


def decode_batch(payload: bytes, rank: int | None = None) -> Batch:
    """Decode a message's payload, of this rank if both are known; MalformedEventsError."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MalformedEventsError(f"a payload of {len(payload):,} bytes, where at most {MAX_PAYLOAD_BYTES:,} are read")
    try:
        batch = _decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedEventsError(str(error)) from None
    if None not in {rank, batch.rank} and batch.rank != rank:
        raise MalformedEventsError(f"events of rank {batch.rank}, where those of {rank} are expected")
    for event in batch.events:
        if event.hashes is _MISSING and event.type in {STORED, REMOVED}:
            raise MalformedEventsError(f"block_hashes: missing in {event.type}")
        if event.type == STORED and event.medium in DEVICE and not event.block_tokens:
            raise MalformedEventsError("block_size: 0, where a stored block has tokens")
    return batch


def joined(events: list[KvEvent]) -> list[KvEvent]:
    """The events of known types. Removals that follow each other become one event: engines report each block alone."""
    result: list[KvEvent] = []
    for event in events:
        latest = result[-1] if result and event.type == result[-1].type == REMOVED else None
        if latest is not None and (latest.group, latest.medium) == (event.group, event.medium):
            latest.hashes += event.hashes
        elif event.type in {STORED, REMOVED, CLEARED}:
            result.append(event)
    return result
