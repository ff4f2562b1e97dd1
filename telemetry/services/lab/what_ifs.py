"""What-ifs of a pool: creating, cancelling and listing them, and the documents of their candidates.

A candidate is ``{"name", "settings", "groups", "replicas", "cache_tokens"}``; everything but ``name`` is optional.
``settings`` are a policy's (null: the active policy), ``groups`` are settings by task group (null: the pool's policy),
``replicas`` is a number of replicas, and ``cache_tokens`` the cache size of each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import msgspec
import numpy as np
from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from controlplane.celery import wake
from controlplane.errors import ConflictError, GoneError, InvalidError
from controlplane.models import PolicyRevision, Pool, Rollout, RoutingPolicy
from controlplane.services.policies.lifecycle import save_draft
from controlplane.services.policies.settings import are_equal_settings
from routing.schema import (
    PolicyConfig,
    PoolConfig,
    ReplicaConfig,
    ReplicaState,
    Settings,
    TaskGroupConfig,
    explain_reason,
)
from telemetry.lab.captured import replay_input
from telemetry.models import WhatIf, WhatIfState
from telemetry.storage.decisions import captured_between

DEFAULT_WINDOW = timedelta(minutes=30)
MAX_WINDOW = timedelta(hours=24)
MIN_WINDOW = timedelta(minutes=1)
MAX_CANDIDATES = 8
MAX_REPLICAS = 200
MAX_CACHE_TOKENS = 10**9
MAX_OPEN = 10  # queued or running, of one pool
KEPT = 200  # of each pool; older ones are deleted
SETTLE = timedelta(seconds=10)  # decisions are collected this late


@dataclass(frozen=True, slots=True)
class Candidate:
    """One validated candidate."""

    name: str
    settings: Settings | None = None
    groups: Mapping[str, Settings | None] | None = None
    replicas: int | None = None
    cache_tokens: int | None = None


def create_what_if(
    pool: Pool,
    candidates: Sequence[Mapping[str, Any]],
    *,
    start: datetime | None = None,
    end: datetime | None = None,
    by: User | None = None,
) -> WhatIf:
    """Queue a what-if. InvalidError names the field; ConflictError if the pool has ``MAX_OPEN`` open ones.

    The default window is the last 30 minutes.
    """
    latest = timezone.now() - SETTLE
    end = min(end or latest, latest)
    start = start or end - DEFAULT_WINDOW
    if not MIN_WINDOW <= end - start <= MAX_WINDOW:
        raise InvalidError("$.start", "expected a window of 1 minute to 24 hours in the past")
    read_candidates(candidates)
    with transaction.atomic():
        Pool.objects.select_for_update().get(pk=pool.pk)
        open_rows = WhatIf.objects.filter(pool=pool, state__in=(WhatIfState.QUEUED, WhatIfState.RUNNING))
        if open_rows.count() >= MAX_OPEN:
            raise ConflictError(f"{MAX_OPEN} what-ifs of this pool are queued or running; cancel one or wait.")
        created = WhatIf.objects.create(pool=pool, start=start, end=end, candidates=list(candidates), created_by=by)
        kept = WhatIf.objects.filter(pool=pool).values("pk")[:KEPT]
        WhatIf.objects.filter(pool=pool).exclude(pk__in=list(kept.values_list("pk", flat=True))).delete()
    wake("telemetry.tasks.run_what_ifs")
    return created


def candidate_of_draft(draft: PolicyRevision) -> dict[str, Any]:
    """The candidate that a policy's draft is: settings of its pool or of its task group."""
    name, group = f"draft, revision {draft.number}", draft.policy.group
    return (
        {"name": name, "settings": draft.settings}
        if group is None
        else {
            "name": name,
            "groups": {group.name: draft.settings},
        }
    )


def what_ifs_of_settings(revision: PolicyRevision) -> Iterator[tuple[WhatIf, int]]:
    """The what-ifs that contain exactly these settings as a candidate, and its position; newest first, not cancelled.

    One query; ``result`` is read with another one. The candidate's name does not matter, and defaults may be omitted.
    """
    rows = WhatIf.objects.filter(pool=revision.policy.pool).exclude(state=WhatIfState.CANCELLED).defer("result")
    for what_if in rows.select_related("pool"):
        for number, candidate in enumerate(what_if.candidates):
            if _is_candidate_of(candidate, revision):
                yield what_if, number
                break


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a what-if predicted of a revision when it was published."""

    what_if: WhatIf | None  # None: no what-if of its settings had ended
    figures: Mapping[str, Any] = field(default_factory=dict)  # telemetry.lab.predictions.Figures; {}: unknown
    note: str = ""  # why the figures are unknown, or uncertain


def prediction_of(rollout: Rollout) -> Prediction:
    """What the newest what-if of its revision's settings that had ended predicted. At most two queries."""
    for what_if, number in what_ifs_of_settings(rollout.revision):
        if what_if.ended_at is None or what_if.ended_at > rollout.started_at:
            continue
        if what_if.result is None:
            return Prediction(what_if, note=f"Not predicted: the what-if failed. {what_if.reason}")
        candidate, calibration = what_if.replays[number + 1], what_if.result["calibration"]
        if candidate["figures"] is None:
            return Prediction(what_if, note=f"Not predicted: it could not be replayed. {candidate['reason']}")
        note = "" if calibration["is_calibrated"] else "The prediction was not calibrated, so it has no verdict."
        return Prediction(what_if, candidate["figures"], note)
    return Prediction(None, note="Not predicted: no stored what-if of these settings had ended when it was published.")


def _is_candidate_of(candidate: Mapping[str, Any], revision: PolicyRevision) -> bool:
    changes = {name: value for name, value in candidate.items() if name != "name" and value is not None}
    wanted = candidate_of_draft(revision)
    if changes.keys() != wanted.keys() - {"name"}:
        return False
    group = revision.policy.group
    if group is None:
        return are_equal_settings(changes["settings"], revision.settings)
    groups: Mapping[str, Any] = changes["groups"]
    return groups.keys() == {group.name} and are_equal_settings(groups[group.name], revision.settings)


def draft_target(what_if: WhatIf, number: int) -> tuple[str | None, dict[str, Any]] | None:
    """(task group or None for the pool, settings) that a candidate would have as a draft; None if it is no policy's."""
    if number >= len(what_if.candidates):
        return None
    candidate = what_if.candidates[number]
    changes = {name: value for name, value in candidate.items() if name != "name" and value is not None}
    if changes.keys() == {"settings"}:
        return None, changes["settings"]
    groups = changes.get("groups") if changes.keys() == {"groups"} else None
    (group, settings), *others = groups.items() if groups else [(None, None)]
    return (group, settings) if settings and not others else None


def make_draft(what_if: WhatIf, number: int, *, seen: str, by: User) -> PolicyRevision:
    """Make the settings of a candidate the draft of its policy; InvalidError if it is no policy's.

    Another draft than that of the digest ``seen`` is not replaced: ConflictError.
    """
    target = draft_target(what_if, number)
    if target is None:
        raise InvalidError("$.candidate", "expected a candidate with the settings of one policy")
    group, settings = target
    policy = RoutingPolicy.objects.select_related("pool").filter(pool=what_if.pool, group__name=group).first()
    if policy is None:
        raise GoneError("policy")
    if (draft := policy.draft()) is not None and draft.digest != seen:
        raise ConflictError(
            f"The draft of policy {policy.name} was changed after you loaded this page: look at it first."
        )
    reason = what_if.replays[number + 1]["summary"] if what_if.replays else ""
    return save_draft(policy, settings, by=by, reason=f"What-if {what_if.pk}: {reason}"[:500] if reason else "")


def cancel_what_if(what_if_id: int) -> WhatIf:
    """Cancel a what-if; a running one stops within a second. ConflictError if it has ended."""
    with transaction.atomic():
        what_if = WhatIf.objects.select_for_update().get(pk=what_if_id)
        if not what_if.is_open:
            raise ConflictError(f"This what-if has ended: {what_if.get_state_display().lower()}.")
        what_if.is_cancelled = True
        if what_if.state == WhatIfState.QUEUED:
            what_if.state, what_if.ended_at = WhatIfState.CANCELLED, timezone.now()
        what_if.save(update_fields=["is_cancelled", "state", "ended_at"])
    return what_if


def read_candidates(documents: Sequence[Mapping[str, Any]]) -> list[Candidate]:
    """Validated candidates; InvalidError names the field."""
    if not isinstance(documents, list | tuple) or not 1 <= len(documents) <= MAX_CANDIDATES:
        raise InvalidError("$.candidates", f"expected a list of 1 to {MAX_CANDIDATES} candidates")
    candidates = [_read_candidate(document, f"$.candidates[{number}]") for number, document in enumerate(documents)]
    names = [candidate.name for candidate in candidates]
    if len(set(names)) < len(names):
        raise InvalidError("$.candidates", "expected a different name for each candidate")
    return candidates


def _read_candidate(document: Any, path: str) -> Candidate:
    if not isinstance(document, dict):
        raise InvalidError(path, "expected an object")
    unknown = document.keys() - {"name", "settings", "groups", "replicas", "cache_tokens"}
    if unknown:
        raise InvalidError(f"{path}.{min(unknown)}", "unknown field")
    name = document.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= 100:
        raise InvalidError(f"{path}.name", "expected a text of 1 to 100 characters")
    groups = document.get("groups")
    if groups is not None and not isinstance(groups, dict):
        raise InvalidError(f"{path}.groups", "expected an object with settings by task group")
    return Candidate(
        name,
        _read_settings(document.get("settings"), f"{path}.settings"),
        groups and {group: _read_settings(value, f"{path}.groups.{group}") for group, value in groups.items()},
        _read_number(document, "replicas", path, MAX_REPLICAS),
        _read_number(document, "cache_tokens", path, MAX_CACHE_TOKENS),
    )


def _read_settings(document: Any, path: str) -> Settings | None:
    if document is None:
        return None
    try:
        settings: Settings = msgspec.convert(document, Settings)
    except msgspec.ValidationError as error:
        raise InvalidError(path, explain_reason(str(error))) from None
    return settings


def _read_number(document: Mapping[str, Any], field: str, path: str, highest: int) -> int | None:
    value = document.get(field)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest):
        raise InvalidError(f"{path}.{field}", f"expected a whole number from 1 to {highest}")
    return value


def with_revisions(pool: PoolConfig, settings: Mapping[str, Any]) -> PoolConfig:
    """The pool's configuration with the settings of earlier revisions, by the name of the policy."""

    def earlier(policy: PolicyConfig) -> PolicyConfig:
        if policy.name not in settings:
            return policy
        return msgspec.structs.replace(policy, settings=msgspec.convert(settings[policy.name], Settings))

    groups = (
        msgspec.structs.replace(group, policy=earlier(group.policy)) if group.policy else group for group in pool.groups
    )
    return msgspec.structs.replace(pool, policy=earlier(pool.policy), groups=tuple(groups))


def candidate_pool(pool: PoolConfig, candidate: Candidate) -> PoolConfig:
    """The pool's configuration under a candidate, without canaries and secrets; InvalidError for an unknown group."""
    groups = candidate.groups or {}
    unknown = groups.keys() - {group.name for group in pool.groups}
    if unknown:
        raise InvalidError("$.groups", f"pool {pool.name} has no task group {min(unknown)}")
    replicas = _replicas(pool, candidate.replicas)
    names = {replica.name for replica in replicas}
    return msgspec.structs.replace(
        pool,
        policy=_policy(pool.policy, candidate.settings),
        replicas=replicas,
        groups=tuple(_group(group, groups, names) for group in pool.groups),
    )


def _policy(policy: PolicyConfig, settings: Settings | None) -> PolicyConfig:
    return msgspec.structs.replace(policy, settings=settings or policy.settings, canary=None)


def _group(group: TaskGroupConfig, settings: Mapping[str, Settings | None], replicas: set[str]) -> TaskGroupConfig:
    policy = group.policy and _policy(group.policy, None)
    if group.name in settings:
        own = settings[group.name]
        policy = None if own is None else PolicyConfig(group.name, 1, own)
    remaining = tuple(name for name in group.replicas or () if name in replicas)
    return msgspec.structs.replace(group, policy=policy, replicas=remaining or None)


def _replicas(pool: PoolConfig, count: int | None) -> tuple[ReplicaConfig, ...]:
    """The active replicas, cut to a number or extended by copies of them."""
    active = [
        msgspec.structs.replace(replica, api_key=None)
        for replica in pool.replicas
        if replica.state is ReplicaState.ACTIVE
    ]
    if count is None or not active:
        return tuple(active)
    added = [
        msgspec.structs.replace(active[number % len(active)], name=f"added-{number + 1}")
        for number in range(max(0, count - len(active)))
    ]
    return tuple((active + added)[:count])


TRACE_BLOCK_TOKENS = 512  # of Mooncake's format
MAX_TRACE_REQUESTS = 50_000


def trace_lines(pool: Pool, start: datetime, end: datetime) -> Iterator[bytes]:
    """One line for each of the newest ``MAX_TRACE_REQUESTS`` requests; block ids count from 0."""
    traffic = captured_between(pool.name, start, end, at_most=MAX_TRACE_REQUESTS)
    if not len(traffic):
        return
    columns = replay_input(traffic)
    numbers: dict[int, int] = {}
    first_s = float(traffic.requests.at_s[0])
    rows = zip(
        traffic.requests.at_s.tolist(),
        columns.prompt_tokens.tolist(),
        columns.output_tokens.tolist(),
        columns.starts.tolist(),
        columns.starts[1:].tolist(),
        strict=False,
    )
    for at_s, prompt_tokens, output_tokens, begin, stop in rows:
        ends = np.arange(1, -(-prompt_tokens // TRACE_BLOCK_TOKENS) + 1) * TRACE_BLOCK_TOKENS
        last_ids = np.minimum(begin + -(-ends // columns.block_tokens) - 1, stop - 1)
        ids = [numbers.setdefault(int(block), len(numbers)) for block in columns.ids[last_ids]]
        line = {
            "timestamp": round(1000 * (at_s - first_s)),
            "input_length": prompt_tokens,
            "output_length": output_tokens,
            "hash_ids": ids,
        }
        yield json.dumps(line).encode() + b"\n"
