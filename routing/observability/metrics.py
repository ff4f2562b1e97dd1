"""What the router counted, as Prometheus text.

Every label's values come from the configuration or from an enumeration of ours, never from a client. A series whose
pool, replica or policy revision left the configuration is dropped after a grace period that every scraper meets, so
counters never go backwards while they exist.

Sums of tokens: what answers said came from the cache, and what had been predicted of the same answers.

Which labels of figures are in a configuration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from routing.observability.exposition import PREFIX, Histogram, bucket_of, header, labels
from routing.schema import PoolConfig, RouterConfig

if TYPE_CHECKING:
    from routing.observability.decision_record import Record


class Predictions:
    """Sums over the answers of which a hit was predicted, and that said how many tokens came from the cache."""

    __slots__ = ("answers", "cached", "predicted", "prompt")

    def __init__(self) -> None:
        self.answers = self.prompt = self.predicted = self.cached = 0

    def add(self, hit: int, estimate: int, prompt: int, cached: int) -> None:
        """Count one answer: ``hit`` of the estimated prompt were predicted, which is told in tokens of the real one."""
        self.answers += 1
        self.prompt += prompt
        self.cached += cached
        if estimate:
            self.predicted += min(prompt, round(hit * prompt / estimate))


class Tokens:
    """Sums over the answers that said how many tokens came from the cache."""

    __slots__ = ("answers", "cached", "predictions", "prompt")

    def __init__(self) -> None:
        self.answers = self.prompt = self.cached = 0
        self.predictions: Predictions | None = None  # None: the strategy asks for no residency

    def add(self, record: Record, prompt: int, cached: int) -> None:
        """Count one answer, and what was expected of it beside what came."""
        self.answers += 1
        self.prompt += prompt
        self.cached += cached
        if record.hit_tokens is not None:
            if self.predictions is None:
                self.predictions = Predictions()
            self.predictions.add(record.hit_tokens, record.prompt_tokens_estimate, prompt, cached)


GRACE_S: Final = 900.0  # how long a series outlives its configuration

SeriesKey = tuple[str, str, str, str, int]  # pool, group, replica, policy, revision
TTFT: Final = "ttft_seconds"
LATENCY: Final = "latency_seconds"
POLICY_LATENCY: Final = "policy_latency_seconds"
STREAMED: Final = "streamed"  # kinds of responses: events
PLAIN: Final = "plain"  # everything else, embeddings too
POLICY_TTFT: Final = "policy_ttft_seconds"
REUSE_TTFT: Final = "reuse_ttft_seconds"
PREDICTION_LINES: Final = (
    ("predicted_answers_total", "answers", "Of these answers, those of which a hit was predicted."),
    ("predicted_prompt_tokens_total", "prompt", "Prompt tokens of the answers with a prediction."),
    ("predicted_tokens_total", "predicted", "Of these, tokens that were predicted to be cached."),
    ("predicted_cached_tokens_total", "cached", "Of these, tokens that came from the cache."),
)
V = TypeVar("V")


class Knows(Protocol):
    """Whoever can tell whether a series' labels are in the configuration."""

    def __call__(self, key: SeriesKey, *, tried: bool = False) -> bool:
        """Whether they are; ``tried``: and the policy has a trial."""
        ...


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    CLIENT_ERROR = "client_error"  # any 4xx, whoever said so: also the 429 of a full line
    REPLICA_ERROR = "replica_error"  # 5xx, no answer, or half of one
    ROUTER_ERROR = "router_error"  # a 5xx of ours: no replica to ask, a wait in line that ended, a mistake
    CANCELLED = "cancelled"  # the client went away


class Series:
    """What is counted for one pool, group, replica and revision of a policy."""

    __slots__ = ("plain_latency", "requests", "streamed_latency", "tokens", "ttft", "without_details")

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str], int] = {}  # by reason and outcome
        self.tokens: Tokens | None = None  # None: no answer has said any
        self.without_details = 0  # responses whose usage does not say how many tokens were cached
        # Shared by all policies and revisions; None: nothing was observed yet.
        self.ttft: Histogram | None = None  # of streamed responses
        self.streamed_latency: Histogram | None = None
        self.plain_latency: Histogram | None = None

    def count(self, reason: str, outcome: str) -> None:
        """Count one request that ended."""
        what = (reason, outcome)
        self.requests[what] = self.requests.get(what, 0) + 1


class Metrics:
    """Counters and histograms of one router process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._series: dict[SeriesKey, Series] = {}
        self._ttft: dict[tuple[str, str, str], Histogram] = {}
        self._latency: dict[tuple[str, str, str, str], Histogram] = {}  # by pool, group, replica and kind of response
        self._policy_latency: dict[tuple[SeriesKey, str], Histogram] = {}  # as those of TTFT; plain responses only
        self._policy_ttft: dict[SeriesKey, Histogram] = {}  # of all replicas together, so that label is empty
        self._reuse_ttft: dict[tuple[str, str, str], Histogram] = {}  # by pool, group and reuse, of all replicas
        self._retries: dict[tuple[str, str, str], int] = {}
        self._left_at: dict[object, float] = {}  # when a series was first seen to have left the configuration

    # --- counting ---

    def placed_ended(self, record: Record, outcome: Outcome) -> None:
        """Count a request that a replica was chosen for."""
        key = (record.pool, record.group, record.replica, record.policy, record.revision)
        series = self._series.get(key) or self._series_of(key)
        series.count(record.reason, outcome)
        if record.ttft_s is not None and record.status is not None and record.status < 400:
            self._first_token(series, record, record.ttft_s)
        if record.latency_s is not None and outcome is Outcome.OK:
            self._completed(series, record, record.latency_s)
        if record.prompt_tokens is not None and record.cached_tokens is not None:
            if series.tokens is None:
                series.tokens = Tokens()
            series.tokens.add(record, record.prompt_tokens, record.cached_tokens)
        elif record.lacks_details:
            series.without_details += 1

    def _completed(self, series: Series, record: Record, latency_s: float) -> None:
        """Count how long a whole response took, those that came as events apart from the others."""
        place = (record.pool, record.group, record.replica)
        if record.is_streamed:
            if series.streamed_latency is None:
                series.streamed_latency = self._latency.setdefault((*place, STREAMED), Histogram())
            series.streamed_latency.observe(latency_s)
            return
        if series.plain_latency is None:
            series.plain_latency = self._latency.setdefault((*place, PLAIN), Histogram())
        bucket = bucket_of(latency_s)
        series.plain_latency.observe(latency_s, bucket)
        if record.arm is not None:
            key = (record.pool, record.group, "", record.policy, record.revision)
            self._policy_latency.setdefault((key, PLAIN), Histogram()).observe(latency_s, bucket)

    def _first_token(self, series: Series, record: Record, ttft_s: float) -> None:
        if series.ttft is None:
            series.ttft = self._ttft.setdefault((record.pool, record.group, record.replica), Histogram())
        bucket = bucket_of(ttft_s)
        series.ttft.observe(ttft_s, bucket)
        if record.arm is not None:
            self._policy_ttft_of(record).observe(ttft_s, bucket)
        if record.prompt_tokens and record.cached_tokens is not None:
            is_hit = 2 * record.cached_tokens >= record.prompt_tokens
            self._reuse_ttft_of(record, "hit" if is_hit else "miss").observe(ttft_s, bucket)

    def unplaced_ended(self, outcome: Outcome, pool: str = "", group: str = "") -> None:
        """Count a request that no replica was chosen for."""
        self._series_of((pool, group, "", "", 0)).count("", outcome)

    def refused(self, status: int) -> None:
        """Count a request that was refused before anything was decided."""
        self.unplaced_ended(Outcome.CLIENT_ERROR if status < 500 else Outcome.ROUTER_ERROR)

    def retried(self, record: Record, cause: str) -> None:
        """Count a replica given up in favour of another one."""
        key = (record.pool, record.replica, cause)
        self._retries[key] = self._retries.get(key, 0) + 1

    def _policy_ttft_of(self, record: Record) -> Histogram:
        """Of the revision that placed a request, while another one is beside it."""
        key = (record.pool, record.group, "", record.policy, record.revision)
        histogram = self._policy_ttft.get(key)
        if histogram is None:
            histogram = self._policy_ttft[key] = Histogram()
        return histogram

    def _reuse_ttft_of(self, record: Record, reuse: str) -> Histogram:
        """A hit has at least half of its prompt from the cache: a few tokens most prompts share with any other."""
        key = (record.pool, record.group, reuse)
        histogram = self._reuse_ttft.get(key)
        if histogram is None:
            histogram = self._reuse_ttft[key] = Histogram()
        return histogram

    def _series_of(self, key: SeriesKey) -> Series:
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = Series()
        return series

    # --- what the configuration still knows ---

    def prune(self, knows: Knows) -> None:
        """Drop series that left the configuration longer than the grace period ago."""
        now = self._clock()
        self._keep(self._series, knows, now)
        self._keep(self._ttft, lambda key: knows((*key, "", 0)), now)
        self._keep(self._latency, lambda key: knows((*key[:3], "", 0)), now)
        self._keep(self._policy_ttft, lambda key: knows(key, tried=True), now)
        self._keep(self._policy_latency, lambda key: knows(key[0], tried=True), now)
        self._keep(self._reuse_ttft, lambda key: knows((key[0], key[1], "", "", 0)), now)
        self._keep(self._retries, lambda key: knows((key[0], "", key[1], "", 0)), now)

    def _keep(self, series: dict[V, Any], knows: Callable[[V], bool], now: float) -> None:
        for key in list(series):
            mark = (id(series), key)  # several series have the same key
            if knows(key):
                self._left_at.pop(mark, None)
            elif now - self._left_at.setdefault(mark, now) > GRACE_S:
                del series[key], self._left_at[mark]

    # --- text ---

    def lines(self, *, is_fine: bool = False) -> Iterator[str]:
        """Everything counted, while counting goes on; histograms with all their edges where ``is_fine``."""
        yield from header("requests_total", "counter", "Requests that ended, by what became of them.")
        for key, series in list(self._series.items()):
            for (reason, outcome), count in list(series.requests.items()):
                yield f'{PREFIX}requests_total{{{_series(key)},reason="{reason}",outcome="{outcome}"}} {count}'
        yield from self._token_lines()
        yield from self._ttft_lines(is_fine=is_fine)
        yield from self._latency_lines(is_fine=is_fine)
        yield from header("retries_total", "counter", "Replicas given up before the first byte, by why.")
        for (pool, replica, cause), count in list(self._retries.items()):
            yield f"{PREFIX}retries_total{{{labels(pool=pool, replica=replica, cause=cause)}}} {count}"

    def _ttft_lines(self, *, is_fine: bool) -> Iterator[str]:
        yield from header(TTFT, "histogram", "Request's last byte to first token, of streamed responses only.")
        for (pool, group, replica), histogram in list(self._ttft.items()):
            where = labels(pool=pool, group=group, replica=replica)
            yield from histogram.lines(f"{PREFIX}{TTFT}", where, is_fine=is_fine)
        if self._policy_ttft:
            yield from header(POLICY_TTFT, "histogram", "The same by revision, of policies that try another one.")
        for (pool, group, _, policy, revision), histogram in list(self._policy_ttft.items()):
            where = labels(pool=pool, group=group, policy=policy, revision=revision)
            yield from histogram.lines(f"{PREFIX}{POLICY_TTFT}", where, is_fine=is_fine)
        if self._reuse_ttft:
            yield from header(REUSE_TTFT, "histogram", "The same by whether half of the prompt came from the cache.")
        for (pool, group, reuse), histogram in list(self._reuse_ttft.items()):
            where = labels(pool=pool, group=group, reuse=reuse)
            yield from histogram.lines(f"{PREFIX}{REUSE_TTFT}", where, is_fine=is_fine)

    def _latency_lines(self, *, is_fine: bool) -> Iterator[str]:
        yield from header(LATENCY, "histogram", "Request's last byte to the last byte of a successful response.")
        for (pool, group, replica, response), histogram in list(self._latency.items()):
            where = labels(pool=pool, group=group, replica=replica, response=response)
            yield from histogram.lines(f"{PREFIX}{LATENCY}", where, is_fine=is_fine)
        if self._policy_latency:
            yield from header(POLICY_LATENCY, "histogram", "The same by revision, of policies that try another one.")
        for ((pool, group, _, policy, revision), response), histogram in list(self._policy_latency.items()):
            where = labels(pool=pool, group=group, policy=policy, revision=revision, response=response)
            yield from histogram.lines(f"{PREFIX}{POLICY_LATENCY}", where, is_fine=is_fine)

    def _token_lines(self) -> Iterator[str]:
        reported = [(key, series.tokens) for key, series in self._series.items() if series.tokens]
        yield from header("usage_reported_total", "counter", "Answers that said how many tokens were cached.")
        for key, tokens in reported:
            yield f"{PREFIX}usage_reported_total{{{_series(key)}}} {tokens.answers}"
        text = "Responses whose usage did not say how many tokens were cached."
        yield from header("usage_without_details_total", "counter", text)
        for key, series in list(self._series.items()):
            if series.without_details:
                yield f"{PREFIX}usage_without_details_total{{{_series(key)}}} {series.without_details}"
        yield from header("prompt_tokens_total", "counter", "Prompt tokens of those answers.")
        for key, tokens in reported:
            yield f"{PREFIX}prompt_tokens_total{{{_series(key)}}} {tokens.prompt}"
        yield from header("cached_tokens_total", "counter", "Of these, tokens that came from the prefix cache.")
        for key, tokens in reported:
            yield f"{PREFIX}cached_tokens_total{{{_series(key)}}} {tokens.cached}"
        yield from _prediction_lines([(key, tokens.predictions) for key, tokens in reported if tokens.predictions])


def _prediction_lines(predictions: list[tuple[SeriesKey, Predictions]]) -> Iterator[str]:
    for name, of, text in PREDICTION_LINES:
        yield from header(name, "counter", text)
        for key, sums in predictions:
            yield f"{PREFIX}{name}{{{_series(key)}}} {getattr(sums, of)}"


def _series(key: SeriesKey) -> str:
    pool, group, replica, policy, revision = key
    return labels(pool=pool, group=group, replica=replica, policy=policy, revision=revision or "")


@dataclass(frozen=True, slots=True)
class _Labels:
    """What may stand beside a pool's name. Of groups and replicas also the empty one, which stands for any."""

    groups: frozenset[str]
    replicas: frozenset[str]
    policies: frozenset[tuple[str, int]]  # with their revisions, those on trial included
    tried: frozenset[tuple[str, int]]  # both revisions of those with a trial


class ConfiguredSeries:
    """The series of one configuration: made once, since every scrape asks about each series. O(1) an answer."""

    __slots__ = ("_pools",)

    def __init__(self, config: RouterConfig) -> None:
        self._pools = {pool.name: _labels(pool) for pool in config.pools}

    def holds(self, key: SeriesKey, *, tried: bool = False) -> bool:
        """Whether all labels are configured. Empty ones stand for any, and so does a policy without a name.

        ``tried``: whether the policy has a trial, too.
        """
        pool, group, replica, policy, revision = key
        if not pool:
            return True
        labels = self._pools.get(pool)
        if labels is None or group not in labels.groups or replica not in labels.replicas:
            return False
        if tried:
            return (policy, revision) in labels.tried
        return not policy or (policy, revision) in labels.policies


def _labels(pool: PoolConfig) -> _Labels:
    policies = [pool.policy, *(group.policy for group in pool.groups if group.policy)]
    in_force = {(policy.name, policy.revision) for policy in policies}
    on_trial = {(policy.name, policy.trial.revision) for policy in policies if policy.trial}
    beside = {(policy.name, policy.revision) for policy in policies if policy.trial}
    return _Labels(
        groups=frozenset(["", *(group.name for group in pool.groups)]),
        replicas=frozenset(["", *(replica.name for replica in pool.replicas)]),
        policies=frozenset(in_force | on_trial),
        tried=frozenset(beside | on_trial),
    )
