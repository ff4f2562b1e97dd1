"""Decisions through model caches, in the order in which they were placed: what each term of the ladder would have hit.

Theory of operation. A replay carries four models from one window to the next, because caches are warm from before: one
that never forgets (bounded by an age), one of the fleet's room, one for each replica with placement of our own (the
replica that holds at least half of the prompt, else the one whose room was filled least often), and one for each
replica with the placement that happened. A request's blocks count as held from the moment it is placed.

Room is counted in sampled blocks: the engine's tokens, by the estimated tokens of a hash, by how many real tokens an
estimated one turned out to be, times the sampled part. The part falls when a request comes with a smaller one, and
when there are more than ``MAX_ENTRIES`` blocks to remember (fixed-size SHARDS) or ``MOST_BLOCKS`` to replay;
then every model drops the blocks beyond it. It never rises in a replay's life: what was left out before would look new.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from telemetry.lab.caches import Cache, Replicas, Seen
from telemetry.lab.chains import HASHES, Request, depth, thinned
from telemetry.lab.ladder import TERMS, Sums

MAX_ENTRIES = 65_536  # of each of the four models
MOST_BLOCKS = 300_000  # in all prompts of a window, sampled: a replay of so many takes a second
HORIZON_S = 12 * 3600.0  # after one or two of which not even a cache that never forgets counts
KEEP_RATIO = 0.5  # of a prompt that a replica holds: placement of our own goes there
FADE = 0.9  # of what was learned about real tokens, at each new window


class Replay:
    """The models of one pool. ``rooms`` are the tokens that each replica holds; None: not known of all of them."""

    def __init__(self, rooms: Mapping[str, int] | None, ratio: float = 1.0) -> None:
        self.ratio = ratio
        self.at_s = 0.0  # of the newest request
        self.estimated = self.counted = 0.0  # tokens of the prompts that engines counted: by us, and by them
        self.hash_tokens = 64
        self.forever = Seen(HORIZON_S)
        self.whole = Cache(0)
        self.ideal = Replicas()
        self.placed = Replicas()
        self.rooms: Mapping[str, int] | None = None
        self.resize(rooms)

    @property
    def real_ratio(self) -> float:
        """Engine's tokens / estimated ones."""
        return self.counted / self.estimated if self.estimated else 1.0

    def resize(self, rooms: Mapping[str, int] | None) -> None:
        """The fleet has this room; what no longer fits is dropped."""
        self.rooms = rooms
        if not rooms:
            return
        while sum(map(self.room, rooms.values())) > MAX_ENTRIES:
            self.thin(self.ratio / 2)
        self._set_rooms(rooms)

    def learn(self, requests: Iterable[Request]) -> None:
        """See a window's requests before they are placed: how long prompts are, in the engines' tokens and together."""
        self.estimated, self.counted = FADE * self.estimated, FADE * self.counted
        blocks = 0
        for request in requests:
            blocks += request.block_count
            self.hash_tokens = request.hash_tokens
            if request.prompt_tokens and request.estimate_tokens:
                self.estimated += request.estimate_tokens
                self.counted += request.prompt_tokens
        while blocks * self.ratio > MOST_BLOCKS:
            self.thin(self.ratio / 2)
        self.resize(self.rooms)

    def add(self, request: Request, sums: Sums) -> None:
        """Place one request, and add to the sums what each model held of it. Requests come in the order of time."""
        if request.sample_ratio < self.ratio:
            self.thin(request.sample_ratio)
        chain, positions = thinned(request, self.ratio)
        prompt = Prompt.of(request, positions, self.tokens_of(request), self.ratio)
        sums.requests += 1
        sums.prompt_tokens += prompt.tokens
        if request.cached_tokens is not None and request.prompt_tokens:
            sums.reported_requests += 1
            sums.reported_tokens += request.prompt_tokens
            sums.delivered += min(request.cached_tokens, request.prompt_tokens)
        self.at_s = max(self.at_s, request.at_s)
        if chain:
            self._use(request, chain, prompt, sums)
        else:  # no block of it is in the sample: nothing tells the terms apart
            for name in TERMS[:-1]:
                setattr(sums, name, getattr(sums, name) + prompt.held(0))
        if len(self.forever) > MAX_ENTRIES:
            self.thin(self.ratio / 2)

    def thin(self, ratio: float) -> None:
        """Go on with a smaller part of the blocks."""
        self.ratio = ratio
        below = round(ratio * HASHES)
        for model in (self.forever, self.whole, self.ideal, self.placed):
            model.keep_below(below)
        if self.rooms:
            self._set_rooms(self.rooms)

    def tokens_of(self, request: Request) -> float:
        """The prompt's length as the engine counted it, or would have."""
        return request.prompt_tokens or request.estimate_tokens * self.real_ratio

    def _use(self, request: Request, chain: Sequence[int], prompt: Prompt, sums: Sums) -> None:
        if not self.rooms:
            sums.reachable += prompt.held(self.forever.use(chain, request.at_s, 0))
            return
        whole, _ = self.whole.use(chain)
        seen = self.forever.use(chain, request.at_s, whole)
        split = self._place_ideally(chain, seen)
        chosen, best = self.placed.use(self._place_of(request.replica), chain, 0, seen)
        tokens = prompt.held(seen)
        sums.reachable += tokens
        if whole != seen:
            tokens = prompt.held(whole)
        sums.capacity += tokens
        if split != whole:
            tokens = prompt.held(split)
        sums.split += tokens
        if best != split:
            tokens = prompt.held(best)
        sums.best += tokens
        if chosen != best:
            tokens = prompt.held(chosen)
        sums.predicted += tokens
        if self.ratio < 1:
            parting = chain[chosen - 1 if chosen else 0]
            sums.partings[parting] = sums.partings.get(parting, 0.0) + prompt.of_block

    def _place_ideally(self, chain: Sequence[int], seen: int) -> int:
        """Blocks that the best replica held, with placement of our own."""
        ideal = self.ideal
        place = ideal.least_written()
        best, holders = ideal.best(chain, seen)
        if best >= KEEP_RATIO * len(chain) and not holders >> place & 1:
            place = (holders & -holders).bit_length() - 1
        ideal.use(place, chain, best, best)
        return best

    def _place_of(self, replica: str) -> int:
        """Its number; one that the fleet no longer has gets the room of a middling one."""
        place = self.placed.places.get(replica)
        if place is None:
            rooms = sorted((self.rooms or {}).values())
            self.placed.set_room(replica, self.room(rooms[len(rooms) // 2]))
            place = self.placed.places[replica]
        return place

    def room(self, tokens: int) -> int:
        """Sampled blocks in so many of the engine's tokens."""
        return max(1, round(tokens / (self.hash_tokens * self.real_ratio) * self.ratio))

    def _set_rooms(self, rooms: Mapping[str, int]) -> None:
        self.whole.room = sum(map(self.room, rooms.values()))
        for name, tokens in rooms.items():
            self.ideal.set_room(name, self.room(tokens))
            self.placed.set_room(name, self.room(tokens))


class Prompt(NamedTuple):
    """One prompt as a replay sees it: what its tokens come to when an opening of its sampled blocks is held."""

    tokens: float
    positions: Sequence[int]  # of its sampled blocks
    block_count: int
    of_block: float  # tokens
    engine_block: int  # tokens
    ratio: float

    @classmethod
    def of(cls, request: Request, positions: Sequence[int], tokens: float, ratio: float) -> Prompt:
        """A request's, with these blocks in the sample."""
        of_block = request.hash_tokens * tokens / max(1, request.estimate_tokens)
        return cls(tokens, positions, request.block_count, of_block, request.block_tokens or 1, ratio)

    def held(self, matched: int) -> float:
        """Tokens where the first ``matched`` of its blocks are held.

        Where a block is met in part, half of it on average; whole engine blocks before the last token (H7).
        """
        of_prompt, positions, block_count, of_block, engine, ratio = self
        tokens = depth(positions, matched, block_count, ratio) * of_block
        if of_block > engine and 0 < matched < len(positions):
            tokens += (of_block - engine) / 2
        return tokens if ratio < 1 else min(tokens, max(0.0, (of_prompt - 1) // engine * engine))
