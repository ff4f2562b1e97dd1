"""Disaggregated prefill: whether another replica prefills a prompt first, and which one.

A pool may have replicas with the role ``prefill``, which get no client requests. A request is placed as in any pool,
among the replicas that can decode. If the chosen replica has not cached enough of the prompt, a replica with the role
``prefill`` computes the prompt first, and the chosen replica fetches the KV blocks from there. The prefill replica is
chosen by ``lowest_cost``, whatever the pool's policy: by queued tokens, and by the prefix that it has cached.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from routing.balancing.candidates import Candidates, Choice
from routing.balancing.replicas import GroupReplicas, HealthRegistry, Target
from routing.balancing.strategies.cached_prefix import match_prompt
from routing.balancing.strategies.registry import build_strategy
from routing.balancing.strategies.strategy import Keys
from routing.schema import Disaggregation, LowestCostSettings, PoolConfig
from routing.types import ReplicaId


class SkipCause(StrEnum):
    """Why no other replica prefills a prompt first."""

    ENDPOINT = "endpoint"  # only chat and completions transfer KV blocks
    SHORT = "short"  # fewer uncached tokens than the pool's minimum
    PARAMETERS = "parameters"  # several outputs or prompts, or results about the prompt's own tokens
    NO_REPLICA = "no_replica"  # no replica with the role ``prefill`` is available


class PrefillTarget(NamedTuple):
    """Where a prompt is prefilled, and why there."""

    target: Target
    choice: Choice

    @property
    def replica(self) -> ReplicaId:
        """The replica's name."""
        return ReplicaId(self.target.replica.name)


class PrefillRoute:
    """The replicas that prefill prompts of a pool or task group for others."""

    def __init__(self, pool: PoolConfig, replicas: GroupReplicas, seed: int) -> None:
        self.min_uncached_tokens = (pool.disaggregation or Disaggregation()).min_uncached_tokens
        self.replicas = replicas
        self._strategy = build_strategy(LowestCostSettings(), replicas, seed)

    def uncached_tokens(self, choice: Choice, candidates: Candidates, keys: Keys) -> int:
        """Estimated tokens of a prompt that the chosen decode replica would have to prefill."""
        cached_tokens = choice.hit_tokens
        if cached_tokens is None:  # the strategy makes no prediction
            match = match_prompt(self.replicas.residency, keys)
            cached_tokens = match.tokens(candidates.bits[choice.target], keys.prompt_tokens)
        return max(0, keys.prompt_tokens - cached_tokens - choice.unrecorded_hit_tokens)

    def choose(
        self, keys: Keys, adapter: str, health: HealthRegistry, excluded: Collection[ReplicaId] = ()
    ) -> PrefillTarget | None:
        """The replica that prefills a prompt; None if none is available."""
        candidates = self.replicas.candidates(health, adapter)
        if excluded:
            failed = [name for replica in excluded for name in self.replicas.targets_of_replica(replica)]
            candidates = candidates.without(failed)
        if not candidates.loads:
            return None
        choice = self._strategy.choose(keys, candidates)
        return PrefillTarget(self.replicas.targets[choice.target], choice)
