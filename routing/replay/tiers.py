"""Cache tiers below the GPU cache of a modelled replica: CPU memory, and a remote store that replicas share.

Theory of operation. A block that the GPU cache evicts moves to the first tier (demotion). The least recently used block
of a full tier moves to the next tier, and the last tier drops it. When a request is admitted, the leading blocks of its
prompt that the GPU cache lacks are looked up in the tiers, each in the first tier that has it. Consecutive blocks of
one tier are fetched by one transfer. The transfers between a replica and a tier follow one another, so a transfer ends
at ``max(now + latency, end of the previous transfer) + bytes / bandwidth``. Blocks are fetched only if that is sooner
than their prefill at the full rate; the first transfer that is not ends the fetch, and the rest is computed. A fetched
block stays in its tier as the most recently used one. Writing to a tier takes no time.

vLLM's offloading connector also fetches leading blocks before the prefill of the rest, and delays requests that need
blocks which another request is fetching. It differs in two points: it copies a block to the CPU when the block is
computed instead of when it is evicted, and it fetches whatever it finds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

KV_BYTES_PER_TOKEN = 327_680  # a model of 70B parameters: 2 * 80 layers * 8 KV heads * 128 * 2 bytes
GPU = "gpu"  # name of the GPU cache among the tiers


@dataclass(frozen=True)
class TierConfig:
    """One tier."""

    name: str
    blocks: int  # capacity, >= 1
    latency_s: float  # of each fetch
    bytes_per_s: float  # between the tier and one replica
    shared: bool = False  # one cache for all replicas, otherwise one for each


class TierCache:
    """The blocks in one tier, by key, in order of use."""

    def __init__(self, config: TierConfig) -> None:
        self.config = config
        self._keys: OrderedDict[object, None] = OrderedDict()  # least recently used first

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def insert(self, keys: Iterable[object]) -> list[object]:
        """Make these the most recently used blocks, the last one most; returns the blocks evicted for them."""
        stored = self._keys
        for key in keys:
            stored[key] = None
            stored.move_to_end(key)
        return [stored.popitem(last=False)[0] for _ in range(len(stored) - self.config.blocks)]


@dataclass(frozen=True)
class Fetch:
    """Leading blocks of a prompt that are fetched."""

    blocks: dict[str, int]  # by tier
    ready_s: float  # end of the last transfer


class LowerTiers:
    """The tiers below one replica's GPU cache, and the replica's links to them."""

    def __init__(self, caches: Sequence[TierCache], block_bytes: int, block_prefill_s: float) -> None:
        self._caches = caches
        self._block_bytes = block_bytes
        self._block_prefill_s = block_prefill_s
        self._link_free_s = [0.0] * len(caches)  # end of the last transfer from each tier

    def fetch(self, keys: Sequence[object], now_s: float) -> Fetch:
        """Start to fetch leading blocks of ``keys``, as far as the tiers have them and are faster than prefill."""
        fetched: dict[str, int] = {}
        ready_s, start = now_s, 0
        found = takewhile(lambda number: number is not None, map(self._first_tier_with, keys))
        for number, group in groupby(found):
            if number is None:  # never: for the type checker
                break
            count, tier = sum(1 for _ in group), self._caches[number]
            starts_s = max(now_s + tier.config.latency_s, self._link_free_s[number])
            ends_s = starts_s + count * self._block_bytes / tier.config.bytes_per_s
            if ends_s - now_s >= count * self._block_prefill_s:
                break
            self._link_free_s[number] = ends_s
            tier.insert(keys[position] for position in reversed(range(start, start + count)))
            fetched[tier.config.name] = fetched.get(tier.config.name, 0) + count
            ready_s, start = max(ready_s, ends_s), start + count
        return Fetch(fetched, ready_s)

    def demote(self, keys: Sequence[object]) -> None:
        """Store blocks that the GPU cache has evicted, in the order of their eviction."""
        for cache in self._caches:
            if not keys:
                return
            keys = cache.insert(keys)

    def _first_tier_with(self, key: object) -> int | None:
        return next((number for number, cache in enumerate(self._caches) if key in cache), None)
