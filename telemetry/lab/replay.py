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

from telemetry.lab.caches import Cache, Replicas, Seen, Use, use
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
        self.tick = 0
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
        prompt_tokens = self.tokens_of(request)
        sums.requests += 1
        sums.prompt_tokens += prompt_tokens
        if request.cached_tokens is not None and request.prompt_tokens:
            sums.reported_requests += 1
            sums.reported_tokens += request.prompt_tokens
            sums.delivered += min(request.cached_tokens, request.prompt_tokens)
        self.at_s = max(self.at_s, request.at_s)
        held = Held(request, positions, prompt_tokens, self.ratio)
        if chain:
            self._use(request, use(chain, self.tick), held, sums)
        else:  # no block of it is in the sample: nothing tells the terms apart
            for name in TERMS[:-1]:
                setattr(sums, name, getattr(sums, name) + held[0])
        self.tick += 1
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

    def _use(self, request: Request, used: Use, held: Held, sums: Sums) -> None:
        chain = used.chain
        sums.reachable += held[self.forever.use(used, request.at_s)]
        if not self.rooms:
            return
        sums.capacity += held[self.whole.match(chain)]
        self.whole.use(used)
        sums.split += held[self._place_ideally(used)]
        place = self._place_of(request.replica)
        best, chosen, _ = self.placed.match(chain, place)
        self.placed.use(place, used, chosen)
        sums.best += held[best]
        sums.predicted += held[chosen]
        if self.ratio < 1:
            parting = chain[max(0, chosen - 1)]
            sums.partings[parting] = sums.partings.get(parting, 0.0) + held.of_block

    def _place_ideally(self, used: Use) -> int:
        """Blocks that the best replica held, with placement of our own."""
        ideal = self.ideal
        place = ideal.least_written()
        best, chosen, holders = ideal.match(used.chain, place)
        if best >= KEEP_RATIO * len(used.chain) and not holders >> place & 1:
            place, chosen = (holders & -holders).bit_length() - 1, best
        ideal.use(place, used, chosen)
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


class Held(dict[int, float]):
    """Tokens of one prompt, by how many of its sampled blocks are held. Computed when asked, and then kept."""

    __slots__ = ("_positions", "_prompt_tokens", "_ratio", "_request", "of_block")

    def __init__(self, request: Request, positions: Sequence[int], prompt_tokens: float, ratio: float) -> None:
        self._request = request
        self._positions = positions
        self._prompt_tokens = prompt_tokens
        self._ratio = ratio
        self.of_block = request.hash_tokens * prompt_tokens / max(1, request.estimate_tokens)

    def __missing__(self, matched: int) -> float:
        """Where a block is met in part, half of it on average; whole engine blocks before the last token (H7)."""
        request, ratio = self._request, self._ratio
        engine = request.block_tokens or 1
        tokens = depth(self._positions, matched, request.block_count, ratio) * self.of_block
        if 0 < matched < len(self._positions):
            tokens += max(0.0, (self.of_block - engine) / 2)
        if ratio >= 1:
            tokens = min(tokens, max(0.0, (self._prompt_tokens - 1) // engine * engine))
        held = self[matched] = tokens
        return held
