"""Learns which of an engine's blocks belong to which prompts of this router.

Theory of operation. The router hashes text and has no tokenizer; an event has token ids and no text. The two are joined
by requests that this router sent. A complete response reports the tokens of its prompt, how many of them were cached,
and how many were generated. So its engine stored the blocks from ``cached / block`` to ``(prompt + generated) / block``
of one prompt, between the time the request was sent and its response. If the events of that time contain exactly one
such sequence of blocks, it is the request's. If there are several, because requests of the same lengths overlap,
nothing is learnt from the request. If a match contradicts an earlier one, both are dropped.

From then on the keys of these blocks identify the beginning of the prompt's chain of text hashes. When any engine of
the pool stores or evicts blocks with these keys, whichever router sent the prompt, the index is updated. Blocks with
generated tokens are learnt with the next turn that contains them.

Limits:

- A prompt that this router has never sent is unknown, such as a conversation's latest turn through another router.
- Where in the text a block ends is estimated: the tokens of a prompt are assumed to be evenly spread.

Bounds: ``MAX_KEYS`` in each of two generations; for each engine ``MAX_RUNS`` stored runs with ``MAX_RUN_BLOCKS``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import Final

from routing.balancing.block_index import Chain, ServedPrompt
from routing.kv_events.decoding import Key
from routing.kv_events.engine_blocks import StoredRun

MAX_KEYS: Final = 131_072
MAX_RUNS: Final = 8192
MAX_RUN_BLOCKS: Final = 65_536  # blocks whose hashes and keys are kept after the engine has evicted them; 5 to 10 MiB
LATE_S: Final = 0.1  # an event may arrive so long after the end of its response
CHUNK_SLACK_BLOCKS: Final = 1  # error of an engine block's estimated position in the text, in blocks of the router

NewKey = tuple[Key, int]  # of a block, and the blocks of the prompt up to it


class KnownPrompt:
    """A chain of the router, and the engine's tokens for each of its blocks."""

    def __init__(self, chain: Chain, tokens_per_block: float) -> None:
        self.chain = chain
        self.tokens_per_block = tokens_per_block

    def blocks(self, tokens: int) -> int:
        """Whole blocks of the chain within the first ``tokens``."""
        return min(len(self.chain), int(tokens / self.tokens_per_block + 1e-6))

    def blocks_from(self, tokens: int) -> int:
        """Blocks of the chain that begin within the first ``tokens``, so that what begins later can be evicted.

        Rounded up, because a block that many prompts share may end there.
        """
        return min(len(self.chain), ceil(tokens / self.tokens_per_block - 1e-6))

    def agrees_with(self, other: KnownPrompt, tokens: int) -> bool:
        """Whether the first ``tokens`` of both may be the same text."""
        blocks = min(self.blocks(tokens), other.blocks(tokens)) - CHUNK_SLACK_BLOCKS
        return blocks <= 0 or self.chain[blocks - 1] == other.chain[blocks - 1]


class KnownPrompts:
    """The prompts that blocks belong to, of all engines that serve one model."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._by_key: dict[Key, KnownPrompt] = {}
        self._older: dict[Key, KnownPrompt] = {}  # the previous generation

    def __len__(self) -> int:
        return len(self._by_key) + len(self._older)

    def get(self, key: Key) -> KnownPrompt | None:
        """A prompt that contains this block, which then stays known for another generation."""
        prompt = self._by_key.get(key)
        if prompt is None and (prompt := self._older.get(key)) is not None:
            self._add(key, prompt)
        return prompt

    def deepest(self, keys: Sequence[Key]) -> tuple[int, KnownPrompt] | None:
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

    def learn(self, run: StoredRun, position: int, prompt: KnownPrompt, block_tokens: int) -> list[NewKey]:
        """Learn the keys of a prompt's blocks up to one of them.

        Returns the new ones with their depths in blocks, the last first; none if an earlier match contradicts. Then the
        contradicted ones are forgotten, because either match may be wrong.
        """
        new: list[NewKey] = []
        is_contradicted = False
        at: StoredRun | None = run
        while at is not None:
            keys, depth = at.keys, at.depth
            for index in range(position, -1, -1):
                key = keys[index]
                known = self.get(key)
                if known is None:
                    new.append((key, depth + index + 1))
                elif known.agrees_with(prompt, (depth + index + 1) * block_tokens):
                    return self._add_all(new, prompt, is_contradicted)
                else:
                    self._by_key.pop(key, None)
                    self._older.pop(key, None)
                    is_contradicted = True
            position, at = at.parent_position, at.parent
        return self._add_all(new, prompt, is_contradicted)

    def _add_all(self, new: list[NewKey], prompt: KnownPrompt, is_contradicted: bool) -> list[NewKey]:
        if is_contradicted:
            return []
        for key, _ in new:
            self._add(key, prompt)
        return new

    def _add(self, key: Key, prompt: KnownPrompt) -> None:
        self._by_key[key] = prompt
        if len(self._by_key) >= self._max_keys:
            self._older, self._by_key = self._by_key, {}


class RecentRuns:
    """The runs that one engine stored recently, in which the blocks of a request are found."""

    def __init__(self, max_runs: int = MAX_RUNS, max_blocks: int = MAX_RUN_BLOCKS) -> None:
        self._runs: deque[StoredRun] = deque()
        self._by_end: dict[int, deque[StoredRun]] = {}  # by the blocks of the prompt up to its last
        self._max_runs = max_runs
        self._max_blocks = max_blocks
        self._blocks = 0  # of all runs

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, run: StoredRun) -> None:
        """Add a stored run, unless its place in the prompt is unknown."""
        if not run.keys:
            return
        self._runs.append(run)
        self._blocks += len(run.hashes)
        same_end = self._by_end.get(run.end)
        if same_end is None:
            self._by_end[run.end] = deque((run,))
        else:
            same_end.append(run)
        while len(self._runs) > self._max_runs or (self._blocks > self._max_blocks and len(self._runs) > 1):
            self._drop_oldest()

    def clear(self) -> None:
        """Forget everything."""
        self._runs.clear()
        self._by_end.clear()
        self._blocks = 0

    def find(self, served: ServedPrompt, block_tokens: int, ended_s: float) -> StoredRun | None:
        """The last run that the engine stored for a request; None if no run matches, or several do."""
        if served.generated_tokens is None:
            return None
        start, tokens = served.cached_tokens // block_tokens, served.prompt_tokens + served.generated_tokens
        found: StoredRun | None = None
        for end in {(tokens - 1) // block_tokens, tokens // block_tokens}:  # the last token may be computed, or not
            for run in reversed(self._by_end.get(end, ())):
                if run.stored_s < served.sent_s:
                    break
                if run.stored_s <= ended_s + LATE_S and _starts_at(run, start, served.sent_s):
                    if found is not None and found.hashes[-1] != run.hashes[-1]:
                        return None
                    found = run
        return found

    def _drop_oldest(self) -> None:
        oldest = self._runs.popleft()
        self._blocks -= len(oldest.hashes)
        same_end = self._by_end[oldest.end]
        same_end.popleft()
        if not same_end:
            del self._by_end[oldest.end]


def _starts_at(run: StoredRun, start: int, since_s: float) -> bool:
    """Whether a run, with its parents that were stored since ``since_s``, begins after the first ``start`` blocks."""
    while run.depth > start:
        parent = run.parent
        if parent is None or parent.stored_s < since_s or run.parent_position != len(parent.hashes) - 1:
            return False
        run = parent
    return run.depth == start
