"""The model that a what-if replays: captured traffic, engines fitted to it, and scenarios.

A scenario is a document of ``routing.replay.job``: engines, and the pool's configuration that places the requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np
from django.db.models import Max

from controlplane.models import PolicyRevision
from controlplane.services.impact import current_fleet
from controlplane.services.policies.settings import settings_digest
from routing.schema import PoolConfig
from telemetry.lab.captured import CapturedTraffic, EngineFit, ReplayInput, fit_engine, replay_input
from telemetry.lab.chains import Integers
from telemetry.models import Decision, WhatIf
from telemetry.services.lab.replays import capacities_of
from telemetry.services.lab.what_ifs import Candidate, candidate_pool, with_revisions
from telemetry.storage.decisions import captured_between

MAX_REQUESTS = 200_000
LEAD_IN = timedelta(minutes=30)  # of requests before the window, which only warm the modelled caches
WARM_UP_RATIO = 1 / 3  # at least this part of all replayed time, and of that since a change of policy, warms them
MIN_OWN_FIT = 100  # streamed responses of a replica with its own prefill rate


class WhatIfError(Exception):
    """The what-if cannot be answered; the text says why."""


@dataclass(frozen=True, slots=True)
class WindowModel:
    """Captured traffic, prepared for replays."""

    pool: PoolConfig
    traffic: CapturedTraffic
    columns: ReplayInput
    counted: Integers  # rows that figures are computed from, in order of time
    counted_from: float  # unix
    cache_tokens: Mapping[str, int]  # by target
    fit: EngineFit  # of all engines
    own_rates: Mapping[str, float]  # prefill rate by target, where it has enough responses
    notes: tuple[str, ...]

    def rate_of(self, target: str) -> float:
        """Fitted prefill rate of a target, tokens/s; that of all engines for one without its own."""
        if self.fit.prefill_rate is None:
            raise AssertionError("checked by build_model")
        return self.own_rates.get(target, self.fit.prefill_rate)


def build_model(what_if: WhatIf) -> WindowModel:
    """The model of a what-if's window; WhatIfError says why there is none. About ten queries."""
    pool_row = what_if.pool
    traffic = captured_between(pool_row.name, what_if.start - LEAD_IN, what_if.end, at_most=MAX_REQUESTS)
    if len(traffic) < 2:
        raise WhatIfError("No requests were captured in this window.")
    pool = next(pool for pool in current_fleet().pools if pool.name == pool_row.name)
    if any(not replica.can_decode for replica in pool.replicas):
        raise WhatIfError("The pool has prefill replicas, and a replay does not model prompts that they prefill.")
    pool = with_revisions(pool, _revisions_of(what_if))
    capacities = capacities_of(pool_row, set(traffic.requests.replicas.names))
    if capacities.tokens is None:
        raise WhatIfError(capacities.reason)
    everything = np.arange(len(traffic))
    fit = fit_engine(traffic, everything)
    if fit.prefill_rate is None:
        raise WhatIfError(
            f"The prefill rate is unknown: {fit.requests} streamed responses with cached tokens were captured. Stream "
            "responses, and start vLLM with --enable-prompt-tokens-details."
        )
    counted_from, notes = _counted_from(traffic, what_if.start.timestamp())
    if not (traffic.requests.at_s >= counted_from).any():
        raise WhatIfError("No requests were captured in this window.")
    return WindowModel(
        pool,
        traffic,
        replay_input(traffic),
        np.flatnonzero(traffic.requests.at_s >= counted_from),
        counted_from,
        capacities.tokens,
        fit,
        _own_rates(traffic),
        tuple(notes + _notes(traffic, pool)),
    )


def _revisions_of(what_if: WhatIf) -> dict[str, dict[str, Any]]:
    """Settings of the last revision of each policy that placed requests of the window, by the policy's name."""
    placed = Decision.objects.filter(pool=what_if.pool.name, at__gte=what_if.start, at__lt=what_if.end)
    newest = dict(
        placed.exclude(arm="canary").values("policy").annotate(newest=Max("revision")).values_list("policy", "newest")
    )
    revisions = PolicyRevision.objects.filter(policy__pool=what_if.pool, policy__name__in=newest).select_related(
        "policy"
    )
    return {row.policy.name: row.settings for row in revisions if row.number == newest[row.policy.name]}


def policy_digests(pool: PoolConfig) -> dict[str, str]:
    """Digests of the settings of a pool's policy and of those of its task groups, by the policy's name."""
    policies = (pool.policy, *(group.policy for group in pool.groups if group.policy is not None))
    return {policy.name: settings_digest(msgspec.to_builtins(policy.settings)) for policy in policies}


def _own_rates(traffic: CapturedTraffic) -> dict[str, float]:
    rates = {}
    for name in traffic.requests.replicas.names:
        fit = fit_engine(traffic, traffic.requests.replicas.rows(name))
        if fit.prefill_rate is not None and fit.requests >= MIN_OWN_FIT:
            rates[name] = fit.prefill_rate
    return rates


def _counted_from(traffic: CapturedTraffic, start_s: float) -> tuple[float, list[str]]:
    """(time from which requests count, notes): in the window, and after the warm-up under the newest revisions."""
    at_s, revisions, groups = traffic.requests.at_s, traffic.revisions, traffic.requests.groups
    counted_from = max(start_s, _after_warm_up(float(at_s[0]), float(at_s[-1])))
    latest = np.zeros(len(groups.names), np.int64)
    latest[groups.codes] = revisions  # the last assignment of each group remains
    earlier = np.flatnonzero(revisions != latest[groups.codes])
    if not len(earlier):
        return counted_from, []
    changed_s = float(at_s[earlier[-1]])
    at = datetime.fromtimestamp(changed_s, UTC)
    note = f"The policy changed at {at:%H:%M:%S} UTC; earlier requests only warm the modelled caches."
    warm_s = _after_warm_up(changed_s, float(at_s[-1]))
    return (warm_s, [note]) if warm_s > counted_from else (counted_from, [])


def _after_warm_up(start_s: float, end_s: float) -> float:
    return start_s + WARM_UP_RATIO * (end_s - start_s)


def _notes(traffic: CapturedTraffic, pool: PoolConfig) -> list[str]:
    notes = []
    ratio = float(traffic.requests.sample_ratios.min())
    if ratio < 1:
        notes.append(f"1 of {1 / ratio:.0f} block hashes was captured; the interval contains the error of that.")
    if not traffic.sessions.any():
        notes.append(
            "No request has a session key. A conversation is identified by the first 1,024 tokens of its prompt, so "
            "predictions for tiered and affinity_groups are unreliable where prompts share more, and session_affinity "
            "balances load."
        )
    if len(traffic) == MAX_REQUESTS:
        notes.append(f"Only the newest {MAX_REQUESTS} requests of the window were replayed.")
    if pool.policy.canary is not None or any(group.policy and group.policy.canary for group in pool.groups):
        notes.append("A canary placed part of these requests.")
    return notes


def _engines(model: WindowModel, targets: Sequence[str], cache_tokens: int | None) -> list[dict[str, Any]]:
    mean = sum(model.cache_tokens.values()) // len(model.cache_tokens)
    return [
        {
            "target": target,
            "blocks": max(
                1,
                (cache_tokens or model.cache_tokens.get(target, mean)) // model.columns.block_tokens,
            ),
            "prefill_rate": model.rate_of(target),
            "step_s": model.fit.step_s,
            "decode_s": model.fit.decode_s,
        }
        for target in targets
    ]


def candidate_scenario(model: WindowModel, candidate: Candidate) -> dict[str, Any]:
    """The pool's configuration under a candidate, on engines with the fitted parameters."""
    pool = candidate_pool(model.pool, candidate)
    targets = [
        replica.name if replica.data_parallel_size == 1 else f"{replica.name}#{rank}"
        for replica in pool.replicas
        for rank in range(replica.data_parallel_size)
    ]
    if not targets:
        raise WhatIfError("The pool has no active replica.")
    block_tokens = model.columns.block_tokens
    engines = _engines(model, targets, candidate.cache_tokens)
    blocks = dict(zip(targets, (engine["blocks"] for engine in engines), strict=True))
    replicas = [
        msgspec.structs.replace(
            replica,
            block_tokens=block_tokens,
            capacity_blocks=blocks[replica.name if replica.data_parallel_size == 1 else f"{replica.name}#0"],
        )
        for replica in pool.replicas
    ]
    return {
        "name": candidate.name,
        "engines": engines,
        "pool": msgspec.structs.replace(pool, replicas=tuple(replicas)),
        "routers": len(model.traffic.routers.names),
    }
