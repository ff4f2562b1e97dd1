"""What the requests of a bin come to, group by group, while it is replayed.

Decisions through model caches, in the order in which they were placed: what each term of the ladder would have hit.

Theory of operation. A replay carries four models from one span of time to the next, because caches are warm from
before: one that never forgets (bounded by an age), one of the fleet's room, one for each replica with placement of our
own (the replica that holds at least half of the prompt, else the one whose room was filled least often), and one for
each replica with the placement that happened. A request's blocks count as held from the moment it is placed.

Room is counted in sampled blocks: the engine's tokens, by the estimated tokens of a hash, by how many real tokens an
estimated one turned out to be, times the sampled part. The part falls when requests come with a smaller one, and
when there are more than ``MAX_ENTRIES`` blocks to remember (fixed-size SHARDS) or ``MOST_BLOCKS_PER_MINUTE`` to replay;
then every model drops the blocks beyond it. It never rises in a replay's life: what was left out before would look new.
All requests that are placed at once are placed with the same part.

A replay as bytes, so that another worker goes on with warm caches: at most ``MAX_ENTRIES`` blocks of each model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from math import sqrt
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from telemetry.lab.caches import Chains, Numbers, best_of, distinct, place, seen, through
from telemetry.lab.chains import HASHES, Coded, Floats, Hashes, Integers, Prompts, Requests, error
from telemetry.lab.ladder import Sums

Truths = NDArray[np.bool_]


class Tally:
    """Sums by group, and the tokens of a block by where prompts part, of which ``Sums.doubt`` is made."""

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}
        self.partings: dict[str, tuple[Hashes, Floats]] = {}
        self.reason = ""  # why terms that need the caches' sizes are unknown

    def add(self, groups: Coded, columns: Mapping[str, Floats | Truths]) -> None:
        """Add requests: columns that are named as the sums are. What is true is counted."""
        added = {name: _by_group(groups, column) for name, column in columns.items()}
        for number, group in enumerate(groups.names):
            sums = self.sums.setdefault(group, Sums())
            for name, column in added.items():
                setattr(sums, name, getattr(sums, name) + column[number])

    def part(self, groups: Coded, blocks: Hashes, tokens: Floats) -> None:
        """Note where each request's prompt parts from what was there: at a block of so many tokens."""
        for number, group in enumerate(groups.names):
            ours = groups.codes == number
            before = self.partings.get(group, (blocks[:0], tokens[:0]))
            parts = np.concatenate((before[0], blocks[ours])), np.concatenate((before[1], tokens[ours]))
            self.partings[group] = _together(*parts)

    def settled(self, ratio: float) -> dict[str, Sums]:
        """The sums of a whole bin that was replayed with this part of the blocks, each term at least the one below."""
        found = {}
        for group, sums in self.sums.items():
            split = max(sums.split, sums.best)
            found[group] = replace(sums, split=split, capacity=max(sums.capacity, split))
            if group in self.partings:
                found[group].doubt = error(ratio) * sqrt(np.square(self.partings[group][1]).sum())
        return found


def _by_group(groups: Coded, column: Floats | Truths) -> list[float]:
    """Its sum for each group."""
    if column.dtype == np.bool_:
        found: list[float] = np.bincount(groups.codes[column.astype(np.bool_)], minlength=len(groups.names)).tolist()
    else:
        found = np.bincount(groups.codes, column, len(groups.names)).tolist()
    return found


def _together(blocks: Hashes, tokens: Floats) -> tuple[Hashes, Floats]:
    """Each block once."""
    once, codes = np.unique(blocks, return_inverse=True)
    return once, np.bincount(codes, tokens, len(once)).astype(np.float64)


MAX_ENTRIES = 65_536  # of each of the four models
MOST_BLOCKS_PER_MINUTE = 60_000  # in all prompts, sampled: a replay of so many takes a tenth of a second
HORIZON_S = 12 * 3600.0  # after one or two of which not even a cache that never forgets counts
FADE_PER_MINUTE = 0.98  # of what was learned about real tokens
FADED_TOKENS = 1.0  # below which it fades no further: an idle pool keeps the ratio that it had
NONE = np.empty(0, np.uint64)


class Replay:
    """The models of one pool. ``rooms`` are the tokens that each replica holds; None: not known of all of them."""

    def __init__(self, rooms: Mapping[str, int] | None, ratio: float = 1.0) -> None:
        self.ratio = ratio
        self.estimated = self.counted = 0.0  # tokens of the prompts that engines counted: by us, and by them
        self.hash_tokens = 64.0
        self.lately, self.of_old = NONE, NONE  # blocks of the last one or two horizons
        self.since_s: float | None = None  # when ``lately`` began
        self.whole = NONE  # what caches hold, the least recent first
        self.ideal: dict[str, Hashes] = {}
        self.placed: dict[str, Hashes] = {}
        self.written: dict[str, float] = {}  # how often the room of each of the ideal ones was filled
        self.rooms: Mapping[str, int] | None = None
        self.resize(rooms)

    @property
    def real_ratio(self) -> float:
        """Engine's tokens / estimated ones."""
        return self.counted / self.estimated if self.estimated else 1.0

    def resize(self, rooms: Mapping[str, int] | None) -> None:
        """The fleet has this room from now on; of replicas that left it nothing is kept."""
        self.rooms = rooms
        if not rooms:
            return
        while sum(map(self.room, rooms.values())) > MAX_ENTRIES:
            self.thin(self.ratio / 2)
        least = min(self.written.values(), default=0.0)
        self.written = {name: self.written.get(name, least) for name in rooms}
        self.ideal = {name: self.ideal.get(name, NONE) for name in rooms}

    def learn(self, requests: Requests, minutes: float) -> None:
        """See the requests of some minutes before they are placed: how long prompts are, and what engines count."""
        faded = FADE_PER_MINUTE**minutes if min(self.estimated, self.counted) > FADED_TOKENS else 1.0
        self.estimated, self.counted = faded * self.estimated, faded * self.counted
        if len(requests):
            is_told = (requests.prompt_tokens > 0) & (requests.estimates > 0)
            latest = float(requests.hash_tokens[-1])
            self.estimated *= latest / self.hash_tokens
            self.hash_tokens = latest
            self.estimated += float(self.estimates_of(requests)[is_told].sum())
            self.counted += float(requests.prompt_tokens[is_told].sum())
        blocks = requests.block_counts.sum()
        while blocks * self.ratio > MOST_BLOCKS_PER_MINUTE * minutes:
            self.thin(self.ratio / 2)
        self.resize(self.rooms)

    def use(self, requests: Requests, tally: Tally) -> None:
        """Place requests, and add to the tally what each model held of them."""
        if not len(requests):
            return
        requests = self._fitting(requests)
        tokens = self.tokens_of(requests)
        prompts = Prompts.of(requests, tokens, self.ratio)
        matched = self._matched(requests)
        columns = {name: prompts.held(blocks) for name, blocks in matched.items()}
        reachable = columns["reachable"]
        is_told = (requests.cached_tokens >= 0) & (requests.prompt_tokens > 0)
        tally.add(
            requests.groups,
            columns
            | {
                "requests": np.ones(len(requests), np.bool_),
                "prompt_tokens": tokens,
                "prompt_squares": np.square(tokens),
                "reachable_squares": np.square(reachable),
                "reachable_products": reachable * tokens,
                "reported_requests": is_told,
                "reported_tokens": np.where(is_told, requests.prompt_tokens, 0),
                "delivered": np.where(is_told, np.minimum(requests.cached_tokens, requests.prompt_tokens), 0),
            },
        )
        if self.ratio < 1:
            known = np.flatnonzero(prompts.lengths)
            depths = matched.get("predicted", matched["reachable"])[known]
            at = prompts.starts[known] + np.maximum(depths - 1, 0)
            tally.part(requests.groups.take(known), requests.blocks[at], prompts.of_block[known])

    def thin(self, ratio: float) -> None:
        """Go on with a smaller part of the blocks."""
        if ratio >= self.ratio:
            return
        self.ratio = ratio
        below = np.uint64(round(ratio * HASHES))
        self.lately, self.of_old, self.whole = (
            blocks[blocks < below] for blocks in (self.lately, self.of_old, self.whole)
        )
        for model in (self.ideal, self.placed):
            model.update({name: blocks[blocks < below] for name, blocks in model.items()})

    def estimates_of(self, requests: Requests) -> Floats:
        """Estimated lengths, all by the latest estimate of a block's tokens, which routers learn and change."""
        return requests.estimates * (self.hash_tokens / requests.hash_tokens)

    def tokens_of(self, requests: Requests) -> Floats:
        """The prompts' lengths as the engine counted them, or would have."""
        estimates = self.estimates_of(requests)
        return np.where(requests.prompt_tokens > 0, requests.prompt_tokens, estimates * self.real_ratio)

    def room(self, tokens: int) -> int:
        """Sampled blocks in so many of the engine's tokens."""
        return max(1, round(tokens / (self.hash_tokens * self.real_ratio) * self.ratio))

    def _fitting(self, requests: Requests) -> Requests:
        """Thinned, together with all models, so that these stay within their bounds."""
        self.thin(min(self.ratio, float(requests.sample_ratios.min())))
        requests = requests.thinned(self.ratio)
        while _count(self.lately, self.of_old, requests.blocks) > MAX_ENTRIES:
            self.thin(self.ratio / 2)
            requests = requests.thinned(self.ratio)
        return requests

    def _matched(self, requests: Requests) -> dict[str, Integers]:
        """How many of each prompt's blocks each model holds, by the term's name; afterwards all of them hold it."""
        known = np.flatnonzero(requests.lengths)  # of the others no block is in the sample
        held = (self.whole, *self.ideal.values(), *self.placed.values())
        numbers = Numbers(requests.blocks, self.lately, self.of_old, *held)
        chains = Chains.tail_first(numbers.of(requests.blocks), requests.ends[known])
        found = {"reachable": self._see(numbers, chains, requests.at_s[known])}
        if self.rooms:
            whole = through(numbers.of(self.whole), chains, sum(map(self.room, self.rooms.values())))
            self.whole = numbers.hashes(whole.held)
            best, predicted = self._place(numbers, chains, requests.replicas.take(known))
            split = self._place_ideally(numbers, chains)
            found["reachable"] = np.maximum.reduce([found["reachable"], whole.matched, split, best])
            found |= {"capacity": whole.matched, "split": split, "best": best, "predicted": predicted}
        matched = np.zeros((len(found), len(requests)), np.int64)
        matched[:, known] = list(found.values())
        return dict(zip(found, matched, strict=True))

    def _see(self, numbers: Numbers, chains: Chains, at_s: Floats) -> Integers:
        """Through the model that never forgets what was used within the last one or two horizons."""
        horizons, self.since_s = _horizons(at_s, self.since_s)
        matched, kept = seen((numbers.of(self.of_old), numbers.of(self.lately)), chains, horizons)
        self.of_old, self.lately = map(numbers.hashes, kept)
        return matched

    def _place(self, numbers: Numbers, chains: Chains, replicas: Coded) -> tuple[Integers, Integers]:
        """(what the replica that held most had of each prompt, what the chosen one had)."""
        predicted = np.zeros(len(chains.ends), np.int64)
        passages = []
        held, self.placed = self.placed, {}
        for name in dict.fromkeys((*(self.rooms or ()), *replicas.names)):
            own = replicas.rows(name)
            one = through(numbers.of(held.get(name, NONE)), chains.take(own), self._room_of(name))
            predicted[own], self.placed[name] = one.matched, numbers.hashes(one.held)
            passages.append((own, one))
        return best_of(passages, len(predicted)), predicted

    def _place_ideally(self, numbers: Numbers, chains: Chains) -> Integers:
        """What the replica that held most had of each prompt, with placement of our own."""
        held = [numbers.of(blocks) for blocks in self.ideal.values()]
        done = place(held, list(map(self._room_of, self.ideal)), list(self.written.values()), chains)
        self.ideal = dict(zip(self.ideal, map(numbers.hashes, done.held), strict=True))
        self.written = dict(zip(self.written, done.written, strict=True))
        return done.best

    def _room_of(self, replica: str) -> int:
        """In sampled blocks; one that the fleet does not have gets the room of a middling one."""
        rooms = self.rooms or {}
        return self.room(rooms[replica] if replica in rooms else sorted(rooms.values())[len(rooms) // 2])


def _count(*blocks: Hashes) -> int:
    """How many different ones; as many as there are, where these are few enough."""
    most = sum(map(len, blocks))
    return most if most <= MAX_ENTRIES else len(distinct(*blocks))


def _horizons(at_s: Floats, since_s: float | None) -> tuple[Integers, float | None]:
    """(how many horizons had begun anew when each request came, when the last one began)."""
    begun = np.zeros(len(at_s), np.int64)
    if since_s is None:
        since_s = float(at_s[0]) if len(at_s) else None
    while since_s is not None and (late := int(np.searchsorted(at_s, since_s + HORIZON_S))) < len(at_s):
        begun[late:] += 1
        since_s = float(at_s[late])
    return begun, since_s


FORM = 4  # of the bytes: another one is not read, and the replay begins anew
FACTS = ("ratio", "estimated", "counted", "hash_tokens", "since_s", "written")


class StateError(ValueError):
    """Bytes of another form."""


def dump(replay: Replay, tally: Tally) -> bytes:
    """All that the next requests need, and what those of the bin before them came to. 8 bytes a block."""
    return msgspec.msgpack.encode(
        {
            "form": FORM,
            "facts": {name: getattr(replay, name) for name in FACTS},
            "seen": [_packed(replay.of_old), _packed(replay.lately)],
            "whole": _packed(replay.whole),
            "ideal": {name: _packed(blocks) for name, blocks in replay.ideal.items()},
            "placed": {name: _packed(blocks) for name, blocks in replay.placed.items()},
            "sums": {group: asdict(sums) for group, sums in tally.sums.items()},
            "reason": tally.reason,
            "partings": {group: [_packed(at), tokens.tobytes()] for group, (at, tokens) in tally.partings.items()},
        }
    )


def load(state: bytes) -> tuple[Replay, Tally]:
    """Both; StateError for bytes of another form."""
    try:
        told: dict[str, Any] = msgspec.msgpack.decode(state)
    except msgspec.DecodeError as error:
        raise StateError(str(error)) from None
    if told.get("form") != FORM:
        raise StateError(f"form {told.get('form')}")
    replay, tally = Replay(None), Tally()
    for name in FACTS:
        setattr(replay, name, told["facts"][name])
    replay.of_old, replay.lately = map(_unpacked, told["seen"])
    replay.whole = _unpacked(told["whole"])
    replay.ideal = {name: _unpacked(blocks) for name, blocks in told["ideal"].items()}
    replay.placed = {name: _unpacked(blocks) for name, blocks in told["placed"].items()}
    tally.sums = {group: Sums(**sums) for group, sums in told["sums"].items()}
    tally.reason = told["reason"]
    tally.partings = {group: (_unpacked(at), np.frombuffer(tokens)) for group, (at, tokens) in told["partings"].items()}
    return replay, tally


def _packed(blocks: Hashes) -> bytes:
    return blocks.tobytes()


def _unpacked(packed: bytes) -> Hashes:
    return np.frombuffer(packed, np.uint64)
