"""Decisions: where routers sent each request, why, and what came of it. Hashes, never text.

Theory of operation. Rows are asked for by ranges of ``at``, so the primary key begins with it, as that of readings
does; a router's number within one of its lives keeps duplicates out. Of a prompt's blocks only those are there whose
hash lies below ``sample_ratio`` of the range of hashes, which ones that are being a property of the block: the same
block is there, or missing, wherever it comes back. ``positions`` says which blocks of the prompt they are.

PostgreSQL's integers have a sign: a hash is stored as the signed integer of the same 64 bits.

The hit-rate ladder of a pool's task groups, bin by bin, and what its replay needs to go on.
"""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import CheckConstraint, Q

from controlplane.models import Pool, Router


class Decision(models.Model):
    """One request that a router placed, once it had ended. None is what nobody said."""

    pk = models.CompositePrimaryKey("at", "router_id", "boot", "seq")
    at = models.DateTimeField()  # when it was placed, by the router's clock
    router = models.ForeignKey(Router, models.DO_NOTHING, db_constraint=False, db_index=False, related_name="+")
    boot = models.TextField()  # of the router
    seq = models.BigIntegerField()  # within that life, in the order in which requests ended
    pool = models.TextField()  # names, as the router's configuration had them
    group = models.TextField()  # "": of no task group
    matched_by = models.TextField()
    policy = models.TextField()
    revision = models.IntegerField()
    arm = models.TextField()  # "in_force" or "trial"; "": the policy tried nothing
    strategy = models.TextField()
    replica = models.TextField()
    rank = models.SmallIntegerField(null=True)  # data-parallel; None: the replica has only one
    reason = models.TextField()
    status = models.SmallIntegerField(null=True)  # of the answer; None: there was none
    streamed = models.BooleanField(null=True)  # whether the response was; None: there was none, or an older router
    ttft_s = models.FloatField(null=True)  # router's clock, of a streamed response (T1, T1b)
    latency_s = models.FloatField(null=True)  # until the response's last byte; None: it did not come whole
    prompt_tokens_estimate = models.BigIntegerField()
    prompt_tokens = models.BigIntegerField(null=True)  # as the engine counted them
    cached_tokens = models.BigIntegerField(null=True)  # of those, as the engine reported
    hit_tokens = models.BigIntegerField(null=True)  # the router's prediction, of the estimated prompt
    block_tokens = models.IntegerField(null=True)  # of the engine's KV blocks
    hash_tokens = models.IntegerField()  # estimated tokens that one of ``blocks`` stands for
    prefix = models.BigIntegerField(null=True)  # tier-1 hash
    blocks = ArrayField(models.BigIntegerField())  # chained hashes, in the order of the prompt
    positions = ArrayField(models.SmallIntegerField(), null=True)  # of each, from 0; None: all of them are there
    block_count = models.IntegerField()  # of the whole prompt
    sample_ratio = models.FloatField()  # part of the blocks that is there, 0 to 1
    request_id = models.TextField()
    retries = models.SmallIntegerField()
    candidates = models.JSONField(null=True)  # loads, hits and costs; kept of a part of the requests
    opening = models.JSONField(null=True)  # where its segments end, as hashes; told of few requests

    def __str__(self) -> str:
        return f"{self.request_id} to {self.replica} at {self.at:%F %T}"


class DecisionCursor(models.Model):
    """How far a router's decisions have been collected. One row each, so that a worker may restart at any moment."""

    router = models.OneToOneField(Router, models.CASCADE, related_name="decision_cursor")
    boot = models.TextField(blank=True)
    seq = models.BigIntegerField(default=0)  # the last one stored, or given up, of that life
    at = models.DateTimeField(null=True)  # when decisions were last asked for and told
    collected = models.BigIntegerField(default=0)  # ever
    dropped = models.BigIntegerField(default=0)  # ever: gone from the router before they were asked for, or unreadable
    reason = models.CharField(max_length=200, blank=True)  # why the last attempt failed; "" when it did not
    sample_ratio = models.FloatField(default=0.0625)  # part of the blocks that is asked for next
    blocks_per_s = models.FloatField(default=0.0)  # what the router's prompts have, sampled or not; a fading peak

    class Meta:
        constraints = (
            CheckConstraint(condition=Q(sample_ratio__gt=0, sample_ratio__lte=1), name="decision_cursor_ratio_range"),
        )

    def __str__(self) -> str:
        return f"{self.boot}/{self.seq}"


def _tokens() -> models.FloatField[float, float]:
    return models.FloatField(default=0.0)


def _squares() -> models.FloatField[float, float]:
    return models.FloatField(default=0.0, db_default=0.0)


class LadderBin(models.Model):
    """Five minutes of one task group: additions, so that bins and groups add up. Terms as in ``telemetry.lab.ladder``.

    A bin of late is written anew until its time is settled; one whose decisions came much later, once more.
    """

    pk = models.CompositePrimaryKey("at", "pool_id", "group")
    at = models.DateTimeField()  # its start
    pool = models.ForeignKey(Pool, models.CASCADE, db_index=False, related_name="+")
    group = models.TextField()  # "": requests of no task group
    requests = models.IntegerField(default=0)
    prompt_tokens = _tokens()
    reachable = _tokens()
    capacity = _tokens()
    split = _tokens()
    best = _tokens()
    predicted = _tokens()
    doubt = _tokens()
    reported_requests = models.IntegerField(default=0)
    reported_tokens = _tokens()
    delivered = _tokens()
    prompt_squares = _squares()  # sums over requests; the variance of ``reachable`` follows from these three
    reachable_squares = _squares()
    reachable_products = _squares()
    sample_ratio = models.FloatField()  # part of the blocks that was replayed
    reason = models.CharField(max_length=200, blank=True)  # why all that needs the caches' sizes is unknown

    def __str__(self) -> str:
        return f"{self.pool_id}/{self.group} at {self.at:%F %T}"


class ReplayState(models.Model):
    """A pool's replay as it stood when a bin began, or after the newest settled minute: where to go on, or back to."""

    pool = models.ForeignKey(Pool, models.CASCADE, related_name="replay_states")
    at = models.DateTimeField()  # up to which decisions are replayed
    decisions = models.IntegerField(null=True)  # that settled minutes of the bin had; None: none is, or no bin began
    state = models.BinaryField(editable=False)  # telemetry.lab.replay reads it

    class Meta:
        ordering = ("at",)
        constraints = (models.UniqueConstraint(fields=["pool", "at"], name="replay_state_unique"),)

    def __str__(self) -> str:
        return f"{self.pool_id} at {self.at:%F %T}"


class CapacityCurve(models.Model):
    """Hit rate against room, of a pool's latest decisions: what more memory, or a shared tier, would bring."""

    pool = models.OneToOneField(Pool, models.CASCADE, related_name="capacity_curve")
    at = models.DateTimeField()
    since = models.DateTimeField(null=True)  # of the first request counted
    requests = models.IntegerField(default=0)
    sample_ratio = models.FloatField(default=1.0)
    room_tokens = models.BigIntegerField(null=True)  # of a replica, on average, at the multiple 1
    replicas = models.IntegerField(default=0)
    points = models.JSONField(default=list)  # [{"multiple", "one", "split", "shared"}], ascending
    reason = models.CharField(max_length=200, blank=True)  # why there are none

    def __str__(self) -> str:
        return f"{self.pool_id} at {self.at:%F %T}"
