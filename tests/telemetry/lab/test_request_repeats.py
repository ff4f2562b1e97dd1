"""Repeats of captured requests: hits and followers by time to live, and what a sample says about all requests."""

from __future__ import annotations

from math import nan
from random import Random

import numpy as np
import pytest

from telemetry.lab.chains import coded
from telemetry.lab.request_repeats import DigestedRequests, repeats_of, served_with

PROMPT, CACHED, GENERATED = 100.0, 40.0, 7.0


def digested(rows: list[tuple[int, float, float]], sample_ratio: float = 1.0, group: str = "faq") -> DigestedRequests:
    """Requests as (digest, time of arrival, latency)."""
    digests, at_s, latency_s = zip(*rows, strict=True) if rows else ((), (), ())
    tokens = [np.full(len(rows), value) for value in (PROMPT, CACHED, GENERATED)]
    return DigestedRequests(
        coded([group] * len(rows)),
        np.array(digests, np.uint64),
        np.array(at_s, np.float64),
        np.array(latency_s, np.float64),
        *tokens,
        sample_ratio=sample_ratio,
    )


def found(requests: DigestedRequests, ttl_s: int) -> str:
    """What becomes of each request: s(ent), h(it) or f(ollower)."""
    served = served_with(requests, ttl_s)
    return "".join(
        "h" if hit else "f" if follows else "s" for hit, follows in zip(served.hits, served.followers, strict=True)
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(1, 0, 2), (1, 10, 2), (2, 11, 2)], "shs"),
        ([(1, 0, 2), (1, 1.5, 2), (1, 1.9, 2)], "sff"),  # while the first is running
        ([(1, 0, 2), (1, 61.9, 2), (1, 62, 2)], "shs"),  # the entry is stored at 2 s, and its lifetime begins then
        ([(1, 0, 2), (1, 50, 2), (1, 70, 2), (1, 71, 2)], "shsf"),  # a hit does not renew the entry
        ([(1, 0, nan), (1, 1, 2), (1, 9, 2)], "ssh"),  # an incomplete response is not stored
        ([], ""),
    ],
)
def test_an_entry_lives_from_the_end_of_its_response(rows, expected):
    assert found(digested(rows), ttl_s=60) == expected


def test_a_seeded_history_agrees_with_a_dictionary_of_entries():
    random = Random(7)
    at_s, rows = 0.0, []
    for _ in range(3000):
        at_s += random.expovariate(2.0)
        rows.append((random.randrange(200), at_s, random.choice((0.2, 3.0, 20.0, nan))))
    complete: dict[int, float] = {}
    expected = ""
    for digest, at, latency_s in rows:
        complete_s = complete.get(digest, -1e9)
        outcome = "f" if at < complete_s else "h" if at < complete_s + 30 else "s"
        if outcome == "s":
            complete[digest] = -1e9 if np.isnan(latency_s) else at + latency_s
        expected += outcome

    assert {"s", "h", "f"} == set(expected)
    assert found(digested(rows), ttl_s=30) == expected


def test_tokens_are_those_of_the_repeats_alone():
    requests = digested([(1, 0, 1), (1, 5, 1), (2, 6, 1), (1, 7, 1)])
    repeats = repeats_of(requests, served_with(requests, 60), np.arange(4))

    assert (repeats.cacheable_requests, repeats.hits, repeats.followers, repeats.repeat_ratio) == (4, 2, 0, 0.5)
    assert (repeats.prompt_tokens, repeats.uncached_prompt_tokens, repeats.generated_tokens) == (200, 120, 14)
    assert repeats.standard_error == 0


def test_unknown_tokens_are_none_and_partly_known_ones_are_extended():
    requests = digested([(1, 0, 1), (1, 5, 1), (1, 6, 1)])
    requests.generated_tokens[:] = nan
    requests.cached_tokens[2] = nan
    repeats = repeats_of(requests, served_with(requests, 60), np.arange(3))

    assert repeats.generated_tokens is None
    assert repeats.uncached_prompt_tokens == 120
    assert repeats_of(requests, served_with(requests, 60), np.arange(0)).repeat_ratio is None


@pytest.mark.parametrize(("skew", "covered"), [(1.0, 55), (1.6, 50), (2.0, 46)])  # most frequent: 0.25, 2.4 and 5 %
def test_a_sample_of_the_prompts_estimates_the_repeats_of_all(skew, covered):
    errors, inside = [], 0
    for seed in range(60):
        random = Random(seed)
        rows = [(int(400 * random.random() ** skew), float(second), 0.5) for second in range(4000)]
        everything = digested(rows)
        share = repeats_of(everything, served_with(everything, 300), np.arange(len(rows))).repeat_ratio
        chosen = {digest for digest in range(400) if random.random() < 0.25}
        part = digested([row for row in rows if row[0] in chosen], 0.25)
        estimate = repeats_of(part, served_with(part, 300), np.arange(len(part)))
        errors.append(estimate.repeat_ratio - share)
        inside += abs(estimate.repeat_ratio - share) <= 1.96 * estimate.standard_error

    assert abs(np.mean(errors)) < 0.02
    assert inside >= covered


def test_a_small_sample_has_no_standard_error():
    part = digested([(digest, 10.0 * digest, 1.0) for digest in range(19)], 0.25)
    assert repeats_of(part, served_with(part, 60), np.arange(19)).standard_error is None
