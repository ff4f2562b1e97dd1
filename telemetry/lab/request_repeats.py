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
from typing import Any

import numpy as np

from telemetry.lab.captured import Booleans
from telemetry.lab.chains import Coded, Floats, Hashes, Integers

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
    """Which requests a response cache would have answered."""

    hits: Booleans
    followers: Booleans  # during the request whose response they get

    @property
    def either(self) -> Booleans:
        """Requests that would not have been sent to a replica."""
        return self.hits | self.followers


@dataclass(frozen=True, slots=True)
class Repeats:
    """Requests that a cache would have answered, and what they cost without one. Of a sample: extended to all."""

    cacheable: float  # requests
    hits: float
    followers: float
    standard_error: float | None  # of ``ratio``, from sampling; 0: all were counted; None: too few to tell
    prompt_tokens: float | None  # None: no response reports them
    uncached_tokens: float | None  # of those, without what the engine's prefix cache had
    generated_tokens: float | None

    @property
    def ratio(self) -> float | None:
        """The share of the cacheable requests that the cache would have answered; None without any."""
        return (self.hits + self.followers) / self.cacheable if self.cacheable else None

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "cacheable_requests": self.cacheable,
            "hits": self.hits,
            "followers": self.followers,
            "repeat_ratio": self.ratio,
            "standard_error": self.standard_error,
            "prompt_tokens": self.prompt_tokens,
            "uncached_prompt_tokens": self.uncached_tokens,
            "generated_tokens": self.generated_tokens,
        }


def served_with(requests: DigestedRequests, ttl_s: float) -> Served:
    """The requests that a cache with this time to live would have answered."""
    served = Served(np.zeros(len(requests), np.bool_), np.zeros(len(requests), np.bool_))
    order = np.lexsort((requests.at_s, requests.digests))
    digests = requests.digests[order]
    if not len(order):
        return served
    edges = np.flatnonzero(np.concatenate(([True], digests[1:] != digests[:-1], [True])))
    for start, end in pairwise(edges.tolist()):
        if end - start > 1:
            _serve(requests, order[start:end], ttl_s, served)
    return served


def _serve(requests: DigestedRequests, rows: Integers, ttl_s: float, served: Served) -> None:
    """Mark those of some equal requests that would have been answered."""
    complete_s = -inf  # when the newest response is complete
    times = zip(rows.tolist(), requests.at_s[rows].tolist(), requests.latency_s[rows].tolist(), strict=True)
    for row, at_s, latency_s in times:
        if at_s < complete_s:
            served.followers[row] = True
        elif at_s < complete_s + ttl_s:
            served.hits[row] = True
        else:
            complete_s = -inf if isnan(latency_s) else at_s + latency_s


def repeats_of(requests: DigestedRequests, served: Served, rows: Integers) -> Repeats:
    """The repeats among these rows."""
    scale = 1 / requests.sample_ratio
    is_repeat = served.either[rows]
    repeated = rows[is_repeat]
    return Repeats(
        scale * len(rows),
        scale * int(served.hits[rows].sum()),
        scale * int(served.followers[rows].sum()),
        _standard_error(requests.digests[rows], is_repeat, requests.sample_ratio),
        _extended(requests.prompt_tokens[repeated], scale),
        _extended((requests.prompt_tokens - requests.cached_tokens)[repeated], scale),
        _extended(requests.generated_tokens[repeated], scale),
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
