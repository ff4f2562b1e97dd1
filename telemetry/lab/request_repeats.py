"""How often captured requests repeat: what an exact response cache would answer before any task group has one. Pure.

Theory of operation. Requests with the same digest would have the same cache entry. The first is sent to a replica; its
response is stored when it is complete and served until its time to live has passed, and a hit does not renew it. Those
that arrive before the response is complete follow it (single flight) and cost nothing either. A response that was never
complete is not stored. The cache begins empty and is shared by all routers.

A sample has all requests of some prompts and none of the others, so repeats are not thinned out. Distinct requests are
the sampled units: the standard error of the share of repeats is that of a ratio estimator over them (Cochran, "Sampling
Techniques", 1977, 6.3), with jackknife residuals, because few requests may be most of the traffic. It cannot know of a
very frequent request that the sample misses: if the most frequent one is 5 % of the traffic, 95 % intervals from a
quarter of 400 distinct requests contain the true share in 49 of 60 cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf, isnan, sqrt
from typing import Annotated

import numpy as np
from msgspec import Meta

from telemetry.lab.captured import Booleans
from telemetry.lab.chains import Coded, Floats, Hashes, Integers
from telemetry.lab.costs import Prefill, Price, prefill_of
from telemetry.lab.worth import NORMAL_95

MIN_DISTINCT = 20  # distinct requests of a sample from which a standard error is estimated


@dataclass(frozen=True, slots=True)
class DigestedRequests:
    """Requests with a digest and a successful response, by time of arrival, as columns. NaN: unknown."""

    groups: Coded
    digests: Hashes
    at_s: Floats
    latency_s: Floats  # until the response was complete
    prompt_tokens: Floats
    cached_tokens: Floats  # of those, in the engine's prefix cache
    generated_tokens: Floats
    sample_ratio: float  # part of the prompts whose requests are here

    def __len__(self) -> int:
        return len(self.digests)


@dataclass(frozen=True, slots=True)
class Served:
    """Which requests a response cache with this time to live would have answered."""

    ttl_s: int
    hits: Booleans
    followers: Booleans  # during the request whose response they get

    @property
    def either(self) -> Booleans:
        """Requests that would not have been sent to a replica."""
        return self.hits | self.followers


@dataclass(frozen=True, slots=True)
class Repeats:
    """What an exact cache with one time to live would have answered in the window; of a sample, extended to all."""

    ttl_s: int
    cacheable_requests: float
    hits: Annotated[float, Meta(description="stored earlier, within the time to live")]
    followers: Annotated[float, Meta(description="while an identical request was running")]
    repeat_ratio: Annotated[float | None, Meta(description="(hits + followers) / cacheable requests")]
    standard_error: Annotated[
        float | None, Meta(description="of repeat_ratio, from sampling; 0: not sampled; null: too few to tell")
    ]
    prompt_tokens: Annotated[float | None, Meta(description="of the repeats; null: no response reports them")]
    uncached_prompt_tokens: Annotated[float | None, Meta(description="of those, computed without prefix caches")]
    generated_tokens: Annotated[float | None, Meta(description="of the repeats")]
    prefill: Annotated[Prefill, Meta(description="of the uncached prompt tokens, in the window")]

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the share of repeats, from sampling; None: all were counted, or too few to tell."""
        if self.repeat_ratio is None or not self.standard_error:
            return None
        margin = NORMAL_95 * self.standard_error
        return max(0.0, self.repeat_ratio - margin), min(1.0, self.repeat_ratio + margin)


def served_with(requests: DigestedRequests, ttl_s: int) -> Served:
    """The requests that a cache with this time to live would have answered."""
    served = Served(ttl_s, np.zeros(len(requests), np.bool_), np.zeros(len(requests), np.bool_))
    order = np.lexsort((requests.at_s, requests.digests))
    digests = requests.digests[order]
    if not len(order):
        return served
    edges = np.flatnonzero(np.concatenate(([True], digests[1:] != digests[:-1], [True])))
    for start, end in pairwise(edges.tolist()):
        if end - start > 1:
            _serve(requests, order[start:end], served)
    return served


def _serve(requests: DigestedRequests, rows: Integers, served: Served) -> None:
    """Mark those of some equal requests that would have been answered."""
    complete_s = -inf  # when the newest response is complete
    times = zip(rows.tolist(), requests.at_s[rows].tolist(), requests.latency_s[rows].tolist(), strict=True)
    for row, at_s, latency_s in times:
        if at_s < complete_s:
            served.followers[row] = True
        elif at_s < complete_s + served.ttl_s:
            served.hits[row] = True
        else:
            complete_s = -inf if isnan(latency_s) else at_s + latency_s


def repeats_of(
    requests: DigestedRequests, served: Served, rows: Integers, rate: float | None = None, price: Price | None = None
) -> Repeats:
    """The repeats among these rows; ``rate``: prefill, in tokens/s of a replica."""
    scale = 1 / requests.sample_ratio
    is_repeat = served.either[rows]
    repeated = rows[is_repeat]
    uncached_tokens = _extended((requests.prompt_tokens - requests.cached_tokens)[repeated], scale)
    return Repeats(
        served.ttl_s,
        scale * len(rows),
        scale * int(served.hits[rows].sum()),
        scale * int(served.followers[rows].sum()),
        len(repeated) / len(rows) if len(rows) else None,
        _standard_error(requests.digests[rows], is_repeat, requests.sample_ratio),
        _extended(requests.prompt_tokens[repeated], scale),
        uncached_tokens,
        _extended(requests.generated_tokens[repeated], scale),
        prefill_of(uncached_tokens, rate, price),
    )


def _extended(tokens: Floats, scale: float) -> float | None:
    """The sum, with the mean in place of unknown values; None if all are unknown."""
    if not len(tokens):
        return 0.0
    known = tokens[~np.isnan(tokens)]
    return float(known.mean()) * len(tokens) * scale if len(known) else None


def _standard_error(digests: Hashes, is_repeat: Booleans, sample_ratio: float) -> float | None:
    """Standard error of the share of repeats."""
    if sample_ratio >= 1:
        return 0.0
    distinct, codes = np.unique(digests, return_inverse=True)
    if len(distinct) < MIN_DISTINCT:
        return None
    shares = np.bincount(codes, minlength=len(distinct)) / len(digests)
    residuals = np.bincount(codes, is_repeat - is_repeat.mean(), len(distinct)) / (1 - shares)
    return sqrt((1 - sample_ratio) * float((residuals**2).sum())) / len(digests)
