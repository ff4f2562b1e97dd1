"""Decodes the payload of one KV event message of vLLM 0.10 to 0.33.

Theory of operation. A payload is the MessagePack array ``[time, [event, ...], rank]``. Up to vLLM 0.23 an event is an
array that begins with its type, and later releases added fields at its end; since 0.24 it is a map with the field
``type``. Missing and unknown fields are accepted, and events of unknown types are skipped. Any other deviation raises
``MalformedEventsError``; no bytes raise another exception.

Token ids may be missing, or be more than those of the blocks. Blocks in a lower cache tier, such as the host's memory,
are often reported by their hashes alone, with a block size of 0: of these only the hashes count. Of a group of layers
with a sliding window the engine leaves out blocks before the window, but not their token ids.

Token ids are most of a payload, and nearly all of them are never looked at. So they stay encoded: an engine encodes
equal ids as equal bytes, which is all that ``engine_blocks.py`` needs. Only their number is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from routing.kv_events import payload_format
from routing.kv_events.payload_format import (
    BlockHash,
    ClearedArray,
    ClearedMap,
    RemovedArray,
    RemovedMap,
    StoredArray,
    StoredMap,
)

MAX_PAYLOAD_BYTES: Final = 2 << 20  # a step that stores 8,192 tokens takes 40 KB, one that evicts 16,384 blocks 1 MB
MAX_BLOCK_TOKENS: Final = 65_536
MAX_EVENT_BLOCKS: Final = 16_384  # of one event: 262,144 tokens in blocks of 16
DEVICE: Final = frozenset({None, "GPU"})  # the name of device memory on every platform
FULL_ATTENTION: Final = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})  # of a group
NO_TOKENS: Final = b"\x90"

_encode: Final = msgspec.msgpack.Encoder().encode


class MalformedEventsError(ValueError):
    """A payload that is not a batch of KV events. The message names the field."""


class EncodedTokens:
    """The ids of the tokens of consecutive blocks, as encoded in the payload."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        """Tokens; MalformedEventsError if it is not an array."""
        return _array_head(self._data)[0]

    def split(self, tokens: int) -> tuple[EncodedTokens, EncodedTokens]:
        """The first ``tokens`` and the others; none of either if there is something else than an id."""
        count, at = _array_head(self._data)
        data, start = self._data, at
        for _ in range(tokens):
            size = _encoded_size(data[at]) if at < len(data) else 0
            if not size:
                return EncodedTokens(NO_TOKENS), EncodedTokens(NO_TOKENS)
            at += size
        return _with_head(tokens, data[start:at]), _with_head(count - tokens, data[at:])

    def blocks(self, block_tokens: int, limit: int) -> list[bytes]:
        """The encoded ids of each of the first ``limit`` blocks; fewer if there is something else than an id."""
        count, at = _array_head(self._data)
        data, blocks = self._data, list[bytes]()
        for _ in range(min(limit, count // block_tokens)):
            start = at
            for _ in range(block_tokens):
                size = _encoded_size(data[at]) if at < len(data) else 0
                if not size:
                    return blocks
                at += size
            blocks.append(data[start:at])
        return blocks


def _with_head(count: int, data: bytes) -> EncodedTokens:
    return EncodedTokens(b"\xdd" + count.to_bytes(4, "big") + data)


def _array_head(data: bytes) -> tuple[int, int]:
    """The length of an encoded array, and where its items begin."""
    first = data[0]
    if first & 0xF0 == 0x90:
        return first & 0x0F, 1
    if first == 0xDC:
        return int.from_bytes(data[1:3], "big"), 3
    if first == 0xDD:
        return int.from_bytes(data[1:5], "big"), 5
    raise MalformedEventsError("token_ids: expected an array")


def _encoded_size(first: int) -> int:
    """Bytes of an encoded number from 0 to 4,294,967,295; 0 if it is something else."""
    if first < 0x80:
        return 1
    if first == 0xCD:
        return 3
    if first == 0xCE:
        return 5
    return 2 if first == 0xCC else 0


class Event:
    """What an engine reports."""

    __slots__ = ()


class BlockStored(Event):
    """Consecutive blocks of one prompt that the engine has computed; the first one continues ``parent``."""

    __slots__ = (
        "adapter",
        "block_tokens",
        "extra_keys",
        "group",
        "hashes",
        "kind",
        "medium",
        "parent",
        "tokens",
    )

    def __init__(
        self,
        hashes: list[BlockHash],
        parent: BlockHash | None,
        tokens: EncodedTokens,
        block_tokens: int,
        adapter: str = "",
        extra_keys: list[Any] | None = None,
        medium: str | None = None,
        group: int = 0,
        kind: str | None = None,
    ) -> None:
        self.hashes = hashes
        self.parent = parent  # None: the first block begins the prompt
        self.tokens = tokens  # of all blocks, each ``block_tokens`` long; none: not reported
        self.block_tokens = block_tokens
        self.adapter = adapter  # name or number of the LoRA adapter; "" without one
        self.extra_keys = extra_keys  # of each block: salt and media; None: not reported
        self.medium = medium
        self.group = group  # of KV cache layers
        self.kind = kind  # of attention

    def pieces(self, blocks: int, *, with_tokens: bool) -> Iterator[BlockStored]:
        """This event as events of at most so many blocks. ``with_tokens``: the tokens after the first piece count."""
        tokens, rest = self.tokens, EncodedTokens(NO_TOKENS)
        for first in range(0, len(self.hashes), blocks):
            hashes = self.hashes[first : first + blocks]
            if len(self.tokens) and (with_tokens or not first):
                tokens, rest = (rest if first else tokens).split(len(hashes) * self.block_tokens)
            else:
                tokens = EncodedTokens(NO_TOKENS)
            yield BlockStored(
                hashes,
                self.hashes[first - 1] if first else self.parent,
                tokens,
                self.block_tokens,
                self.adapter,
                None if self.extra_keys is None else self.extra_keys[first : first + blocks],
                self.medium,
                self.group,
                self.kind,
            )

    def extra_bytes(self, position: int) -> bytes:
        """The extra keys of a block, encoded; empty if it has none, or they are not reported."""
        extra = None if self.extra_keys is None else self.extra_keys[position]
        return b"" if extra is None else _encode(extra)


class BlockRemoved(Event):
    """Blocks that were evicted, each once for each of its copies."""

    __slots__ = ("group", "hashes", "medium")

    def __init__(self, hashes: list[BlockHash], medium: str | None = None, group: int = 0) -> None:
        self.hashes = hashes
        self.medium = medium
        self.group = group


class AllBlocksCleared(Event):
    """The cache is empty."""

    __slots__ = ()


class Batch:
    """The events of one message, in order."""

    __slots__ = ("at_s", "count", "events", "rank")

    def __init__(self, at_s: float, events: list[Event], rank: int | None, count: int) -> None:
        self.at_s = at_s  # Unix time of the engine
        self.events = events
        self.rank = rank  # data-parallel rank; None: not reported
        self.count = count  # of events as sent


def decode_batch(payload: bytes) -> Batch:
    """Decode a message's payload; MalformedEventsError. Removals that follow each other become one event."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MalformedEventsError(f"a payload of {len(payload):,} bytes, where at most {MAX_PAYLOAD_BYTES:,} are read")
    try:
        at_s, sent, rank, count = payload_format.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedEventsError(str(error)) from None
    return Batch(at_s, _events(sent), rank, count)


def _events(sent: list[Any]) -> list[Event]:
    events: list[Event] = []
    latest: BlockRemoved | None = None
    for event in sent:
        kind = type(event)
        if kind is not ClearedMap and kind is not ClearedArray and len(event.block_hashes) > MAX_EVENT_BLOCKS:
            raise MalformedEventsError(f"block_hashes: more than {MAX_EVENT_BLOCKS:,} in one event")
        if kind is RemovedMap or kind is RemovedArray:
            group, hashes = event.group_idx or 0, event.block_hashes
            if latest is not None and latest.group == group and latest.medium == event.medium:
                latest.hashes += hashes
                continue
            latest = BlockRemoved(hashes, event.medium, group)
            events.append(latest)
        else:
            latest = None
            events.append(_stored(event) if kind is StoredMap or kind is StoredArray else AllBlocksCleared())
    return events


def _stored(sent: Any) -> BlockStored:
    hashes: list[BlockHash] = sent.block_hashes
    size: int = sent.block_size
    if sent.medium not in DEVICE:
        return BlockStored(hashes, None, EncodedTokens(NO_TOKENS), 0, medium=sent.medium, group=sent.group_idx or 0)
    if not 1 <= size <= MAX_BLOCK_TOKENS:
        raise MalformedEventsError(f"block_size {size} is not from 1 to {MAX_BLOCK_TOKENS}")
    tokens = EncodedTokens(bytes(sent.token_ids))
    extra: list[Any] | None = sent.extra_keys
    if len(tokens) != len(hashes) * size or (extra is not None and len(extra) != len(hashes)):
        tokens, extra = EncodedTokens(NO_TOKENS), None
    adapter = sent.lora_name or ("" if sent.lora_id is None else str(sent.lora_id))
    kind, group = sent.kv_cache_spec_kind, sent.group_idx or 0
    return BlockStored(hashes, sent.parent_block_hash, tokens, size, adapter, extra, sent.medium, group, kind)
