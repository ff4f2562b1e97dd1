"""The edges of a histogram, kept once for all readings that have them.

Readings: what was counted between two scrapes. Partitioned by day; see the migration and storage/partitions.py.

Theory of operation. Readings arrive in the order of ``at`` and are asked for by ranges of ``at``, for many replicas at
once. The primary key therefore begins with ``at``: it keeps duplicates out, and a chart of N replicas over a window
is one range scan over neighbouring pages. A day is dropped as a whole table. There are no foreign keys in the
database: a removed replica's readings stay until their day goes.

A histogram is a pair of arrays, the positions of the buckets that hold something and their counts, beside the id of
its edges; NULL is unknown, empty arrays say that nothing was observed.

How far readings have been rolled up, and what of that is to be done again.
"""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import UniqueConstraint

from controlplane.models import Replica, Router
from telemetry.metrics.counters import ReadingState


class BucketLayout(models.Model):
    """Upper edges of a histogram's buckets, in its unit, ascending, the infinite one left out (T2, T3)."""

    edges = ArrayField(models.FloatField())
    digest = models.CharField(max_length=64, unique=True)  # SHA-256 of the edges: 275 floats are too wide for an index

    def __str__(self) -> str:
        return f"{len(self.edges)} edges"


STATES = [(state.value, state.name.title()) for state in ReadingState]


def _count() -> models.BigIntegerField[int | None, int | None]:
    """An addition over the interval; None is unknown."""
    return models.BigIntegerField(null=True)


def _layout() -> models.ForeignKey[BucketLayout | None, BucketLayout | None]:
    return models.ForeignKey(
        BucketLayout, models.DO_NOTHING, null=True, db_constraint=False, db_index=False, related_name="+"
    )


class Reading(models.Model):
    """One engine of a replica over one interval; with ``engine`` "" the gap that a failed scrape leaves."""

    pk = models.CompositePrimaryKey("at", "replica_id", "model", "engine")
    at = models.DateTimeField()  # when the scrape was due; the additions are of the time before
    replica = models.ForeignKey(Replica, models.DO_NOTHING, db_constraint=False, db_index=False, related_name="+")
    model = models.TextField()  # as served; "" in a gap
    engine = models.TextField()  # data-parallel rank (H15)
    state = models.TextField(choices=STATES)
    interval_s = models.FloatField(null=True)  # what the additions cover; longer than usual after a gap (H10)

    queries = _count()  # tokens looked up in the prefix cache, at admission
    hits = _count()  # tokens of those found on the device
    external_queries = _count()
    external_hits = _count()  # tokens that a KV connector supplied (H3)
    device_tokens = _count()  # hits by tier (H4)
    host_tokens = _count()
    p2p_tokens = _count()
    disk_tokens = _count()
    other_tokens = _count()
    prompt_tokens = _count()  # at the first output: another moment than queries (H5)
    generation_tokens = _count()
    preemptions = _count()
    finished = _count()  # requests
    computed_prompt_tokens = _count()  # prompt tokens by source, at the first output
    cached_prompt_tokens = _count()
    transferred_prompt_tokens = _count()  # by a KV connector
    mm_cache_queries = _count()  # multimodal items, not tokens
    mm_cache_hits = _count()
    queue_ms = _count()  # milliseconds and number of requests: time in the engine's queue
    queue_count = _count()
    prefill_ms = _count()  # from leaving the queue to the first token
    prefill_count = _count()
    block_lifetime_ms = _count()  # sampled KV blocks, from allocation to eviction
    block_lifetime_count = _count()
    block_idle_ms = _count()  # from the last access to eviction
    block_idle_count = _count()
    block_reuse_gap_ms = _count()  # between two accesses
    block_reuse_gap_count = _count()
    first_tokens = _count()  # requests that got their first token: the observations of the TTFT histogram

    # Names of these columns, "ttft" and "itl" that this engine does not report at all; None in a gap. What is None in a
    # row and not named here is unknown for another reason: the first scrape, a torn histogram.
    not_reported = ArrayField(models.TextField(), null=True)

    running = models.FloatField(null=True)  # requests, at the scrape
    waiting = models.FloatField(null=True)
    waiting_capacity = models.FloatField(null=True)  # of those, for room; the others for a transient constraint
    waiting_deferred = models.FloatField(null=True)
    kv_usage_ratio = models.FloatField(null=True)  # blocks held by running requests, 0 to 1

    ttft_layout = _layout()  # engine's clock (T1)
    ttft_at = ArrayField(models.SmallIntegerField(), null=True)
    ttft_counts = ArrayField(models.BigIntegerField(), null=True)
    ttft_sum_s = models.FloatField(null=True)
    itl_layout = _layout()
    itl_at = ArrayField(models.SmallIntegerField(), null=True)
    itl_counts = ArrayField(models.BigIntegerField(), null=True)
    itl_sum_s = models.FloatField(null=True)

    def __str__(self) -> str:
        return f"{self.replica_id}/{self.engine} at {self.at:%F %T}"


class RouterReading(models.Model):
    """What a router counted under one key over one interval.

    Each scrape of a router leaves one row whose names are all "" (its state says whether the scrape succeeded), and
    one row for each key under which something was counted. The rows of TTFT and latency have ``policy`` ""; those
    by revision, which are there while a policy tries another one, have ``replica`` "". TTFT of
    answers that told their cached tokens, split by ``reuse``, has neither: the same requests once more.
    """

    pk = models.CompositePrimaryKey("at", "router_id", "pool", "group", "replica", "policy", "revision", "reuse")
    at = models.DateTimeField()
    router = models.ForeignKey(Router, models.DO_NOTHING, db_constraint=False, db_index=False, related_name="+")
    pool = models.TextField()  # names, as the router's configuration had them
    group = models.TextField()  # "": requests of no task group
    replica = models.TextField()  # "": no replica was chosen
    policy = models.TextField()
    revision = models.IntegerField()
    # "hit": at least half of the prompt came from the cache; "miss": less; "": all answers
    reuse = models.TextField(db_default="")
    state = models.TextField(choices=STATES)
    interval_s = models.FloatField(null=True)

    requests = _count()
    ok_requests = _count()
    client_error_requests = _count()
    replica_error_requests = _count()
    router_error_requests = _count()
    cancelled_requests = _count()
    usage_reported = _count()  # answers that carried cached_tokens; the next three are of those alone (H16)
    usage_without_details = _count()  # responses whose usage did not say how many tokens were cached
    prompt_tokens = _count()
    cached_tokens = _count()
    spilled_requests = _count()  # placed away from a prefix's home or holder, for load; None where there is no home
    predicted_answers = (
        _count()
    )  # answers of which a hit was predicted, and that told one; the next three are theirs (H17)
    predicted_prompt_tokens = _count()
    predicted_tokens = _count()  # of those prompt tokens, predicted to be cached
    predicted_cached_tokens = _count()  # of those prompt tokens, cached indeed

    ttft_layout = _layout()  # router's clock, of streamed responses only (T1, T1b, T8)
    ttft_at = ArrayField(models.SmallIntegerField(), null=True)
    ttft_counts = ArrayField(models.BigIntegerField(), null=True)
    ttft_sum_s = models.FloatField(null=True)
    streamed_latency_layout = _layout()  # from the request's last byte to the response's, of those that succeeded
    streamed_latency_at = ArrayField(models.SmallIntegerField(), null=True)
    streamed_latency_counts = ArrayField(models.BigIntegerField(), null=True)
    streamed_latency_sum_s = models.FloatField(null=True)
    plain_latency_layout = _layout()  # the same of responses that were not streamed
    plain_latency_at = ArrayField(models.SmallIntegerField(), null=True)
    plain_latency_counts = ArrayField(models.BigIntegerField(), null=True)
    plain_latency_sum_s = models.FloatField(null=True)

    def __str__(self) -> str:
        return f"{self.router_id} at {self.at:%F %T}"


class RollupState(models.Model):
    """One resolution. Bins that end at or before ``rolled_through`` are read from its tables, later ones are not."""

    resolution_s = models.PositiveIntegerField(primary_key=True)
    closed_through = models.DateTimeField(null=True)  # who stores a reading of this time or before marks its bin
    rolled_through = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.resolution_s} s through {self.rolled_through}"


class RollupRepair(models.Model):
    """A bin that was rolled up before all its readings were there."""

    resolution_s = models.PositiveIntegerField()
    at = models.DateTimeField()  # the end of the bin

    class Meta:
        constraints = (UniqueConstraint(fields=["resolution_s", "at"], name="rollup_repair_once"),)

    def __str__(self) -> str:
        return f"{self.resolution_s} s to {self.at:%F %T}"
