"""Applies the KV events of one engine to the router's residency index.

Theory of operation. Four things follow from events:

- ``AllBlocksCleared``, and an engine that restarted: the index forgets what the replica had, at once.
- ``BlockStored`` with known blocks (``known_prompts.py``): the index gets the beginning of that prompt at this
  replica, also if another router sent it.
- ``BlockRemoved`` of a known block: the index loses what follows in that prompt.
- ``BlockRemoved`` of any block, without lower cache tiers: an engine evicts what it used least recently. So when a
  block that was stored at some time is evicted, the engine has also evicted everything that it last used before that
  time, known or not. A response that ends makes its prompt the most recently used one, as in the engine.

``capacity_tokens`` is the most that an engine which has evicted something had at one time, if all its events were seen.
It is less than the engine's capacity by what running requests hold and have not stored yet.

``apply`` yields after every ``STEP_BLOCKS``, so that the caller can let requests go first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from routing.balancing.block_index import ServedPrompt
from routing.balancing.residency import Residency
from routing.kv_events.decoding import CLEARED, DEVICE, STORED, KvEvent
from routing.kv_events.engine_blocks import EngineBlocks, StoredRun
from routing.kv_events.known_prompts import KnownPrompt, KnownPrompts, NewKey, RecentRuns
from routing.types import TargetId

MAX_SERVED: Final = 1024  # responses that wait for their events
SETTLE_S: Final = 0.25  # after a response, until its events must have arrived
STEP_BLOCKS: Final = 64  # between two yields, about 0.05 ms
MAX_UNREPORTED: Final = 8  # responses with new blocks, since the latest message
UNREPORTED_S: Final = 2.0  # since the end of the first of them
MIN_UNREPORTED_TOKENS: Final = 1024  # of a prompt, not cached: whole blocks of any engine
MAX_PIECE_BLOCKS: Final = 512  # of one event between two yields
Clock = Callable[[], float]


class FollowedEngine:
    """Updates the blocks of one engine, and its entries in the residency index."""

    def __init__(
        self, target: TargetId, residency: Residency, known: KnownPrompts, clock: Clock, max_blocks: int
    ) -> None:
        self.target = target
        self.blocks = EngineBlocks(max_blocks)
        self.was_full = False  # whether it has evicted something, and all events were seen
        self._unreported = 0  # responses with new blocks since the latest message, or since the connection
        self._unreported_s = 0.0  # the end of the first of them
        self.matched = 0  # responses whose blocks were found among the events
        self._residency = residency
        self._known = known
        self._clock = clock
        self._recent_runs = RecentRuns()
        self._ended: deque[tuple[float, ServedPrompt]] = deque(
            maxlen=MAX_SERVED
        )  # prompts that become the most recently used
        self._served: deque[tuple[float, ServedPrompt]] = deque(maxlen=MAX_SERVED)  # with the time of their ends

    @property
    def seen_tokens(self) -> int:
        """The most tokens that were cached at one time."""
        return self.blocks.max_seen_blocks * self.blocks.block_tokens

    @property
    def capacity_tokens(self) -> int | None:
        """About what the engine has room for; None if nothing was evicted yet, or not all events were seen."""
        return self.seen_tokens if self.was_full else None

    @property
    def capacity_ratio(self) -> float:
        """The most blocks in all cache tiers, relative to device memory; 1 without lower tiers."""
        seen = self.blocks.max_seen_blocks
        return (seen + self.blocks.max_seen_offloaded) / seen if seen else 1.0

    @property
    def has_unmatched_responses(self) -> bool:
        """Whether responses wait to be matched with events."""
        return bool(self._served)

    def on_response(self, served: ServedPrompt) -> None:
        """Called on the request path; ``learn`` matches the response with events later."""
        ended_s = self._clock()
        if served.prompt_tokens - served.cached_tokens >= MIN_UNREPORTED_TOKENS:
            self._unreported += 1
            if self._unreported == 1:
                self._unreported_s = ended_s
        self._ended.append((ended_s, served))
        self._served.append((ended_s, served))

    @property
    def unreported(self) -> int:
        """Responses whose new blocks the engine has not published, if they are enough to say so; else 0."""
        is_late = self._unreported >= MAX_UNREPORTED and self._clock() - self._unreported_s > UNREPORTED_S
        return self._unreported if is_late else 0

    def note_message(self) -> None:
        """Called when the engine has published something, or there is a new connection."""
        self._unreported = 0

    def restart(self) -> None:
        """Called when the engine has restarted with an empty cache."""
        self._forget_capacity()
        self._clear(is_complete=True)

    def forget(self) -> None:
        """Called when events were lost: the engine's blocks are unknown, and the index returns to its estimate."""
        self._forget_capacity()
        self.blocks.clear(is_complete=False)
        self._forget_responses()

    def apply(self, events: Iterable[KvEvent], age_s: float = 0.0) -> Iterator[None]:
        """Apply events in order; ``age_s``: seconds by which they arrived later than usual."""
        self._touch_ended()
        blocks = 0
        for event in events:
            if event.type == CLEARED:
                self._clear(is_complete=True)
                continue
            blocks += len(event.hashes)
            rest = event
            while len(rest.hashes) > MAX_PIECE_BLOCKS:
                piece, rest = rest.split(MAX_PIECE_BLOCKS)
                self._apply(piece, age_s)
                yield
            self._apply(rest, age_s)
            if blocks >= STEP_BLOCKS:
                blocks = 0
                yield

    def _apply(self, event: KvEvent, age_s: float) -> None:
        if event.type == STORED:
            self._on_stored(event, self._clock() - age_s)
        else:
            self._on_removed(event)

    def learn(self) -> Iterator[list[NewKey]]:
        """Learn from responses that ended ``SETTLE_S`` ago: the new blocks of each, the last of a prompt first."""
        self._touch_ended()
        until_s = self._clock() - SETTLE_S
        while self._served and self._served[0][0] <= until_s:
            ended_s, served = self._served.popleft()
            yield self._match(served, ended_s)

    def add_longest_cached(self, keys: list[NewKey]) -> None:
        """Add a prompt's longest cached prefix to the residency index. ``keys``: longest prefix first."""
        low, high = 0, len(keys) - 1  # binary search: the first cached one is in ``keys[low : high + 1]``
        if not keys or keys[-1][0] not in self.blocks:
            return
        while low < high:
            middle = (low + high) // 2
            if keys[middle][0] in self.blocks:
                high = middle
            else:
                low = middle + 1
        key, depth = keys[high]
        prompt = self._known.get(key)
        if prompt is not None:
            blocks = prompt.blocks(depth * self.blocks.block_tokens)
            self._residency.add_stored(self.target, prompt.chain[:blocks], self._clock(), prompt.tokens_per_block)

    def _match(self, served: ServedPrompt, ended_s: float) -> list[NewKey]:
        """The blocks learnt from one response."""
        block_tokens = self.blocks.block_tokens
        run = self._recent_runs.find(served, block_tokens, ended_s) if block_tokens else None
        if run is None:
            return []
        last = served.prompt_tokens // block_tokens  # blocks after it contain generated tokens
        position = len(run.hashes) - 1
        while run.depth >= last and run.parent is not None:
            run, position = run.parent, run.parent_position
        position = min(position, last - run.depth - 1)
        self.matched += 1
        if position < 0:
            return []
        prompt = KnownPrompt(served.chain, served.tokens_per_block)
        return self._known.learn(run, position, prompt, block_tokens)

    def _clear(self, *, is_complete: bool) -> None:
        self.blocks.clear(is_complete=is_complete)
        self._forget_responses()
        self._residency.clear(self.target)

    def _forget_capacity(self) -> None:
        self.was_full, self.blocks.max_seen_blocks, self.blocks.max_seen_offloaded = False, 0, 0

    def _forget_responses(self) -> None:
        self._recent_runs.clear()
        self._ended.clear()
        self._served.clear()

    def _touch_ended(self) -> None:
        """Make the prompts of responses that have ended the most recently used, before later evictions are applied."""
        while self._ended:
            ended_s, served = self._ended.popleft()
            self._residency.add_stored(self.target, served.chain, ended_s, served.tokens_per_block)

    def _on_stored(self, event: KvEvent, stored_s: float) -> None:
        if event.medium not in DEVICE:
            self.blocks.store_in_lower_tiers(event)
            return
        run = self.blocks.store(event, stored_s)
        if run is None or not run.keys:
            return
        self._recent_runs.add(run)
        known = self._known.deepest(run.keys)
        if known is not None:
            position, prompt = known
            blocks = prompt.blocks((run.depth + position + 1) * event.block_tokens)
            self._residency.add_stored(self.target, prompt.chain[:blocks], self._clock(), prompt.tokens_per_block)

    def _on_removed(self, event: KvEvent) -> None:
        self.was_full = self.was_full or (self.blocks.is_complete and event.medium in DEVICE)
        removed = self.blocks.remove(event)
        if not removed:
            return
        if not self.blocks.has_lower_tiers:
            self._residency.evict_before(self.target, max([run.stored_s for run, _ in removed]))
        for prompt, blocks in self._left_of_prompts(removed).items():
            self._residency.truncate(self.target, prompt.chain, blocks)

    def _left_of_prompts(self, removed: list[tuple[StoredRun, int]]) -> dict[KnownPrompt, int]:
        """Known prompts with removed blocks, and how many of the router's blocks are left of each."""
        left: dict[KnownPrompt, int] = {}
        known, block_tokens = self._known, self.blocks.block_tokens
        for run, position in removed:
            prompt = known.get(run.keys[position]) if run.keys else None
            if prompt is not None:
                blocks = prompt.blocks_from((run.depth + position) * block_tokens)
                if blocks < left.get(prompt, len(prompt.chain)):
                    left[prompt] = blocks
        return left
