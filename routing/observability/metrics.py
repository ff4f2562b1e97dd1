"""Metrics of one router process in Prometheus text format: request counters and latency histograms.

Label values come from the configuration or from an enumeration of the router, never from a client. A series whose
pool, replica or policy revision left the configuration is dropped after ``GRACE_S``, so that every scraper reads its
last value and no counter goes backwards while its series exists.

Theory of operation. PromQL adds series up by ``le``, so every series of a histogram must have the same edges, even
for empty buckets. Histograms are counted in buckets that are 5 % wide; exposing all 275 edges in every series would
make the text ten times as long. Prometheus therefore gets ``EXPOSED_EDGES``, every 11th edge: each is an edge of the
fine histogram, so the cumulative counts are exact, and ``histogram_quantile`` finds the right bucket. Warmpath reads
the non-empty fine buckets (``/metrics?buckets=fine``), from which a quantile is off by 2.5 % at most.
"""

from __future__ import annotations

import os
import resource
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, compress, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from routing.http.tasks import failures
from routing.schema import PoolConfig, RouterConfig

if TYPE_CHECKING:
    from routing.observability.decision_log import Record


PREFIX: Final = "warmpath_router_"


def header(name: str, kind: str, text: str, prefix: str = PREFIX) -> Iterable[str]:
    """The HELP and TYPE lines of a metric."""
    return (f"# HELP {prefix}{name} {text}", f"# TYPE {prefix}{name} {kind}")


def labels(**values: object) -> str:
    """Label pairs, escaped, in the order given."""
    return ",".join(f'{name}="{_escaped(str(value))}"' for name, value in values.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


EDGES: Final = [0.001 * 1.05**i for i in range(275)]  # seconds, 1 ms to 10.7 minutes; inclusive upper edges
EXPOSED_EDGES: Final = EDGES[28::11]  # seconds, 3.9 ms to 8.8 minutes, each 1.71 times the previous edge
_LABELS: Final = [repr(edge) for edge in EDGES]
# The fine buckets below each exposed edge and above the previous one; the last buckets are above every exposed edge.
_SLICES: Final = [slice(*ends) for ends in pairwise([0, *range(29, 276, 11), 276])]
_EXPOSED_LABELS: Final = [*_LABELS[28::11], "+Inf"]


def bucket_of(seconds: float) -> int:
    """Number of a value's bucket, looked up once for all histograms that count the value."""
    return bisect_left(EDGES, seconds)


class Histogram:
    """Counts per bucket; the last one is for values above every edge."""

    def __init__(self) -> None:
        self._counts = array("Q", bytes(8 * (len(EDGES) + 1)))
        self._sum = 0.0

    def observe(self, seconds: float, bucket: int | None = None) -> None:
        """Count one value; ``bucket`` is its ``bucket_of`` if the caller knows it."""
        self._counts[bucket_of(seconds) if bucket is None else bucket] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str, *, all_buckets: bool = False) -> Iterator[str]:
        """Prometheus text: the buckets of ``EXPOSED_EDGES``, or the non-empty ones of all edges (``all_buckets``)."""
        counts, total = self._counts[:], self._sum  # a consistent copy
        buckets = _fine_buckets(counts) if all_buckets else _exposed_buckets(counts)
        for label, cumulative in buckets:
            yield f'{name}_bucket{{{labels},le="{label}"}} {cumulative}'
        yield f"{name}_sum{{{labels}}} {total!r}"
        yield f"{name}_count{{{labels}}} {sum(counts)}"


def _fine_buckets(counts: array[int]) -> Iterator[tuple[str, int]]:
    cumulative = 0
    for index in compress(range(len(EDGES)), counts):
        cumulative += counts[index]
        yield _LABELS[index], cumulative
    yield "+Inf", cumulative + counts[-1]


def _exposed_buckets(counts: array[int]) -> Iterator[tuple[str, int]]:
    return zip(_EXPOSED_LABELS, accumulate(sum(counts[part]) for part in _SLICES), strict=True)


def exposed_edge(edge: float) -> float:
    """The smallest exposed edge that is not below a fine one; infinity if there is none."""
    index = bisect_left(EXPOSED_EDGES, edge)
    return EXPOSED_EDGES[index] if index < len(EXPOSED_EDGES) else float("inf")


_started_at: Final = time.time()


def process_lines() -> Iterator[str]:
    """Prometheus text of this process: failures of background loops, start time, CPU time and memory."""
    yield from header("loop_failures_total", "counter", "Internal errors in background loops, which continued.")
    for loop, count in failures().items():
        yield f"{PREFIX}loop_failures_total{{{labels(loop=loop)}}} {count}"
    usage = resource.getrusage(resource.RUSAGE_SELF)
    for name, kind, text, value in (
        ("start_time_seconds", "gauge", "Unix time at which the process started.", _started_at),
        ("cpu_seconds_total", "counter", "User and system CPU time.", usage.ru_utime + usage.ru_stime),
        ("resident_memory_bytes", "gauge", "Resident memory.", _resident_bytes(usage.ru_maxrss)),
    ):
        yield from header(name, kind, text, prefix="process_")
        yield f"process_{name} {value}"


def _resident_bytes(peak_kib: int) -> int:
    """Resident memory from /proc; its peak if there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_kib * 1024


GRACE_S: Final = 900.0  # how long a series outlives its configuration

SeriesKey = tuple[str, str, str, str, int]  # pool, group, replica, policy, revision
POLICY_LATENCY: Final = "policy_latency_seconds"
POLICY_TTFT: Final = "policy_ttft_seconds"
STREAMED: Final = "streamed"  # label of responses that are event streams
KEPT: Final = "kept"  # results of requests with an objective for TTFT
MISSED: Final = "missed"
SHED: Final = "shed"
PLAIN: Final = "plain"  # label of all other responses, embeddings included
TOKEN_LINES: Final = (  # metric, attribute of TokenSums, help text
    ("usage_reported_total", "responses", "Responses that report how many prompt tokens were cached."),
    ("prompt_tokens_total", "prompt", "Prompt tokens of the responses that report cached tokens."),
    ("cached_tokens_total", "cached", "Prompt tokens that came from the prefix cache, as responses report."),
)
PREDICTION_LINES: Final = (
    (
        "predicted_responses_total",
        "predicted_responses",
        "Responses that report cached tokens and have a predicted cache hit.",
    ),
    ("predicted_prompt_tokens_total", "predicted_prompt", "Prompt tokens of the responses with a prediction."),
    ("predicted_tokens_total", "predicted", "Prompt tokens that were predicted to be cached."),
    ("predicted_cached_tokens_total", "predicted_cached", "Cached tokens that the responses with a prediction report."),
)
KeyT = TypeVar("KeyT")


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    CLIENT_ERROR = "client_error"  # any 4xx, from the replica or the router: also the 429 of a full admission queue
    REPLICA_ERROR = "replica_error"  # 5xx, no response, or a truncated one
    ROUTER_ERROR = "router_error"  # 5xx of the router: no eligible replica, queue timeout, internal error
    CANCELLED = "cancelled"  # the client disconnected


class TokenSums:
    """Token counts of the responses that report how many prompt tokens were cached."""

    def __init__(self) -> None:
        self.responses = self.prompt = self.cached = 0
        # Of the responses for which the strategy predicted a cache hit.
        self.predicted_responses = self.predicted_prompt = self.predicted = self.predicted_cached = 0

    def add(self, record: Record, prompt: int, cached: int) -> None:
        """Count one response."""
        self.responses += 1
        self.prompt += prompt
        self.cached += cached
        if record.hit_tokens is not None:
            self.predicted_responses += 1
            self.predicted_prompt += prompt
            self.predicted_cached += cached
            self.predicted += min(prompt, record.hit_tokens)


class Series:
    """Counters of one pool, group, replica and policy revision."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str], int] = {}  # by reason and outcome
        self.tokens: TokenSums | None = None  # None: no response has reported usage
        self.without_details = 0  # responses whose usage does not report how many tokens were cached
        # Cached references to histograms that all policies and revisions share; None: not looked up yet.
        self.ttft: Histogram | None = None
        self.streamed_latency: Histogram | None = None
        self.plain_latency: Histogram | None = None

    def count(self, reason: str, outcome: str) -> None:
        """Count one request that ended."""
        key = (reason, outcome)
        self.requests[key] = self.requests.get(key, 0) + 1


class HistogramFamily:
    """The histograms of one metric, by label values. Revisions are ``int``, other values ``str``."""

    def __init__(self, name: str, text: str, label_names: tuple[str, ...]) -> None:
        self.name = name
        self.text = text
        self.series: dict[tuple[Any, ...], Histogram] = {}
        self._label_names = label_names

    def histogram(self, *values: Any) -> Histogram:
        """The histogram with these label values, created on first use."""
        histogram = self.series.get(values)
        if histogram is None:
            histogram = self.series[values] = Histogram()
        return histogram

    def series_key(self, values: tuple[Any, ...]) -> SeriesKey:
        """The label values that the configuration decides on."""
        value_of = dict(zip(self._label_names, values, strict=True))
        return (
            value_of["pool"],
            value_of["group"],
            value_of.get("replica", ""),
            value_of.get("policy", ""),
            value_of.get("revision", 0),
        )

    def lines(self, *, all_buckets: bool) -> Iterator[str]:
        """Prometheus text; nothing before the first observation."""
        if self.series:
            yield from header(self.name, "histogram", self.text)
        for values, histogram in list(self.series.items()):
            pairs = labels(**dict(zip(self._label_names, values, strict=True)))
            yield from histogram.lines(f"{PREFIX}{self.name}", pairs, all_buckets=all_buckets)


class Metrics:
    """Counters and histograms of one router process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._series: dict[SeriesKey, Series] = {}
        by_replica, by_policy = ("pool", "group", "replica"), ("pool", "group", "policy", "revision")
        text = "Request's last byte to first token, of streamed responses only."
        self._ttft = HistogramFamily("ttft_seconds", text, by_replica)
        text = "TTFT by revision, of policies with a canary."
        self._policy_ttft = HistogramFamily(POLICY_TTFT, text, by_policy)
        text = "Latency by revision, of policies with a canary."
        self._policy_latency = HistogramFamily(POLICY_LATENCY, text, (*by_policy, "response"))
        text = "TTFT by whether half of the prompt came from the cache."
        self._reuse_ttft = HistogramFamily("reuse_ttft_seconds", text, ("pool", "group", "reuse"))
        text = "Request's last byte to the last byte of a successful response."
        self._latency = HistogramFamily("latency_seconds", text, (*by_replica, "response"))
        self._retries: dict[tuple[str, str, str], int] = {}  # by pool, replica and cause
        self._stream_failures: dict[tuple[str, str, str], int] = {}  # by pool, replica and result
        self._prefills: dict[tuple[str, str, str, str], int] = {}  # by pool, replica, outcome and cause
        self._objectives: dict[tuple[str, str, str], int] = {}  # by pool, group and result
        self._left_at: dict[object, float] = {}  # when a series was first seen to have left the configuration

    # --- counting ---

    def count_placed(self, record: Record, outcome: Outcome) -> None:
        """Count a request that was sent to a replica."""
        key = (record.pool, record.group, record.replica, record.policy, record.revision)
        series = self._series.get(key) or self._series_of(key)
        series.count(record.reason, outcome)
        if record.ttft_s is not None and record.status is not None and record.status < 400:
            self._observe_ttft(series, record, record.ttft_s)
        if record.latency_s is not None and outcome is Outcome.OK:
            self._observe_latency(series, record, record.latency_s)
        if record.prompt_tokens is not None and record.cached_tokens is not None:
            if series.tokens is None:
                series.tokens = TokenSums()
            series.tokens.add(record, record.prompt_tokens, record.cached_tokens)
        elif record.lacks_details:
            series.without_details += 1
        if record.objective_ms is not None:
            if record.keeps_objective is not None:
                self.count_objective(record.pool, record.group, KEPT if record.keeps_objective else MISSED)
            elif outcome in {Outcome.REPLICA_ERROR, Outcome.ROUTER_ERROR}:
                self.count_objective(record.pool, record.group, MISSED)

    def _observe_latency(self, series: Series, record: Record, latency_s: float) -> None:
        if record.is_streamed:
            if series.streamed_latency is None:
                series.streamed_latency = self._latency.histogram(record.pool, record.group, record.replica, STREAMED)
            series.streamed_latency.observe(latency_s)
            return
        if series.plain_latency is None:
            series.plain_latency = self._latency.histogram(record.pool, record.group, record.replica, PLAIN)
        bucket = bucket_of(latency_s)
        series.plain_latency.observe(latency_s, bucket)
        if record.arm is not None:
            histogram = self._policy_latency.histogram(record.pool, record.group, record.policy, record.revision, PLAIN)
            histogram.observe(latency_s, bucket)

    def _observe_ttft(self, series: Series, record: Record, ttft_s: float) -> None:
        if series.ttft is None:
            series.ttft = self._ttft.histogram(record.pool, record.group, record.replica)
        bucket = bucket_of(ttft_s)
        series.ttft.observe(ttft_s, bucket)
        if record.arm is not None:
            histogram = self._policy_ttft.histogram(record.pool, record.group, record.policy, record.revision)
            histogram.observe(ttft_s, bucket)
        if record.prompt_tokens and record.cached_tokens is not None:
            # Half of the prompt, because almost any two prompts have a few tokens in common.
            reuse = "hit" if 2 * record.cached_tokens >= record.prompt_tokens else "miss"
            self._reuse_ttft.histogram(record.pool, record.group, reuse).observe(ttft_s, bucket)

    def count_unplaced(self, outcome: Outcome, pool: str = "", group: str = "") -> None:
        """Count a request that was sent to no replica."""
        self._series_of((pool, group, "", "", 0)).count("", outcome)

    def count_rejected(self, status: int) -> None:
        """Count a request that the router rejected before it chose a pool."""
        self.count_unplaced(Outcome.CLIENT_ERROR if status < 500 else Outcome.ROUTER_ERROR)

    def count_retry(self, record: Record, cause: str) -> None:
        """Count a retry on another replica."""
        key = (record.pool, record.replica, cause)
        self._retries[key] = self._retries.get(key, 0) + 1

    def count_stream_failure(self, pool: str, replica: str, result: str) -> None:
        """Count a stream whose ``replica`` failed: ``continued``, or why it was not."""
        key = (pool, replica, result)
        self._stream_failures[key] = self._stream_failures.get(key, 0) + 1

    def count_objective(self, pool: str, group: str, result: str) -> None:
        """Count a request with an objective for TTFT: KEPT, MISSED or SHED."""
        key = (pool, group, result)
        self._objectives[key] = self._objectives.get(key, 0) + 1

    def count_prefill(self, pool: str, replica: str, outcome: str, cause: str) -> None:
        """Count a prefill leg, or one that was skipped (``replica`` is ""); ``outcome`` is a ``LegOutcome``."""
        key = (pool, replica, outcome, cause)
        self._prefills[key] = self._prefills.get(key, 0) + 1

    def _series_of(self, key: SeriesKey) -> Series:
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series()
        return series

    def _families(self) -> tuple[HistogramFamily, ...]:
        return self._ttft, self._policy_ttft, self._reuse_ttft, self._latency, self._policy_latency

    # --- series of a former configuration ---

    def prune(self, configured: ConfiguredSeries) -> None:
        """Drop series that left the configuration longer than ``GRACE_S`` ago."""
        now = self._clock()
        self._drop_expired(self._series, lambda key: key, configured.contains, now)
        for family in self._families():
            matches = configured.has_canary if family.name.startswith("policy_") else configured.contains
            self._drop_expired(family.series, family.series_key, matches, now)
        for failures_by_replica in (self._retries, self._stream_failures):
            self._drop_expired(failures_by_replica, lambda key: (key[0], "", key[1], "", 0), configured.contains, now)
        self._drop_expired(self._prefills, lambda key: (key[0], "", key[1], "", 0), configured.contains, now)
        self._drop_expired(self._objectives, lambda key: (key[0], key[1], "", "", 0), configured.contains, now)

    def _drop_expired(
        self,
        series: dict[KeyT, Any],
        series_key: Callable[[KeyT], SeriesKey],
        is_configured: Callable[[SeriesKey], bool],
        now: float,
    ) -> None:
        for key in list(series):
            identity = (id(series), key)  # several dictionaries have the same key
            if is_configured(series_key(key)):
                self._left_at.pop(identity, None)
            elif now - self._left_at.setdefault(identity, now) > GRACE_S:
                del series[key], self._left_at[identity]

    # --- text ---

    def lines(self, *, all_buckets: bool = False) -> Iterator[str]:
        """Prometheus text, produced while counting goes on; ``all_buckets``: histograms with all non-empty buckets."""
        yield from header("requests_total", "counter", "Requests that ended, by outcome.")
        for key, series in list(self._series.items()):
            for (reason, outcome), count in list(series.requests.items()):
                yield f'{PREFIX}requests_total{{{_series_labels(key)},reason="{reason}",outcome="{outcome}"}} {count}'
        yield from self._token_lines()
        for family in self._families():
            yield from family.lines(all_buckets=all_buckets)
        yield from header("retries_total", "counter", "Retries on another replica before the first byte, by cause.")
        for (pool, replica, cause), count in list(self._retries.items()):
            yield f"{PREFIX}retries_total{{{labels(pool=pool, replica=replica, cause=cause)}}} {count}"
        text = "Streams whose replica failed: continued by another, or why they ended with an error."
        yield from header("stream_failures_total", "counter", text)
        for (pool, replica, result), count in list(self._stream_failures.items()):
            yield f"{PREFIX}stream_failures_total{{{labels(pool=pool, replica=replica, result=result)}}} {count}"
        if self._objectives:
            yield from header("ttft_objectives_total", "counter", "Requests with an objective for TTFT, by result.")
        for (pool, group, result), count in list(self._objectives.items()):
            yield f"{PREFIX}ttft_objectives_total{{{labels(pool=pool, group=group, result=result)}}} {count}"
        if self._prefills:
            yield from header("prefill_legs_total", "counter", "Prompts sent to a prefill replica, or not, by outcome.")
        for (pool, replica, outcome, cause), count in list(self._prefills.items()):
            pairs = labels(pool=pool, replica=replica, outcome=outcome, cause=cause)
            yield f"{PREFIX}prefill_legs_total{{{pairs}}} {count}"

    def _token_lines(self) -> Iterator[str]:
        reported = [(_series_labels(key), series.tokens) for key, series in self._series.items() if series.tokens]
        predicted = [(pairs, tokens) for pairs, tokens in reported if tokens.predicted_responses]
        for rows, metrics in ((reported, TOKEN_LINES), (predicted, PREDICTION_LINES)):
            for name, attribute, text in metrics:
                yield from header(name, "counter", text)
                for pairs, tokens in rows:
                    yield f"{PREFIX}{name}{{{pairs}}} {getattr(tokens, attribute)}"
        text = "Responses whose usage does not report how many tokens were cached."
        yield from header("usage_without_details_total", "counter", text)
        for key, series in list(self._series.items()):
            if series.without_details:
                yield f"{PREFIX}usage_without_details_total{{{_series_labels(key)}}} {series.without_details}"


def _series_labels(key: SeriesKey) -> str:
    pool, group, replica, policy, revision = key
    return labels(pool=pool, group=group, replica=replica, policy=policy, revision=revision or "")


@dataclass(frozen=True)
class _PoolLabels:
    """The label values of one pool's series. Groups and replicas include the empty value, which stands for all."""

    groups: frozenset[str]
    replicas: frozenset[str]
    policies: frozenset[tuple[str, int]]  # with their revisions, canaries included
    with_canary: frozenset[tuple[str, int]]  # both revisions of the policies that have a canary


class ConfiguredSeries:
    """The label values of one configuration. Built once, because each scrape looks up every series."""

    def __init__(self, config: RouterConfig) -> None:
        self._pools = {pool.name: _pool_labels(pool) for pool in config.pools}

    def contains(self, key: SeriesKey) -> bool:
        """Whether all label values are configured; an empty value stands for all."""
        return self._matches(key, with_canary=False)

    def has_canary(self, key: SeriesKey) -> bool:
        """Whether all label values are configured and the policy has a canary."""
        return self._matches(key, with_canary=True)

    def _matches(self, key: SeriesKey, *, with_canary: bool) -> bool:
        pool, group, replica, policy, revision = key
        if not pool:
            return True
        names = self._pools.get(pool)
        if names is None or group not in names.groups or replica not in names.replicas:
            return False
        if with_canary:
            return (policy, revision) in names.with_canary
        return not policy or (policy, revision) in names.policies


def _pool_labels(pool: PoolConfig) -> _PoolLabels:
    policies = [pool.policy, *(group.policy for group in pool.groups if group.policy)]
    active = {(policy.name, policy.revision) for policy in policies}
    with_canary = {
        (policy.name, revision)
        for policy in policies
        if policy.canary is not None
        for revision in (policy.revision, policy.canary.revision)
    }
    return _PoolLabels(
        groups=frozenset(["", *(group.name for group in pool.groups)]),
        replicas=frozenset(["", *(replica.name for replica in pool.replicas)]),
        policies=frozenset(active | with_canary),
        with_canary=frozenset(with_canary),
    )
