"""Decodes the payload of one KV event message of vLLM 0.24 to 0.33.

Theory of operation. A payload is the MessagePack array ``[time, [event, ...], rank]``; an event is a map with the field
``type``. Unknown fields and events of unknown types are skipped. Any other deviation raises ``MalformedEventsError``;
no bytes raise another exception.

The ids of tokens are most of a payload. They stay encoded: engines encode equal ids as equal bytes, which are all that
the key of a block needs. Ids that are missing, no numbers, or not those of all blocks do not count.

Blocks in a lower cache tier, such as the host's memory, are often reported by their hashes alone, with a block size of
0: of these only the hashes count.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

MAX_PAYLOAD_BYTES: Final = 2 << 20  # a step that stores 8,192 tokens takes 40 KB, one that evicts 16,384 blocks 1 MB
MAX_BLOCK_TOKENS: Final = 65_536
MAX_EVENT_BLOCKS: Final = 16_384  # of one event: 262,144 tokens in blocks of 16
DEVICE: Final = frozenset({None, "GPU"})  # the name of device memory on every platform
FULL_ATTENTION: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})  # of a group
STORED, REMOVED, CLEARED = "BlockStored", "BlockRemoved", "AllBlocksCleared"  # types of events

BlockHash = int | bytes  # of the engine; bytes with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0
Key = int | bytes  # by which engines with different hashes know the same block
_MISSING: Final[list[BlockHash]] = []
_NO_TOKENS: Final = Raw()


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
    tokens: Raw = msgspec.field(default=_NO_TOKENS, name="token_ids")
    adapter: str | None = msgspec.field(default=None, name="lora_name")
    extra_keys: list[Any] | None = None  # of each block: salt and media
    medium: str | None = None
    group: int | None = msgspec.field(default=None, name="group_idx")  # of KV cache layers
    kind: str | None = msgspec.field(default=None, name="kv_cache_spec_kind")  # of attention

    def split(self, blocks: int) -> tuple[KvEvent, KvEvent]:
        """An event of the first ``blocks``, and one of the others."""
        hashes, extra, tokens = self.hashes, self.extra_keys, memoryview(self.tokens)
        match = _blocks_of(blocks * self.block_tokens).match(tokens)
        end = match.end(1) if match is not None else -1
        first, rest = (Raw(tokens[:end]), Raw(tokens[end:])) if end > 0 else (_NO_TOKENS, _NO_TOKENS)
        others = replace(self, hashes=hashes[blocks:], parent=hashes[blocks - 1], tokens=rest)
        others.extra_keys = extra and extra[blocks:]
        return replace(self, hashes=hashes[:blocks], tokens=first, extra_keys=extra and extra[:blocks]), others

    def keys(self, before: Key | str | None) -> list[Key]:
        """The key of each block, where ``before`` is that of the block before the first."""
        blocks: list[bytes] = _blocks_of(self.block_tokens).findall(self.tokens)
        extra = self.extra_keys
        if len(blocks) != len(self.hashes) or not all(blocks) or (extra is not None and len(extra) != len(blocks)):
            return self.hashes
        if extra is not None and any(extra):
            blocks = [block + _encode(own) if own else block for block, own in zip(blocks, extra, strict=True)]
        return [before := hash((before, block)) for block in blocks]


@lru_cache(maxsize=64)
def _blocks_of(tokens: int) -> re.Pattern[bytes]:
    """Matches the encoded ids of so many tokens, else everything that is left, with an empty group."""
    head, id_ = rb"[\x90-\x9f]|\xdc..|\xdd....", rb"\xce....|\xcd..|[\x00-\x7f]|\xcc."
    return re.compile(rb"(?:%b)?((?:%b){%d}+)|.+" % (head, id_, tokens), re.DOTALL)


class Batch(Struct, array_like=True):
    """The events of one message, in order."""

    at_s: float  # Unix time of the engine
    events: list[KvEvent]
    rank: int | None = None  # data-parallel rank; None: not reported


_decode: Final = msgspec.msgpack.Decoder(Batch).decode
_encode: Final = msgspec.msgpack.Encoder().encode


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
