"""Hashes of a canonical prompt: one key for its opening, and a chain over its blocks.

Theory of operation. Everything starts from a seed, XXH3-64 of model, adapter, salt and the fleet's secret, so that
no caller can compute a placement and a stored hash tells nothing about the text. The tier-1 key is the hash of the
opening up to a boundary. Block hashes are chained, ``h[i] = XXH3-64(h[i-1], block[i])``, so one of them names a block
and everything before it: two prompts share exactly the blocks of their common prefix, or none if they are rendered
differently, for then their chains start apart. Routers with the same secret agree on every value, whatever their
release; golden values in the tests keep it so.
"""

from __future__ import annotations

import struct
from array import array
from hashlib import blake2b, sha256
from typing import Final

from xxhash import xxh3_64_intdigest

from routing.prompt.canonical import CONTENT, CanonicalPrompt
from routing.schema import Boundary, Tier1
from routing.types import BLOCK_BYTES, PrefixHash

MAX_BLOCKS: Final = 2048  # 512 KiB, about 128k tokens
STRETCH_BLOCKS: Final = 16  # hashed at once where they are known
MAX_STRETCHES: Final = 16_384  # remembered at least, and twice as many at most: 12 MiB
MAX_SEEDS: Final = 1024  # remembered: models, salts and adapters
TIER2_BYTES: Final = 4096  # behind the opening
_STRETCH_BYTES: Final = STRETCH_BLOCKS * BLOCK_BYTES

_, SYSTEM, BYTES, MESSAGES, MARKER = Boundary  # an enum's attributes are slow to look up
DEFAULT_TIER1: Final = Tier1()  # where tier 1 ends unless a group, a pool or a policy says it

_SEPARATOR: Final = b"\xff"  # in no UTF-8 text
_word: Final = struct.Struct("<Q").pack


class PrefixHasher:
    """Hashes with one fleet's secret."""

    __slots__ = ("_fading", "_key", "_plain", "_secret", "_stretches", "_words")

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._key = sha256(b"values" + _SEPARATOR + self._secret).digest()
        self._plain = _SEPARATOR * 3 + self._secret  # what follows a model without adapter and salt
        self._words: dict[tuple[str, str, str], bytes] = {}  # seeds as they stand before what is hashed
        self._stretches: dict[int, array[int]] = {}
        self._fading: dict[int, array[int]] = {}  # the generation before, from which what is met again comes back

    def __repr__(self) -> str:
        return "PrefixHasher(***)"

    def seed(self, model: str, salt: str = "", adapter: str = "") -> int:
        """``h[-1]`` of the chain: what sets apart equal texts whose KV blocks differ."""
        if not (salt or adapter):
            return xxh3_64_intdigest(model.encode() + self._plain)
        return xxh3_64_intdigest(_SEPARATOR.join((model.encode(), adapter.encode(), salt.encode(), self._secret)))

    def tier1(
        self, prompt: CanonicalPrompt, model: str, rule: Tier1 = DEFAULT_TIER1, adapter: str = ""
    ) -> PrefixHash | None:
        """Key of the opening, at the rule's boundary; None when nothing lies before it. 0.7 us for 1 KiB."""
        end = boundary_end(prompt, rule)
        if not end:
            return None
        word = self._words.get((model, prompt.salt, adapter)) or self._word_of(model, prompt.salt, adapter)
        data = prompt.data
        opening = data if end == len(data) else memoryview(data)[:end]  # which may be long: it is copied once
        return PrefixHash(xxh3_64_intdigest(b"".join((word, opening))))

    def tier2(
        self, prompt: CanonicalPrompt, model: str, rule: Tier1 = DEFAULT_TIER1, adapter: str = ""
    ) -> PrefixHash | None:
        """Key of the opening and what follows it of the message that ends next, which tells conversations apart.

        Of that the first ``TIER2_BYTES`` count. None where no message ends behind the opening.
        """
        opening_end = boundary_end(prompt, rule)
        end = next((end for end in prompt.message_ends if end > opening_end), 0)
        if not end:
            return None
        data = prompt.data[: min(end, opening_end + TIER2_BYTES)]
        return PrefixHash(xxh3_64_intdigest(self._word_of(model, prompt.salt, adapter) + data))

    def session(self, key: str) -> PrefixHash:
        """Key of a session: the same for every model, so that a conversation stays where it is."""
        return PrefixHash(xxh3_64_intdigest(_SEPARATOR.join((b"session", key.encode(), self._secret))))

    def group(self, pool: str, name: str) -> PrefixHash:
        """Key of a task group, which names its home order in a pool."""
        parts = (b"group", pool.encode(), name.encode(), self._secret)
        return PrefixHash(xxh3_64_intdigest(_SEPARATOR.join(parts)))

    def digest(self, data: bytes) -> str:
        """16 hexadecimal digits for any bytes, few enough to be guessed as they may be: a MAC (BLAKE2b). 1 us."""
        return blake2b(data, key=self._key, digest_size=8).hexdigest()

    def stretches(self, prompt: CanonicalPrompt, model: str, adapter: str = "") -> list[array[int]]:
        """Chained hashes of the whole blocks of a prompt, at most ``MAX_BLOCKS``, in arrays of ``STRETCH_BLOCKS``.

        0.15 us a block, 0.02 where known; the arrays are shared by all who hold them.

        Prompts that open alike are the rule, so stretches of blocks are remembered by their own hash, seeded with the
        one before: then a stretch costs one hash instead of one for each block, and no memory.
        """
        data, known, found = prompt.data, self._stretches, []
        word = self._words.get((model, prompt.salt, adapter)) or self._word_of(model, prompt.salt, adapter)
        last = int.from_bytes(word, "little")
        if prompt.rendering:
            last = xxh3_64_intdigest(word, prompt.rendering)
        end = min(len(data) // BLOCK_BYTES, MAX_BLOCKS) * BLOCK_BYTES
        for start in range(0, end, _STRETCH_BYTES):
            stretch = data[start : min(start + _STRETCH_BYTES, end)]
            key = xxh3_64_intdigest(stretch, last)
            hashes = known.get(key)
            if hashes is None:
                hashes = self._fading.get(key) or _chain(last, stretch)
                self._remember(key, hashes)
            found.append(hashes)
            last = hashes[-1]
        return found

    def _remember(self, key: int, hashes: array[int]) -> None:
        self._stretches[key] = hashes
        if len(self._stretches) >= MAX_STRETCHES:
            self._fading, self._stretches = self._stretches, {}

    def _word_of(self, model: str, salt: str, adapter: str) -> bytes:
        """Their seed, 8 little-endian bytes; from now on remembered, for a look-up that costs no call."""
        if len(self._words) >= MAX_SEEDS:
            self._words.clear()
        word = self._words[model, salt, adapter] = _word(self.seed(model, salt, adapter))
        return word


def _chain(hash_: int, data: bytes) -> array[int]:
    """Hashes of whole blocks, the first one chained to ``hash_``."""
    pieces = struct.unpack_from(f"{BLOCK_BYTES}s" * (len(data) // BLOCK_BYTES), data)
    return array("Q", [hash_ := xxh3_64_intdigest(_word(hash_) + piece) for piece in pieces])


def boundary_end(prompt: CanonicalPrompt, rule: Tier1) -> int:
    """Offset in the canonical prompt at which its tier-1 opening ends; 0 when there is none."""
    boundary = rule.boundary
    if boundary is SYSTEM:
        return prompt.system_end
    if boundary is MARKER and (end := prompt.data.find(rule.boundary_marker.encode())) >= 0:
        return end if prompt.tools_end or end > prompt.data.find(CONTENT) + 1 else 0  # else only a role is before it
    if boundary is MESSAGES:
        ends = prompt.message_ends
        return ends[min(rule.boundary_messages, len(ends)) - 1] if ends else prompt.tools_end
    if boundary is not BYTES and prompt.system_end >= BLOCK_BYTES:  # auto, and a marker that is not there
        return prompt.system_end
    return min(rule.boundary_bytes, len(prompt.data))
