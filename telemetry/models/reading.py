"""Readings of engines and routers, the bucket layouts of their histograms, and the state of their rollups.

Theory of operation. A reading is what was counted between two scrapes. Readings arrive in the order of ``at`` and are
queried by ranges of ``at``, for many replicas at once, so the primary key begins with ``at``: it prevents duplicates,
and a chart of N replicas over a window is one range scan over neighbouring pages. Tables are partitioned by day (see
the migration and storage/partitions.py), and a day is dropped as a whole table. There are no foreign keys in the
database: a removed replica's readings stay until their day is dropped.

A histogram is a pair of arrays, the positions of non-empty buckets and their counts, with the id of its edges. NULL is
unknown; empty arrays mean that nothing was observed.
"""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import UniqueConstraint

from controlplane.models import Replica, Router
from telemetry.metrics.counters import ReadingState


class BucketLayout(models.Model):
    """Upper edges of a histogram's buckets, in its unit, ascending, without the infinite one."""

    edges = ArrayField(models.FloatField())
    digest = models.CharField(max_length=64, unique=True)  # SHA-256 of the edges: 275 floats are too wide for an index

    def __str__(self) -> str:
        return f"{len(self.edges)} edges"


STATES = [(state.value, state.name.title()) for state in ReadingState]


def _count_field() -> models.BigIntegerField[int | None, int | None]:
    """An increase over the interval; None is unknown."""
    return models.BigIntegerField(null=True)


def _layout_field() -> models.ForeignKey[BucketLayout | None, BucketLayout | None]:
    return models.ForeignKey(
        BucketLayout, models.DO_NOTHING, null=True, db_constraint=False, db_index=False, related_name="+"
    )


class Reading(models.Model):
    """One engine of a replica over one interval; ``engine`` is "" for a failed scrape."""

    pk = models.CompositePrimaryKey("at", "replica_id", "model", "engine")
    at = models.DateTimeField()  # when the scrape was due; the increases are of the time before
    replica = models.ForeignKey(Replica, models.DO_NOTHING, db_constraint=False, db_index=False, related_name="+")
    model = models.TextField()  # as served; "" in a failed scrape
    engine = models.TextField()  # data-parallel rank; "" in a failed scrape
    state = models.TextField(choices=STATES)
    interval_s = models.FloatField(null=True)  # time that the increases cover; longer after missed scrapes

    queries = _count_field()  # tokens looked up in the prefix cache, at admission
    hits = _count_field()  # tokens found on the device
    external_queries = _count_field()
    external_hits = _count_field()  # tokens that a KV connector supplied
    device_tokens = _count_field()  # hits by tier
    host_tokens = _count_field()
    p2p_tokens = _count_field()
    disk_tokens = _count_field()
    other_tokens = _count_field()
    prompt_tokens = _count_field()  # at the first output, unlike queries
    generation_tokens = _count_field()
    preemptions = _count_field()
    finished = _count_field()  # requests
    computed_prompt_tokens = _count_field()  # prompt tokens by source, at the first output
    cached_prompt_tokens = _count_field()
    transferred_prompt_tokens = _count_field()  # by a KV connector
    mm_cache_queries = _count_field()  # multimodal items, not tokens
    mm_cache_hits = _count_field()
    queue_ms = _count_field()  # milliseconds and number of requests: time in the engine's queue
    queue_count = _count_field()
    prefill_ms = _count_field()  # from leaving the queue to the first token
    prefill_count = _count_field()
    block_lifetime_ms = _count_field()  # sampled KV blocks, from allocation to eviction
    block_lifetime_count = _count_field()
    block_idle_ms = _count_field()  # from the last access to eviction
    block_idle_count = _count_field()
    block_reuse_gap_ms = _count_field()  # between two accesses
    block_reuse_gap_count = _count_field()
    first_tokens = _count_field()  # requests that got their first token: the observations of the TTFT histogram

    # Those of the columns above and "ttft" that the engine does not report at all; None in a failed scrape. A
    # column that is None and not listed is unknown for another reason: the first scrape, a torn histogram.
    not_reported = ArrayField(models.TextField(), null=True)

    running = models.FloatField(null=True)  # requests, at the scrape
    waiting = models.FloatField(null=True)
    waiting_capacity = models.FloatField(null=True)  # of those, for capacity; the others for a transient constraint
    waiting_deferred = models.FloatField(null=True)
    kv_usage_ratio = models.FloatField(null=True)  # blocks in use by running requests, 0 to 1

    ttft_layout = _layout_field()  # engine's clock
    ttft_at = ArrayField(models.SmallIntegerField(), null=True)
    ttft_counts = ArrayField(models.BigIntegerField(), null=True)

    def __str__(self) -> str:
        return f"{self.replica_id}/{self.engine} at {self.at:%F %T}"


class RouterReading(models.Model):
    """Counters of a router under one key over one interval.

    Each scrape of a router makes one row whose names are all "" (its state says whether the scrape succeeded), and one
    row per key with an increase. Rows with histograms of TTFT and latency have ``policy`` "". Histograms by revision,
    of policies with a canary, have no replica; those by ``reuse`` have neither. Both count the same requests once more.
    """

    pk = models.CompositePrimaryKey("at", "router_id", "pool", "group", "replica", "policy", "revision", "reuse")
    at = models.DateTimeField()
    router = models.ForeignKey(Router, models.DO_NOTHING, db_constraint=False, db_index=False, related_name="+")
    pool = models.TextField()  # names, as the router's configuration had them
    group = models.TextField()  # "": requests of no task group
    replica = models.TextField()  # "": no replica was chosen
    policy = models.TextField()
    revision = models.IntegerField()
    # "hit": at least half of the prompt was cached; "miss": less; "": all responses
    reuse = models.TextField(db_default="")
    state = models.TextField(choices=STATES)
    interval_s = models.FloatField(null=True)

    requests = _count_field()
    ok_requests = _count_field()
    client_error_requests = _count_field()
    replica_error_requests = _count_field()
    router_error_requests = _count_field()
    cancelled_requests = _count_field()
    usage_reported = _count_field()  # responses with cached_tokens; prompt_tokens and cached_tokens are theirs
    usage_without_details = _count_field()  # responses with usage but without cached tokens
    prompt_tokens = _count_field()
    cached_tokens = _count_field()
    spilled_requests = _count_field()  # overflowed from the preferred replica; None: the strategy has none
    # Responses with a predicted hit that reported their cached tokens; the next three columns are theirs.
    predicted_responses = _count_field()
    predicted_prompt_tokens = _count_field()
    predicted_tokens = _count_field()  # of those prompt tokens, predicted to be cached
    predicted_cached_tokens = _count_field()  # of those prompt tokens, reported as cached
    # Objectives for TTFT. Their rows have neither replica nor policy, as those of response caches.
    objective_requests = _count_field()  # with an objective
    objective_kept = _count_field()  # of those, the ones whose first token came in time
    # Response caches. Their rows have neither replica nor policy: a hit is no request of an engine.
    cache_hits = _count_field()  # requests answered from the cache
    cache_misses = _count_field()  # cacheable requests that were not
    cache_bypasses = _count_field()  # requests that may not use the cache
    cache_prompt_tokens = _count_field()  # of the hits' responses; no engine computed them
    cache_generated_tokens = _count_field()
    cache_store_up = models.FloatField(
        null=True
    )  # of the router itself; 1: it uses the store; 0: the store failed; None: it has none

    ttft_layout = _layout_field()  # router's clock, of streamed responses only
    ttft_at = ArrayField(models.SmallIntegerField(), null=True)
    ttft_counts = ArrayField(models.BigIntegerField(), null=True)
    streamed_latency_layout = _layout_field()  # request's last byte to response's last byte, successful responses
    streamed_latency_at = ArrayField(models.SmallIntegerField(), null=True)
    streamed_latency_counts = ArrayField(models.BigIntegerField(), null=True)
    plain_latency_layout = _layout_field()  # the same, of responses that were not streamed
    plain_latency_at = ArrayField(models.SmallIntegerField(), null=True)
    plain_latency_counts = ArrayField(models.BigIntegerField(), null=True)

    def __str__(self) -> str:
        return f"{self.router_id} at {self.at:%F %T}"


class RollupState(models.Model):
    """The progress of one resolution. Bins that end at or before ``rolled_through`` are read from its tables."""

    resolution_s = models.PositiveIntegerField(primary_key=True)
    closed_through = models.DateTimeField(null=True)  # storing a reading of this time or before marks its bin
    rolled_through = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"{self.resolution_s} s through {self.rolled_through}"


class RollupRepair(models.Model):
    """A bin that received readings after it was rolled up, and must be re-aggregated."""

    resolution_s = models.PositiveIntegerField()
    at = models.DateTimeField()  # the end of the bin

    class Meta:
        constraints = (UniqueConstraint(fields=["resolution_s", "at"], name="rollup_repair_once"),)

    def __str__(self) -> str:
        return f"{self.resolution_s} s to {self.at:%F %T}"
