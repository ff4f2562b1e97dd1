"""Decisions of routers, and what their replay computes: the hit-rate breakdown, capacity curves and what-ifs.

Theory of operation. Decisions are queried by ranges of ``at``, so the primary key begins with it, as that of readings
does; a router's sequence number within one boot prevents duplicates. Prompts are stored as block hashes, never as text,
and of a prompt's blocks only those whose hash lies below ``sample_ratio`` of the range of hashes. Whether a block is
sampled depends on its hash alone, so the same block is stored, or missing, wherever it occurs. ``positions`` says which
blocks of the prompt they are. PostgreSQL's integers are signed: a hash is stored as the signed integer of the same
bits.

``request_digest`` identifies what an exact response cache would look up. It is None for requests that such a cache
could not answer, and for prompts outside the part ``digest_ratio``, 2 ** -n, of all prompts. Whether a prompt is in
that part depends on the prompt alone, so a repeated request has a digest each time, or never. The last 6 bits of a
digest are the highest n at which it is computed.

A what-if's row is a queue entry and its result. A worker claims a queued row by a conditional update, and writes
``heartbeat_at`` while it works. A running row without a recent heartbeat belongs to a worker that was killed: the next
worker claims it again and starts over, which changes nothing but time.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import CheckConstraint, Index, Q

from controlplane.models import Pool, Router


class Decision(models.Model):
    """One request that a router placed, recorded when it ended. None is unknown."""

    pk = models.CompositePrimaryKey("at", "router_id", "boot", "seq")
    at = models.DateTimeField()  # when it was placed, by the router's clock
    router = models.ForeignKey(Router, models.DO_NOTHING, db_constraint=False, db_index=False, related_name="+")
    boot = models.TextField()  # of the router
    seq = models.BigIntegerField()  # within that boot, in the order in which requests ended
    pool = models.TextField()  # names, as the router's configuration had them
    group = models.TextField()  # "": of no task group
    matched_by = models.TextField()
    policy = models.TextField()
    revision = models.IntegerField()
    arm = models.TextField()  # "active" or "canary"; "": the policy had no canary
    strategy = models.TextField()
    replica = models.TextField()
    rank = models.SmallIntegerField(null=True)  # data-parallel; None: the replica has only one
    reason = models.TextField()
    status = models.SmallIntegerField(null=True)  # of the response; None: there was none
    outcome = models.TextField(
        default="", db_default=""
    )  # "ok", "replica_error" ..., as routers count requests; "": unknown
    streamed = models.BooleanField(null=True)  # None: there was no response
    ttft_s = models.FloatField(null=True)  # router's clock, of a streamed response
    prefill_s = models.FloatField(null=True)  # of TTFT, from sending the request to the replica that responded
    latency_s = models.FloatField(null=True)  # until the response's last byte; None: it was incomplete
    prompt_tokens_estimate = models.BigIntegerField()
    prompt_tokens = models.BigIntegerField(null=True)  # as the engine counted them
    cached_tokens = models.BigIntegerField(null=True)  # of those, as the engine reported
    generated_tokens = models.BigIntegerField(null=True)  # as the engine reported
    hit_tokens = models.BigIntegerField(null=True)  # the router's prediction
    block_tokens = models.IntegerField(null=True)  # of the engine's KV blocks
    hash_tokens = models.IntegerField()  # estimated tokens per block in ``blocks``
    prefix = models.BigIntegerField(null=True)  # tier-1 hash
    session = models.BigIntegerField(null=True)  # hash of the session key; None: the request has none
    blocks = ArrayField(models.BigIntegerField())  # chained hashes, in the order of the prompt
    positions = ArrayField(models.SmallIntegerField(), null=True)  # of each block, from 0; None: all blocks are stored
    block_count = models.IntegerField()  # of the whole prompt
    sample_ratio = models.FloatField()  # part of the blocks that is stored, 0 to 1
    request_id = models.TextField()
    retries = models.SmallIntegerField()
    continued_after = models.JSONField(null=True)  # replicas that failed during the stream, and tokens until then
    request_digest = models.BigIntegerField(null=True)  # of its entry in an exact response cache; see digest_ratio
    digest_ratio = models.FloatField(null=True)  # part of the prompts with digests; None: this router computes none
    candidates = models.JSONField(null=True)  # loads, hits and costs; stored for some requests
    prompt_structure = models.JSONField(null=True)  # hashes of its segments; stored for few requests

    def __str__(self) -> str:
        return f"{self.request_id} to {self.replica} at {self.at:%F %T}"


class DecisionCursor(models.Model):
    """How far a router's decisions have been collected. Stored, so that a worker may restart at any time."""

    router = models.OneToOneField(Router, models.CASCADE, related_name="decision_cursor")
    boot = models.TextField(blank=True)
    seq = models.BigIntegerField(default=0)  # the last one stored, or dropped, of that boot
    at = models.DateTimeField(null=True)  # of the last successful run
    collected = models.BigIntegerField(default=0)  # since the router was added
    dropped = models.BigIntegerField(
        default=0
    )  # since then: overwritten in the router before they were collected, or invalid
    reason = models.CharField(max_length=200, blank=True)  # why the last run failed; "" if it did not
    sample_ratio = models.FloatField(default=0.0625)  # part of the blocks that the next run requests
    blocks_per_s = models.FloatField(default=0.0)  # of the router's prompts, sampled or not; a fading peak

    class Meta:
        constraints = (
            CheckConstraint(condition=Q(sample_ratio__gt=0, sample_ratio__lte=1), name="decision_cursor_ratio_range"),
        )

    def __str__(self) -> str:
        return f"{self.boot}/{self.seq}"


def _tokens_field() -> models.FloatField[float, float]:
    return models.FloatField(default=0.0)


class BreakdownBin(models.Model):
    """Five minutes of one task group, as sums that can be added over bins and groups. Terms:
    ``telemetry.lab.breakdown``.

    A recent bin is recomputed until all its decisions are expected to be collected, and once more if many come later.
    """

    pk = models.CompositePrimaryKey("at", "pool_id", "group")
    at = models.DateTimeField()  # its start
    pool = models.ForeignKey(Pool, models.CASCADE, db_index=False, related_name="+")
    group = models.TextField()  # "": requests of no task group
    requests = models.IntegerField(default=0)
    prompt_tokens = _tokens_field()
    reachable = _tokens_field()
    capacity = _tokens_field()
    split = _tokens_field()
    best = _tokens_field()
    predicted = _tokens_field()
    sampling_error = _tokens_field()
    reported_requests = models.IntegerField(default=0)
    reported_tokens = _tokens_field()
    delivered = _tokens_field()
    # Sums over requests, for the variance of ``reachable``.
    prompt_squares = models.FloatField(default=0.0, db_default=0.0)
    reachable_squares = models.FloatField(default=0.0, db_default=0.0)
    reachable_products = models.FloatField(default=0.0, db_default=0.0)
    sample_ratio = models.FloatField()  # part of the blocks that was replayed
    reason = models.CharField(max_length=200, blank=True)  # why figures that need the caches' sizes are unknown

    def __str__(self) -> str:
        return f"{self.pool_id}/{self.group} at {self.at:%F %T}"


class ReplayState(models.Model):
    """A checkpoint of a pool's replay: at the start of a bin, or after the newest complete minute."""

    pool = models.ForeignKey(Pool, models.CASCADE, related_name="replay_states")
    at = models.DateTimeField()  # decisions before it are replayed
    decisions = models.IntegerField(null=True)  # in complete minutes of the bin; None: there is no such minute or bin
    state = models.BinaryField(editable=False)  # see telemetry.lab.replay

    class Meta:
        ordering = ("at",)
        constraints = (models.UniqueConstraint(fields=["pool", "at"], name="replay_state_unique"),)

    def __str__(self) -> str:
        return f"{self.pool_id} at {self.at:%F %T}"


class CapacityCurve(models.Model):
    """Hit rate by cache size, replayed from a pool's latest decisions: the effect of more memory, or a shared tier."""

    pool = models.OneToOneField(Pool, models.CASCADE, related_name="capacity_curve")
    at = models.DateTimeField()
    since = models.DateTimeField(null=True)  # of the first request counted
    requests = models.IntegerField(default=0)
    sample_ratio = models.FloatField(default=1.0)
    cache_tokens = models.BigIntegerField(null=True)  # cache size of a replica, on average, at the multiple 1
    replicas = models.IntegerField(default=0)
    points = models.JSONField(default=list)  # [{"multiple", "one", "split", "shared"}], ascending
    placements = models.JSONField(null=True)  # a telemetry.lab.cache_grid.Placements; None: not enough requests
    working_set = models.JSONField(null=True)  # a telemetry.lab.cache_grid.WorkingSet; None: not enough reuse
    reason = models.CharField(max_length=200, blank=True)  # why there are no points
    prefill_rate = models.FloatField(null=True)  # tokens/s of a replica, learnt slowly from fits; None: unknown
    prefill_deviation = models.FloatField(default=0.0, db_default=0.0)  # of the logarithm of one fit
    prefill_fits = models.IntegerField(default=0, db_default=0)  # number of fits
    fitted_requests = models.IntegerField(default=0, db_default=0)  # number of requests in the latest fit
    gaps = models.JSONField(null=True)  # telemetry.lab.shared_cache.Gaps; None: not computed

    def __str__(self) -> str:
        return f"{self.pool_id} at {self.at:%F %T}"


class WhatIfState(models.TextChoices):
    """The life cycle of a what-if."""

    QUEUED = "queued", "Queued"
    RUNNING = "running", "Running"
    DONE = "done", "Done"
    FAILED = "failed", "Failed"
    CANCELLED = "cancelled", "Cancelled"


class WhatIf(models.Model):
    """A question about a pool's traffic, and its answer. Documents: ``telemetry.services.lab.what_ifs``."""

    pool = models.ForeignKey(Pool, models.CASCADE, related_name="what_ifs")
    start = models.DateTimeField()  # of the captured traffic
    end = models.DateTimeField()
    candidates = models.JSONField()  # as requested
    state = models.CharField(max_length=9, choices=WhatIfState, default=WhatIfState.QUEUED)
    progress_ratio = models.FloatField(default=0.0)  # 0 to 1
    is_cancelled = models.BooleanField(default=False)  # requested; the worker stops soon
    attempts = models.PositiveSmallIntegerField(default=0)  # by workers
    result = models.JSONField(null=True)
    reason = models.CharField(max_length=500, blank=True)  # why it failed
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    heartbeat_at = models.DateTimeField(null=True)  # of the worker that runs it
    ended_at = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-created_at", "-pk")
        indexes = (Index(fields=["state"], condition=Q(state__in=("queued", "running")), name="what_if_open"),)
        constraints = (
            CheckConstraint(condition=Q(state__in=WhatIfState.values), name="what_if_state_known"),
            CheckConstraint(condition=Q(end__gt=models.F("start")), name="what_if_window_positive"),
        )

    def __str__(self) -> str:
        return f"what-if {self.pk} of pool {self.pool_id}"

    @property
    def is_open(self) -> bool:
        """Whether it is queued or running."""
        return self.state in {WhatIfState.QUEUED, WhatIfState.RUNNING}

    @property
    def replays(self) -> list[dict[str, Any]]:
        """The replayed candidates, the active policy first; [] before the end."""
        return [] if self.result is None else self.result["candidates"]
