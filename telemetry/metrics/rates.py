"""Hit rates, and the comparison of the three independent hit rates of one replica (H17).

Engines count cached tokens at admission, routers sum what each response reports, and routers predict hits before they
send a request. Only pairs that describe the same requests are compared: engine and responses where routers saw nearly
all of the engine's requests, and predictions and responses for the responses that have both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

UPPER_BOUND = "At most: vLLM before about 0.23 leaves cached tokens out where there are none."
NEARLY_ALL = 0.9995  # of all responses; a hit rate of fewer is shown with the share that it covers
MAX_DIFFERENCE_POINTS = 5.0  # percentage points by which two rates may differ
MIN_REQUESTS = 200  # on either side of a pair
MIN_COVERED_RATIO = 0.9  # of an engine's requests that the routers' responses must cover


def sum_known(values: Iterable[float | None]) -> int | None:
    """The sum of the known values, a whole number; None where none is known."""
    known = [value for value in values if value is not None]
    return int(sum(known)) if known else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """``part / whole``; None where either is unknown or ``whole`` is 0 (H11)."""
    return part / whole if part is not None and whole else None


def accounted_ratio(reported: float | None, completed: float | None) -> float | None:
    """Share of successful responses that reported their cached tokens, 0 to 1 (H16).

    None where no response is known. ``reported`` is None where no response has ever reported them.
    """
    return min((reported or 0) / completed, 1.0) if completed else None


def hit_rate_ratio(queries: float | None, hits: float | None, external_hits: float | None = None) -> float | None:
    """Hit rate: cached tokens of every cache tier / queried tokens, each summed over the window first (H1, H2, H3).

    External queries are a subset of the queries, so they are never added to the denominator.
    """
    return ratio(None if hits is None else hits + (external_hits or 0.0), queries)


class Agreement(StrEnum):
    """The result of a comparison."""

    AGREE = "agree"
    DISAGREE = "disagree"
    TOO_FEW = "too_few"
    NOT_REPORTED = "not_reported"


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """Counts of an engine over a window; None is unknown."""

    queries: float | None = None  # tokens
    hits: float | None = None
    external_hits: float | None = None
    requests: float | None = None
    prompt_tokens: int | None = None  # at the first output, of the same readings (H5)
    reports: bool = True  # False: the engine has no such counters
    is_decode: bool = False  # a decode replica: its cache is filled by transfer (H19)

    @property
    def ratio(self) -> float | None:
        """Hit rate with external hits (H3)."""
        return hit_rate_ratio(self.queries, self.hits, self.external_hits)

    @property
    def not_eligible_tokens(self) -> float | None:
        """Prompt tokens that were never looked up: re-admissions, prompt logprobs (H6). Approximate: see H5."""
        if self.queries is None or self.prompt_tokens is None:
            return None
        return max(self.prompt_tokens - self.queries, 0)


@dataclass(frozen=True, slots=True)
class RouterCounts:
    """What responses of a replica reported to the routers, and what routers predicted for some of them."""

    requests: int | None = None
    reported_responses: int | None = None  # responses that reported their cached tokens (H16)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    predicted_responses: int | None = None  # responses with a prediction and cached tokens; the next three are theirs
    predicted_prompt_tokens: int | None = None
    predicted_tokens: int | None = None  # predicted to be cached
    predicted_cached_tokens: int | None = None

    @property
    def ratio(self) -> float | None:
        """Reported cached tokens / prompt tokens."""
        return ratio(self.cached_tokens, self.prompt_tokens)

    @property
    def predicted_ratio(self) -> float | None:
        """Predicted cached tokens / prompt tokens, of the responses with a prediction."""
        return ratio(self.predicted_tokens, self.predicted_prompt_tokens)

    @property
    def delivered_ratio(self) -> float | None:
        """Reported cached tokens / prompt tokens, of the responses with a prediction."""
        return ratio(self.predicted_cached_tokens, self.predicted_prompt_tokens)

    @property
    def share_predicted(self) -> float | None:
        """Responses with a prediction / responses that reported cached tokens, at most 1."""
        share = ratio(self.predicted_responses, self.reported_responses)
        return None if share is None else min(share, 1.0)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing one pair, or the worse of two pairs."""

    agreement: Agreement
    reason: str
    rates: tuple[float, float] | None = None  # 0 to 1: the engine's or the predicted one, the responses'; None: unknown
    is_of_prediction: bool = False  # the pair is prediction and responses; else engine and responses

    @property
    def points(self) -> float | None:
        """Difference of the two rates in percentage points."""
        return None if self.rates is None else abs(self.rates[0] - self.rates[1]) * 100


def compare(engine: EngineCounts, responses: RouterCounts, *, min_requests: float = MIN_REQUESTS) -> Comparison:
    """Compare the three rates. The pair that differs most is the result; reasons of a pair without rates are added."""
    pairs = (_compare_engine(engine, responses, min_requests), _compare_prediction(responses, min_requests))
    compared = [pair for pair in pairs if pair.rates is not None]
    if not compared:
        return next((pair for pair in pairs if pair.agreement == Agreement.TOO_FEW), pairs[0])
    worst = max(compared, key=lambda pair: pair.points or 0.0)
    missing = "".join(f" {pair.reason}" for pair in pairs if pair.rates is None)
    return Comparison(worst.agreement, worst.reason + missing, worst.rates, worst.is_of_prediction)


def _compare_engine(engine: EngineCounts, responses: RouterCounts, min_requests: float) -> Comparison:
    if engine.is_decode:
        return Comparison(Agreement.NOT_REPORTED, "The counters of a decode replica describe transfers.")
    if not engine.reports:
        return Comparison(Agreement.NOT_REPORTED, "Hits are not reported by this engine.")
    if engine.requests and responses.requests and not responses.reported_responses:
        reason = "Responses do not report cached tokens: vLLM does with --enable-prompt-tokens-details."
        return Comparison(Agreement.NOT_REPORTED, reason)
    fewest = min(engine.requests or 0, responses.reported_responses or 0)
    if engine.ratio is None or responses.ratio is None or fewest < min_requests:
        reason = f"Fewer than {min_requests:g} requests were counted by both engine and routers."
        return Comparison(Agreement.TOO_FEW, reason)
    covered = (responses.reported_responses or 0) / (engine.requests or 1)
    if covered < MIN_COVERED_RATIO:
        reason = f"Routers have the responses of only {100 * covered:.0f} % of the engine's requests."
        return Comparison(Agreement.TOO_FEW, reason)
    return _compare_rates((engine.ratio, responses.ratio), "engine's counters")


def _compare_prediction(responses: RouterCounts, min_requests: float) -> Comparison:
    if responses.predicted_responses is None:
        return Comparison(Agreement.NOT_REPORTED, "The strategy predicts no hits.")
    if responses.predicted_responses < min_requests:
        return Comparison(Agreement.TOO_FEW, f"Fewer than {min_requests:g} responses had a prediction.")
    if responses.predicted_ratio is None or responses.delivered_ratio is None:
        return Comparison(Agreement.NOT_REPORTED, "The responses with a prediction had no tokens.")
    rates, share = (responses.predicted_ratio, responses.delivered_ratio), responses.share_predicted
    part = f"{share * 100:.0f} % of responses that had one" if share is not None and share < NEARLY_ALL else "responses"
    return _compare_rates(rates, "prediction", part, is_of_prediction=True)


def _compare_rates(
    rates: tuple[float, float], source: str, part: str = "responses", *, is_of_prediction: bool = False
) -> Comparison:
    points = abs(rates[0] - rates[1]) * 100
    agreement = Agreement.DISAGREE if points > MAX_DIFFERENCE_POINTS + 1e-9 else Agreement.AGREE
    reason = f"The {source} and the {part} differ by {points:.1f} points."
    return Comparison(agreement, reason, rates, is_of_prediction)
