"""Replays captured requests through simulated caches, which gives the terms of the hit-rate breakdown by task group.

Theory of operation. A replay keeps four simulated caches between time spans, because caches stay warm: an unbounded
cache (limited by age), one LRU cache as large as the fleet's, a cache per replica with near-optimal placement, and a
cache per replica with the actual placement. A request's blocks count as cached from the time it is placed.

Capacities are in sampled blocks: the engine's tokens, divided by the mean tokens of a block, as engines counted them,
times the sampling ratio. The ratio decreases when requests come with a smaller one,
and when more than ``MAX_ENTRIES`` blocks would be stored (fixed-size SHARDS) or ``MAX_BLOCKS_PER_MINUTE`` replayed;
every cache then drops the blocks outside it. The ratio never increases within one replay, because blocks left out
before would look new. All requests of one call have the same ratio.

A replay can be serialized, so that another worker continues with warm caches: at most ``MAX_ENTRIES`` blocks per cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from math import sqrt
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from telemetry.lab.breakdown import Sums
from telemetry.lab.caches import BlockNumbers, Chains, best_of, distinct, place_ideally, run_lru, unbounded
from telemetry.lab.chains import HASHES, Coded, Floats, Hashes, Integers, Prompts, Requests, depth_error

Booleans = NDArray[np.bool_]


class BinSums:
    """Sums of one bin by task group, and block sizes at points of divergence, which give ``Sums.sampling_error``."""

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}
        self.divergences: dict[str, tuple[Hashes, Floats]] = {}
        self.reason = ""  # why terms that need cache sizes are unknown

    def add(self, groups: Coded, columns: Mapping[str, Floats | Booleans]) -> None:
        """Add requests, as columns named like ``Sums``; True values are counted."""
        added = {name: _sums_by_group(groups, column) for name, column in columns.items()}
        for number, group in enumerate(groups.names):
            sums = self.sums.setdefault(group, Sums())
            for name, column in added.items():
                setattr(sums, name, getattr(sums, name) + column[number])

    def add_divergences(self, groups: Coded, blocks: Hashes, tokens: Floats) -> None:
        """Record where each prompt diverges from the cache: at a block of ``tokens`` tokens."""
        for number, group in enumerate(groups.names):
            in_group = groups.codes == number
            before = self.divergences.get(group, (blocks[:0], tokens[:0]))
            parts = np.concatenate((before[0], blocks[in_group])), np.concatenate((before[1], tokens[in_group]))
            self.divergences[group] = _summed_by_block(*parts)

    def result(self, ratio: float) -> dict[str, Sums]:
        """The sums of a complete bin at this sampling ratio, each term at least the one below."""
        result = {}
        for group, sums in self.sums.items():
            split = max(sums.split, sums.best)
            result[group] = replace(sums, split=split, capacity=max(sums.capacity, split))
            if group in self.divergences:
                result[group].sampling_error = depth_error(ratio) * sqrt(np.square(self.divergences[group][1]).sum())
        return result


def _sums_by_group(groups: Coded, column: Floats | Booleans) -> list[float]:
    """Sums of a column by group, in the order of ``groups.names``; of booleans the number of true ones."""
    if column.dtype == np.bool_:
        sums: list[float] = np.bincount(groups.codes[column.astype(np.bool_)], minlength=len(groups.names)).tolist()
    else:
        sums = np.bincount(groups.codes, column, len(groups.names)).tolist()
    return sums


def _summed_by_block(blocks: Hashes, tokens: Floats) -> tuple[Hashes, Floats]:
    distinct_blocks, codes = np.unique(blocks, return_inverse=True)
    return distinct_blocks, np.bincount(codes, tokens, len(distinct_blocks)).astype(np.float64)


MAX_ENTRIES = 65_536  # blocks in each of the four simulated caches
MAX_BLOCKS_PER_MINUTE = 60_000  # sampled, in all prompts; their replay takes about 0.1 s
HORIZON_S = 12 * 3600.0  # the unbounded cache drops blocks after one to two of these
DECAY_PER_MINUTE = 0.98  # of the measured tokens of a block
MIN_DECAYED_TOKENS = 1.0  # no decay below this: an idle pool keeps its ratio
BLOCK_TOKENS = 64.0  # of a block while no response reported its tokens: four bytes a token
NO_BLOCKS = np.empty(0, np.uint64)


class Replay:
    """The simulated caches of one pool. ``capacities``: each replica's cache size in tokens; None if one is unknown."""

    def __init__(self, capacities: Mapping[str, int] | None, ratio: float = 1.0) -> None:
        self.ratio = ratio
        self.byte_blocks = self.counted = 0.0  # lengths of the same prompts in blocks, and in tokens of the engine
        self.recent, self.previous = NO_BLOCKS, NO_BLOCKS  # blocks last used in the current and the previous horizon
        self.since_s: float | None = None  # start of the current horizon
        self.fleet_cache = NO_BLOCKS  # content of the fleet-sized cache, least recent first
        self.ideal: dict[str, Hashes] = {}  # content by replica, near-optimal placement
        self.placed: dict[str, Hashes] = {}  # content by replica, actual placement
        self.written: dict[str, float] = {}  # of the ideal caches, as multiples of their capacity
        self.capacities: Mapping[str, int] | None = None
        self.resize(capacities)

    @property
    def block_tokens(self) -> float:
        """Mean tokens of a block, as counted by engines."""
        return self.counted / self.byte_blocks if self.byte_blocks else BLOCK_TOKENS

    def resize(self, capacities: Mapping[str, int] | None) -> None:
        """Change the capacities; the content of removed replicas is dropped."""
        self.capacities = capacities
        if not capacities:
            return
        while sum(map(self.capacity_blocks, capacities.values())) > MAX_ENTRIES:
            self.reduce_sampling(self.ratio / 2)
        least = min(self.written.values(), default=0.0)
        self.written = {name: self.written.get(name, least) for name in capacities}
        self.ideal = {name: self.ideal.get(name, NO_BLOCKS) for name in capacities}

    def learn(self, requests: Requests, minutes: float) -> None:
        """Update the token ratio and the sampling ratio from the requests of some minutes, before they are placed."""
        decay = DECAY_PER_MINUTE**minutes if self.counted > MIN_DECAYED_TOKENS else 1.0
        is_reported = requests.prompt_tokens > 0
        self.byte_blocks = decay * self.byte_blocks + float(requests.byte_blocks[is_reported].sum())
        self.counted = decay * self.counted + float(requests.prompt_tokens[is_reported].sum())
        blocks = requests.block_counts.sum()
        while blocks * self.ratio > MAX_BLOCKS_PER_MINUTE * minutes:
            self.reduce_sampling(self.ratio / 2)
        self.resize(self.capacities)

    def use(self, requests: Requests, bin_sums: BinSums) -> None:
        """Place requests, and add to the sums what each simulated cache contained of them."""
        if not len(requests):
            return
        requests = self._sampled(requests)
        prompts, matched = Prompts.of(requests, self.tokens_of(requests), self.ratio), self._matched(requests)
        tokens = prompts.tokens
        columns = {name: prompts.cached_tokens(blocks) for name, blocks in matched.items()}
        reachable = columns["reachable"]
        is_reported = (requests.cached_tokens >= 0) & (requests.prompt_tokens > 0)
        bin_sums.add(
            requests.groups,
            columns
            | {
                "requests": np.ones(len(requests), np.bool_),
                "prompt_tokens": tokens,
                "prompt_squares": np.square(tokens),
                "reachable_squares": np.square(reachable),
                "reachable_products": reachable * tokens,
                "reported_requests": is_reported,
                "reported_tokens": np.where(is_reported, requests.prompt_tokens, 0),
                "delivered": np.where(is_reported, np.minimum(requests.cached_tokens, requests.prompt_tokens), 0),
            },
        )
        if self.ratio < 1:
            known = np.flatnonzero(prompts.lengths)
            depths = matched.get("predicted", matched["reachable"])[known]
            at = prompts.starts[known] + np.maximum(depths - 1, 0)
            bin_sums.add_divergences(requests.groups.take(known), requests.blocks[at], prompts.block_tokens[known])

    def reduce_sampling(self, ratio: float) -> None:
        """Continue with a smaller sampling ratio."""
        if ratio >= self.ratio:
            return
        self.ratio = ratio
        limit = np.uint64(round(ratio * HASHES))
        self.recent, self.previous, self.fleet_cache = (
            blocks[blocks < limit] for blocks in (self.recent, self.previous, self.fleet_cache)
        )
        for caches in (self.ideal, self.placed):
            caches.update({name: blocks[blocks < limit] for name, blocks in caches.items()})

    def tokens_of(self, requests: Requests) -> Floats:
        """Prompt lengths as counted by the engine, else by the mean tokens of a block, else as the router estimated."""
        others = requests.byte_blocks * self.block_tokens if self.byte_blocks else requests.estimates
        return np.where(requests.prompt_tokens > 0, requests.prompt_tokens, others)

    def capacity_blocks(self, tokens: float) -> int:
        """A capacity in engine tokens as sampled blocks."""
        return max(1, round(tokens / self.block_tokens * self.ratio))

    def _sampled(self, requests: Requests) -> Requests:
        """The requests at a sampling ratio that keeps the caches, which use it too, within ``MAX_ENTRIES``."""
        self.reduce_sampling(min(self.ratio, float(requests.sample_ratios.min())))
        requests = requests.sampled(self.ratio)
        while _count(self.recent, self.previous, requests.blocks) > MAX_ENTRIES:
            self.reduce_sampling(self.ratio / 2)
            requests = requests.sampled(self.ratio)
        return requests

    def _matched(self, requests: Requests) -> dict[str, Integers]:
        """Cached blocks of each prompt by term of the breakdown; afterwards all caches contain the prompts."""
        known = np.flatnonzero(requests.lengths)  # prompts with a sampled block
        contents = (self.fleet_cache, *self.ideal.values(), *self.placed.values())
        numbers = BlockNumbers(requests.blocks, self.recent, self.previous, *contents)
        chains = Chains.tail_first(numbers.of(requests.blocks), requests.ends[known])
        by_term = {"reachable": self._run_unbounded(numbers, chains, requests.at_s[known])}
        if self.capacities:
            fleet = run_lru(
                numbers.of(self.fleet_cache), chains, sum(map(self.capacity_blocks, self.capacities.values()))
            )
            self.fleet_cache = numbers.hashes(fleet.content)
            best, predicted = self._run_as_placed(numbers, chains, requests.replicas.take(known))
            split = self._run_ideally(numbers, chains)
            by_term["reachable"] = np.maximum.reduce([by_term["reachable"], fleet.matched, split, best])
            by_term |= {"capacity": fleet.matched, "split": split, "best": best, "predicted": predicted}
        matched = np.zeros((len(by_term), len(requests)), np.int64)
        matched[:, known] = list(by_term.values())
        return dict(zip(by_term, matched, strict=True))

    def _run_unbounded(self, numbers: BlockNumbers, chains: Chains, at_s: Floats) -> Integers:
        horizons, self.since_s = _horizons(at_s, self.since_s)
        matched, horizons_blocks = unbounded((numbers.of(self.previous), numbers.of(self.recent)), chains, horizons)
        self.previous, self.recent = map(numbers.hashes, horizons_blocks)
        return matched

    def _run_as_placed(self, numbers: BlockNumbers, chains: Chains, replicas: Coded) -> tuple[Integers, Integers]:
        """(most cached blocks on any replica, cached blocks on the chosen one) of each prompt."""
        predicted = np.zeros(len(chains.ends), np.int64)
        runs = []
        contents, self.placed = self.placed, {}
        for name in dict.fromkeys((*(self.capacities or ()), *replicas.names)):
            rows = replicas.rows(name)
            run = run_lru(numbers.of(contents.get(name, NO_BLOCKS)), chains.take(rows), self._capacity_of(name))
            predicted[rows], self.placed[name] = run.matched, numbers.hashes(run.content)
            runs.append((rows, run))
        return best_of(runs, len(predicted)), predicted

    def _run_ideally(self, numbers: BlockNumbers, chains: Chains) -> Integers:
        """Most cached blocks of each prompt with near-optimal placement."""
        contents = [numbers.of(blocks) for blocks in self.ideal.values()]
        capacities = list(map(self._capacity_of, self.ideal))
        placement = place_ideally(contents, capacities, list(self.written.values()), chains)
        self.ideal = dict(zip(self.ideal, map(numbers.hashes, placement.contents), strict=True))
        self.written = dict(zip(self.written, placement.written, strict=True))
        return placement.best

    def _capacity_of(self, replica: str) -> int:
        """Capacity in sampled blocks; a replica outside the fleet has the median capacity."""
        capacities = self.capacities or {}
        return self.capacity_blocks(
            capacities[replica] if replica in capacities else sorted(capacities.values())[len(capacities) // 2]
        )


def _count(*blocks: Hashes) -> int:
    """Number of distinct blocks; an upper bound if that is within ``MAX_ENTRIES``."""
    upper_bound = sum(map(len, blocks))
    return upper_bound if upper_bound <= MAX_ENTRIES else len(distinct(*blocks))


def _horizons(at_s: Floats, since_s: float | None) -> tuple[Integers, float | None]:
    """(number of horizons begun before each request, start of the last horizon)."""
    begun = np.zeros(len(at_s), np.int64)
    if since_s is None:
        since_s = float(at_s[0]) if len(at_s) else None
    while since_s is not None and (late := int(np.searchsorted(at_s, since_s + HORIZON_S))) < len(at_s):
        begun[late:] += 1
        since_s = float(at_s[late])
    return begun, since_s


STATE_VERSION = 6  # bytes of another version are not read; the replay starts cold
SCALARS = ("ratio", "byte_blocks", "counted", "since_s", "written")


class StateError(ValueError):
    """Serialized state of another version."""


def dump(replay: Replay, bin_sums: BinSums) -> bytes:
    """Serialize the caches and the sums of the current bin; 8 bytes per block."""
    return msgspec.msgpack.encode(
        {
            "version": STATE_VERSION,
            "scalars": {name: getattr(replay, name) for name in SCALARS},
            "unbounded": [_packed(replay.previous), _packed(replay.recent)],
            "fleet_cache": _packed(replay.fleet_cache),
            "ideal": {name: _packed(blocks) for name, blocks in replay.ideal.items()},
            "placed": {name: _packed(blocks) for name, blocks in replay.placed.items()},
            "sums": {group: asdict(sums) for group, sums in bin_sums.sums.items()},
            "reason": bin_sums.reason,
            "divergences": {
                group: [_packed(at), tokens.tobytes()] for group, (at, tokens) in bin_sums.divergences.items()
            },
        }
    )


def load(state: bytes) -> tuple[Replay, BinSums]:
    """Deserialize; StateError for another version."""
    try:
        stored: dict[str, Any] = msgspec.msgpack.decode(state)
    except msgspec.DecodeError as error:
        raise StateError(str(error)) from None
    if stored.get("version") != STATE_VERSION:
        raise StateError(f"version {stored.get('version')}")
    replay, bin_sums = Replay(None), BinSums()
    for name in SCALARS:
        setattr(replay, name, stored["scalars"][name])
    replay.previous, replay.recent = map(_unpacked, stored["unbounded"])
    replay.fleet_cache = _unpacked(stored["fleet_cache"])
    replay.ideal = {name: _unpacked(blocks) for name, blocks in stored["ideal"].items()}
    replay.placed = {name: _unpacked(blocks) for name, blocks in stored["placed"].items()}
    bin_sums.sums = {group: Sums(**sums) for group, sums in stored["sums"].items()}
    bin_sums.reason = stored["reason"]
    bin_sums.divergences = {
        group: (_unpacked(at), np.frombuffer(tokens)) for group, (at, tokens) in stored["divergences"].items()
    }
    return replay, bin_sums


def _packed(blocks: Hashes) -> bytes:
    return blocks.tobytes()


def _unpacked(packed: bytes) -> Hashes:
    return np.frombuffer(packed, np.uint64)
