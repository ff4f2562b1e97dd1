"""Applies the KV events of one engine to the router's residency index.

Theory of operation. Four things follow from events:

- ``AllBlocksCleared``, and an engine that restarted: the index forgets what the replica had, at once.
- ``BlockStored`` with known token keys (``known_prompts.py``): the index gets the beginning of that prompt at this
  replica, also if another router sent it.
- ``BlockRemoved`` of a block with a known key: the index loses what follows in that prompt.
- ``BlockRemoved`` of any block: an engine evicts what it used least recently. So when a block that was stored at some
  time is evicted, everything whose last use ended before that time is gone as well, known or not. A response that ends
  makes its prompt the most recently used one, as in the engine.

``capacity_tokens`` is what the engine had when it first evicted something, if all its events were seen.

``apply`` yields after each event, so that the caller can let requests go first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from routing.balancing.block_index import Chain, ServedPrompt
from routing.balancing.residency import Residency
from routing.kv_events.decoding import AllBlocksCleared, BlockRemoved, BlockStored, Event
from routing.kv_events.engine_blocks import EngineBlocks
from routing.kv_events.known_prompts import KnownPrompt, KnownPrompts, StoredPieces
from routing.types import TargetId

MAX_SERVED: Final = 1024  # responses that wait for their events
SETTLE_S: Final = 0.25  # after a response, until its events must have arrived
Clock = Callable[[], float]
NewKey = tuple[int, int]  # a token key, and the blocks of the prompt up to it


class FollowedEngine:
    """The blocks of one engine, what is known of them, and what the residency index has of them."""

    def __init__(
        self, target: TargetId, residency: Residency, known: KnownPrompts, clock: Clock, max_blocks: int
    ) -> None:
        self.target = target
        self.blocks = EngineBlocks(max_blocks)
        self.capacity_tokens: int | None = None  # None: nothing was evicted yet, or not all events were seen
        self.matched = 0  # responses whose blocks were found
        self._residency = residency
        self._known = known
        self._clock = clock
        self._pieces = StoredPieces()
        self._ended: deque[tuple[float, Chain]] = deque(maxlen=MAX_SERVED)  # of responses, to be made recently used
        self._served: deque[tuple[float, ServedPrompt]] = deque(maxlen=MAX_SERVED)  # with the time of their ends

    @property
    def has_served(self) -> bool:
        """Whether responses wait to be looked at."""
        return bool(self._served)

    def on_response(self, served: ServedPrompt) -> None:
        """Called on the request path; the response is looked at later."""
        ended_s = self._clock()
        self._ended.append((ended_s, served.chain))
        self._served.append((ended_s, served))

    def restart(self) -> None:
        """The engine has an empty cache, because it has started."""
        self.capacity_tokens = None
        self._clear(is_complete=True)

    def forget(self) -> None:
        """Events were lost: what the engine has is unknown, and the index returns to its estimate."""
        self.capacity_tokens = None
        self.blocks.clear(is_complete=False)
        self._forget_responses()

    def apply(self, events: Iterable[Event], age_s: float = 0.0) -> Iterator[None]:
        """Apply events in order; ``age_s``: how much later than usual they arrived."""
        self._use_ended()
        for event in events:
            if isinstance(event, BlockStored):
                self._on_stored(event, self._clock() - age_s)
            elif isinstance(event, BlockRemoved):
                self._on_removed(event)
            elif isinstance(event, AllBlocksCleared):
                self._clear(is_complete=True)
            yield

    def learn(self) -> Iterator[list[NewKey]]:
        """Learn from responses that ended ``SETTLE_S`` ago: the new token keys of each, the last of a prompt first."""
        self._use_ended()
        while self._served and self._served[0][0] <= self._clock() - SETTLE_S:
            ended_s, served = self._served.popleft()
            prompt = KnownPrompt(served.chain, served.tokens_per_block)
            yield self._match(served, prompt, ended_s)

    def adopt(self, keys: list[NewKey]) -> None:
        """Add the longest prefix with one of these keys to the index, if the engine has it."""
        for key, depth in keys:
            if self.blocks.has_key(key) and (prompt := self._known.get(key)) is not None:
                blocks = prompt.blocks(depth * self.blocks.block_tokens)
                self._residency.add_stored(self.target, prompt.chain[:blocks], self._clock())
                return

    def _match(self, served: ServedPrompt, prompt: KnownPrompt, ended_s: float) -> list[NewKey]:
        """The token keys learnt from one response."""
        block_tokens = self.blocks.block_tokens
        run = self._pieces.find(served, block_tokens, ended_s) if block_tokens else None
        if run is None:
            return []
        last = served.prompt_tokens // block_tokens  # blocks after it contain generated tokens
        position = len(run.keys) - 1
        while run.depth >= last and run.parent is not None:
            run, position = run.parent
        position = min(position, last - run.depth - 1)
        self.matched += 1
        return self._known.learn(run, position, prompt, block_tokens) if position >= 0 else []

    def _clear(self, *, is_complete: bool) -> None:
        self.blocks.clear(is_complete=is_complete)
        self._forget_responses()
        self._residency.clear(self.target)

    def _forget_responses(self) -> None:
        self._pieces.clear()
        self._ended.clear()
        self._served.clear()

    def _use_ended(self) -> None:
        """Make the prompts of responses that have ended the most recently used, before later evictions are applied."""
        while self._ended:
            ended_s, chain = self._ended.popleft()
            self._residency.add_stored(self.target, chain, ended_s)

    def _on_stored(self, event: BlockStored, stored_s: float) -> None:
        run = self.blocks.store(event, stored_s)
        if run is None:
            return
        self._pieces.add(run)
        known = self._known.deepest(run.keys)
        if known is not None:
            position, prompt = known
            blocks = prompt.blocks((run.depth + position + 1) * event.block_tokens)
            self._residency.add_stored(self.target, prompt.chain[:blocks], self._clock())

    def _on_removed(self, event: BlockRemoved) -> None:
        if self.blocks.is_complete and self.capacity_tokens is None:
            self.capacity_tokens = self.blocks.max_seen_blocks * self.blocks.block_tokens
        removed = self.blocks.remove(event)
        for run, position in removed.items():
            prompt = self._known.get(run.keys[position]) if run.keys else None
            if prompt is not None:
                blocks = prompt.blocks((run.depth + position) * self.blocks.block_tokens)
                self._residency.truncate(self.target, prompt.chain, blocks)
        if removed:
            self._residency.evict_before(self.target, max(run.stored_s for run in removed))
