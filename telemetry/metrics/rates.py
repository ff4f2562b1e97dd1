"""Two marks of a source -> one reading: what was added, over how long, and how far to trust it.

| state | means | additions |
|---|---|---|
| first | nothing to compare with yet | unknown |
| ok | one interval since the mark before | the difference |
| gap | scrapes were missed in between, no restart: resolution is lost, totals are not (H10) | the difference |
| reset | the source restarted in between: what it counted before its end is lost (H10) | the whole count |
| stale | the scrape failed (H12) | unknown |

Three answers to one question, what share of a replica's prompt tokens was cached, held against each other (H17).

Engines count at admission, routers what each answer told, and routers predicted before they sent. Pairs are compared
that speak of the same requests: engine and answers, as far as the router saw the engine's traffic, and prediction and
answers, of the answers that have both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from telemetry.metrics.histograms import Buckets, Mark, added_buckets, added_counters, is_new_epoch

ACCOUNTED = 0.9995  # share of responses from which on a hit rate is shown as that of all
GAP_INTERVALS = 1.5  # more than this between two marks: a scrape was missed
SET_BACK_S = 120.0  # a mark this far in the past is no late scrape: somebody set the clock back


class ReadingState(StrEnum):
    """How a reading came about."""

    OK = "ok"
    FIRST = "first"
    RESET = "reset"
    GAP = "gap"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Addition:
    """What a source counted between two marks; names that are missing are unknown."""

    state: ReadingState
    interval_s: float | None = None  # seconds that the additions cover
    counters: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Buckets] = field(default_factory=dict)


def advance(before: Mark | None, now: Mark, *, interval_s: float, absent_is_zero: bool = False) -> Addition | None:
    """The reading that ``now`` makes after ``before``; None for a scrape that is late or a duplicate."""
    if before is None or before.at_s - now.at_s > SET_BACK_S:
        return Addition(ReadingState.FIRST)
    if now.at_s <= before.at_s or now.taken_s <= before.taken_s:
        return None
    elapsed = now.taken_s - before.taken_s
    if is_new_epoch(before, now):
        return Addition(ReadingState.RESET, elapsed, dict(now.counters), dict(now.histograms))
    state = ReadingState.GAP if now.at_s - before.at_s > GAP_INTERVALS * interval_s else ReadingState.OK
    return Addition(
        state,
        elapsed,
        added_counters(before, now, absent_is_zero=absent_is_zero),
        added_buckets(before, now, absent_is_zero=absent_is_zero),
    )


def sum_known(values: Iterable[float | None]) -> int | None:
    """The sum of those that are known, a whole number; None where none is."""
    known = [value for value in values if value is not None]
    return int(sum(known)) if known else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """``part / whole``; None where either is unknown or nothing was asked (H11)."""
    return part / whole if part is not None and whole else None


def accounted_ratio(reported: float | None, completed: float | None) -> float | None:
    """Share of successful responses that said how many tokens were cached, 0 to 1 (H16).

    None where no response is known. ``reported`` is None where none has ever said so.
    """
    return min((reported or 0) / completed, 1.0) if completed else None


def hit_rate_ratio(queries: float | None, hits: float | None, external_hits: float | None = None) -> float | None:
    """Total reuse: cached tokens of every tier / queried tokens, both summed over the window first (H1, H2, H3).

    External queries are a subset of the queries, so they are never added to the denominator.
    """
    return ratio(None if hits is None else hits + (external_hits or 0.0), queries)


MOST_POINTS = 5.0  # of 100 that two may differ by
LEAST_REQUESTS = 200  # on either side of a pair
LEAST_SEEN_RATIO = 0.9  # of an engine's requests that the routers must have the answers of


class Agreement(StrEnum):
    """What comes of it."""

    AGREE = "agree"
    DISAGREE = "disagree"
    TOO_FEW = "too_few"
    NOT_REPORTED = "not_reported"


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What an engine counted; None is unknown."""

    queries: float | None = None  # tokens
    hits: float | None = None
    external_hits: float | None = None
    requests: float | None = None
    prompt_tokens: int | None = None  # at the first output, of the same readings (H5)
    reports: bool = True  # False: it has no such counters
    decodes: bool = False  # its cache is filled by transfer (H19)

    @property
    def ratio(self) -> float | None:
        """Total reuse (H3)."""
        return hit_rate_ratio(self.queries, self.hits, self.external_hits)

    @property
    def not_eligible_tokens(self) -> float | None:
        """Prompt tokens that were never looked up: re-admissions, prompt logprobs (H6). About: see H5."""
        if self.queries is None or self.prompt_tokens is None:
            return None
        return max(self.prompt_tokens - self.queries, 0)


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """What routers were told by answers, and what they had predicted of some of them."""

    requests: int | None = None
    answers: int | None = None  # that told their cached tokens (H16)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    predicted_answers: int | None = None
    predicted_prompt_tokens: int | None = None
    predicted_tokens: int | None = None
    predicted_cached_tokens: int | None = None

    @property
    def ratio(self) -> float | None:
        """What answers told."""
        return ratio(self.cached_tokens, self.prompt_tokens)

    @property
    def predicted_ratio(self) -> float | None:
        """What was predicted."""
        return ratio(self.predicted_tokens, self.predicted_prompt_tokens)

    @property
    def delivered_ratio(self) -> float | None:
        """What answers told, of those with a prediction."""
        return ratio(self.predicted_cached_tokens, self.predicted_prompt_tokens)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of comparing; ``points`` is the greatest difference of a pair that could be compared."""

    agreement: Agreement
    reason: str
    points: float | None = None
    rates: tuple[float, float] | None = None  # of that pair, 0 to 1: the engine's or the predicted one, the answers'
    is_of_prediction: bool = False  # that pair: the prediction and the answers; else the engine and the answers


@dataclass(frozen=True, slots=True)
class _Pair:
    agreement: Agreement
    reason: str
    rates: tuple[float, float] | None = None  # None: not to be compared, for ``reason``
    is_of_prediction: bool = False

    @property
    def points(self) -> float | None:
        return None if self.rates is None else abs(self.rates[0] - self.rates[1]) * 100


def compare(engine: EngineCounts, answers: RouterCounts, *, least_requests: float = LEAST_REQUESTS) -> Comparison:
    """Hold the three against each other. A pair that disagrees counts most, then one that agrees."""
    pairs = [_counters(engine, answers, least_requests), _prediction(answers, least_requests)]
    known = [pair for pair in pairs if pair.points is not None]
    worst = max(known, key=lambda pair: pair.points or 0.0, default=None)
    if worst is None:
        few = next((pair for pair in pairs if pair.agreement == Agreement.TOO_FEW), pairs[0])
        return Comparison(few.agreement, few.reason)
    missing = "".join(f" {pair.reason}" for pair in pairs if pair.points is None)
    return Comparison(worst.agreement, worst.reason + missing, worst.points, worst.rates, worst.is_of_prediction)


def _counters(engine: EngineCounts, answers: RouterCounts, least_requests: float) -> _Pair:
    if engine.decodes:
        return _missing("A decode replica's own counters tell of transfers.")
    if not engine.reports:
        return _missing("Hits are not reported by this engine.")
    if engine.requests and answers.requests and not answers.answers:
        return _missing(
            "Answers do not say how many tokens were cached: vLLM does with --enable-prompt-tokens-details."
        )
    fewest = min(engine.requests or 0, answers.answers or 0)
    if engine.ratio is None or answers.ratio is None or fewest < least_requests:
        return _few(f"Fewer than {least_requests:g} requests were counted by both engine and routers.")
    seen = (answers.answers or 0) / (engine.requests or 1)
    if seen < LEAST_SEEN_RATIO:
        return _few(f"Routers have the answers of only {100 * seen:.0f} % of the engine's requests.")
    return _judged((engine.ratio, answers.ratio), "engine's counters")


def _prediction(answers: RouterCounts, least_requests: float) -> _Pair:
    if answers.predicted_answers is None:
        return _missing("The strategy predicts no hits.")
    if (answers.predicted_answers or 0) < least_requests:
        return _few(f"Fewer than {least_requests:g} answers had a prediction.")
    if answers.predicted_ratio is None or answers.delivered_ratio is None:
        return _missing("The answers with a prediction had no tokens.")
    return _judged((answers.predicted_ratio, answers.delivered_ratio), "prediction", is_of_prediction=True)


def _judged(rates: tuple[float, float], what: str, *, is_of_prediction: bool = False) -> _Pair:
    points = abs(rates[0] - rates[1]) * 100
    agreement = Agreement.DISAGREE if points > MOST_POINTS + 1e-9 else Agreement.AGREE
    said = f"The {what} and the answers differ by {points:.1f} points."
    return _Pair(agreement, said, rates, is_of_prediction)


def _missing(reason: str) -> _Pair:
    return _Pair(Agreement.NOT_REPORTED, reason)


def _few(reason: str) -> _Pair:
    return _Pair(Agreement.TOO_FEW, reason)
