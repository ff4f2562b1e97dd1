"""Learns which of an engine's blocks belong to which prompts of this router.

Theory of operation. The router hashes text and has no tokenizer; an event has token ids and no text. The two are joined
by requests that this router sent. A complete response reports the tokens of its prompt, how many of them were cached,
and how many were generated. So its engine stored the blocks from ``cached / block`` to ``(prompt + generated) / block``
of one prompt, between the time the request was sent and its response. If the events of that time contain exactly one
such sequence of blocks, it is the request's. If there are several, which happens when requests of the same lengths
overlap, the request teaches nothing. If a match contradicts an earlier one, both are dropped.

From then on the token keys of the prompt's blocks name the beginning of its chain of text hashes: wherever an engine
stores or evicts blocks with these keys, no matter which router sent them, the router knows what that means for its
chains. Blocks with generated tokens are learnt with the next turn that contains them.

What this cannot know: a prompt that this router has never sent, such as the latest turn of a conversation that went
through another router; where exactly in the text a block ends (the tokens of a prompt are taken as evenly spread); and
the salt of blocks whose events have no ``extra_keys`` (vLLM 0.16 and before), where the same text under two salts
counts as cached under both.

Bounds: ``MAX_KEYS`` token keys in each of two generations, and ``MAX_PIECES`` stored pieces for each engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from routing.balancing.block_index import Chain, ServedPrompt
from routing.kv_events.engine_blocks import StoredRun

MAX_KEYS: Final = 131_072
MAX_PIECES: Final = 8192
LATE_S: Final = 0.1  # that an event may arrive after the end of the response
CHUNK_SLACK_BLOCKS: Final = 1  # of the router, by which the place of a block in a text may be off


class KnownPrompt:
    """A chain of the router, and the engine's tokens for each of its blocks."""

    __slots__ = ("chain", "tokens_per_block")

    def __init__(self, chain: Chain, tokens_per_block: float) -> None:
        self.chain = chain
        self.tokens_per_block = tokens_per_block

    def blocks(self, tokens: int) -> int:
        """Whole blocks of the chain within the first ``tokens``."""
        return min(len(self.chain), int(tokens / self.tokens_per_block + 1e-6))

    def agrees_with(self, other: KnownPrompt, tokens: int) -> bool:
        """Whether the first ``tokens`` of both may be the same text."""
        blocks = min(self.blocks(tokens), other.blocks(tokens)) - CHUNK_SLACK_BLOCKS
        return blocks <= 0 or self.chain[blocks - 1] == other.chain[blocks - 1]


class KnownPrompts:
    """The prompts that token keys belong to, of all engines that serve one model."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._by_key: dict[int, KnownPrompt] = {}
        self._older: dict[int, KnownPrompt] = {}  # the previous generation

    def __len__(self) -> int:
        return len(self._by_key) + len(self._older)

    def get(self, key: int) -> KnownPrompt | None:
        """A prompt that contains the block with this key, which then stays known for another generation."""
        prompt = self._by_key.get(key)
        if prompt is None and (prompt := self._older.get(key)) is not None:
            self._add(key, prompt)
        return prompt

    def deepest(self, keys: Sequence[int]) -> tuple[int, KnownPrompt] | None:
        """The position of the last known one of consecutive blocks, and its prompt. All before it are known as well."""
        known = self.get(keys[0]) if keys else None
        if known is None:
            return None
        low, high = 0, len(keys) - 1
        while low < high:
            middle = (low + high + 1) // 2
            prompt = self.get(keys[middle])
            if prompt is None:
                high = middle - 1
            else:
                low, known = middle, prompt
        return low, known

    def learn(self, run: StoredRun, position: int, prompt: KnownPrompt, block_tokens: int) -> list[tuple[int, int]]:
        """Learn the token keys of a prompt up to a block of it.

        Returns the new ones with their depths in blocks, the last first; none if an earlier match contradicts. Then the
        contradicted keys are forgotten, because either match may be wrong.
        """
        new: list[tuple[int, int]] = []
        for key, blocks in run.keys_upwards(position):
            known = self.get(key)
            if known is None:
                new.append((key, blocks))
            elif known.agrees_with(prompt, blocks * block_tokens):
                break
            else:
                self._forget(key)
                new.clear()
                position = -1
        if position >= 0:
            for key, _ in new:
                self._add(key, prompt)
        return new if position >= 0 else []

    def _forget(self, key: int) -> None:
        self._by_key.pop(key, None)
        self._older.pop(key, None)

    def _add(self, key: int, prompt: KnownPrompt) -> None:
        self._by_key[key] = prompt
        if len(self._by_key) >= self._max_keys:
            self._older, self._by_key = self._by_key, {}


class StoredPieces:
    """What one engine stored lately, to find the blocks of a request there."""

    def __init__(self, max_pieces: int = MAX_PIECES) -> None:
        self._pieces: deque[StoredRun] = deque()
        self._by_end: dict[int, deque[StoredRun]] = {}  # by the blocks of the prompt up to its last
        self._max_pieces = max_pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, run: StoredRun) -> None:
        """Add a stored run; without keys it is of no use."""
        if not run.keys:
            return
        self._pieces.append(run)
        self._by_end.setdefault(run.end, deque()).append(run)
        if len(self._pieces) > self._max_pieces:
            oldest = self._pieces.popleft()
            same_end = self._by_end[oldest.end]
            same_end.popleft()
            if not same_end:
                del self._by_end[oldest.end]

    def clear(self) -> None:
        """Forget everything."""
        self._pieces.clear()
        self._by_end.clear()

    def find(self, served: ServedPrompt, block_tokens: int, ended_s: float) -> StoredRun | None:
        """The last piece that the engine stored for a request; None if there is none, or more than one."""
        if served.generated_tokens is None:
            return None
        start, tokens = served.cached_tokens // block_tokens, served.prompt_tokens + served.generated_tokens
        found: dict[int, StoredRun] = {}
        for end in {(tokens - 1) // block_tokens, tokens // block_tokens}:  # the last token may be computed, or not
            for run in self._by_end.get(end, ()):
                if served.sent_s <= run.stored_s <= ended_s + LATE_S and _starts_at(run, start, served.sent_s):
                    found[run.keys[-1]] = run
        return found.popitem()[1] if len(found) == 1 else None


def _starts_at(run: StoredRun, start: int, since_s: float) -> bool:
    """Whether a piece, together with those before it since a time, begins after the first ``start`` blocks."""
    while run.depth > start:
        if run.parent is None or run.parent[0].stored_s < since_s:
            return False
        run, position = run.parent
        if position != len(run.hashes) - 1:
            return False
    return run.depth == start
