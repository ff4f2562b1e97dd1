"""Parses the text exposition format into samples, with limits: whatever a replica sends is untrusted input.

Theory of operation. A vLLM replica serves some 700 lines, of which Warmpath reads about 80, so lines are filtered by
prefix before they are parsed. The part before a line's value (name and labels) is the same at every scrape:
prometheus_client parses it once and a bounded cache keeps the result, so a scrape costs one dictionary look-up and one
``float()`` per line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from prometheus_client.parser import text_string_to_metric_families

MAX_BYTES = 4 << 20
MAX_SERIES = 10_000
ROUTER_BYTES = 32 << 20  # a router is trusted; one with 200 groups and 1,000 replicas has some 100,000 series
ROUTER_SERIES = 200_000
MAX_LABEL_CHARS = 200
MAX_LINE_CHARS = 4096
CACHED_SERIES = 8192  # at most 32 MiB of parsed names and labels


class ExpositionError(ValueError):
    """The text is malformed, torn or beyond a limit. No sample of it may be used."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line. ``value`` may be NaN or infinite."""

    name: str
    labels: dict[str, str]  # shared between scrapes: read-only
    value: float


def read_samples(
    text: str, names: Iterable[str], *, max_bytes: int = MAX_BYTES, max_series: int = MAX_SERIES
) -> list[Sample]:
    """The samples whose name is one of ``names``, in order; ExpositionError for a malformed, torn or huge text."""
    if len(text) > max_bytes:
        raise ExpositionError(f"more than {max_bytes} characters")
    if not text.endswith("\n"):
        raise ExpositionError("the text ends inside a line")
    selected = frozenset(names)
    lines = [line for line in text.split("\n") if line and line[0] != "#"]
    if len(lines) > max_series:
        raise ExpositionError(f"more than {max_series} series")
    prefixes = tuple(selected)
    return [
        _sample(line)
        for line in lines
        if line.startswith(prefixes) and line.partition("{")[0].partition(" ")[0] in selected
    ]


def newest_labels(text: str, name: str) -> dict[str, str] | None:
    """Labels of the newest sample of a gauge whose values are Unix times.

    None where there is no sample, one is malformed, or the newest is longer than MAX_LINE_CHARS. No other figure
    depends on the gauge, so it does not fail the scrape.
    """
    begin = f"{name}{{"
    try:
        samples = [_split_line(line) for line in text.split("\n") if line.startswith(begin)] if begin in text else []
        times = [float(value) for _, value in samples]
        if not times or not all(map(math.isfinite, times)):
            return None
        series, _ = samples[times.index(max(times))]
        return None if len(series) > MAX_LINE_CHARS else _parsed(series)[1]
    except (ExpositionError, ValueError):
        return None


def _sample(line: str) -> Sample:
    if len(line) > MAX_LINE_CHARS:
        raise ExpositionError(f"a line of more than {MAX_LINE_CHARS} characters")
    series, value = _split_line(line)
    name, labels = _series(series)
    try:
        return Sample(name, labels, float(value))
    except ValueError:
        raise ExpositionError(f"{name}: the value is not a number") from None


def _split_line(line: str) -> tuple[str, str]:
    """A line as (name and labels, value) without its timestamp. Label values may contain blanks and braces."""
    series, brace, rest = line.rpartition("}")
    fields = rest.split()
    if not brace:
        series, *fields = fields or [""]
    if not 1 <= len(fields) <= 2 or "_" in fields[0]:
        raise ExpositionError("expected lines of the form name{labels} value")
    return series + brace, fields[0]


@lru_cache(maxsize=CACHED_SERIES)
def _series(series: str) -> tuple[str, dict[str, str]]:
    name, labels = _parsed(series)
    if any(len(value) > MAX_LABEL_CHARS for value in labels.values()):
        raise ExpositionError(f"a label of more than {MAX_LABEL_CHARS} characters")
    return name, labels


def _parsed(series: str) -> tuple[str, dict[str, str]]:
    try:
        (family,) = text_string_to_metric_families(f"{series} 0\n")
        (sample,) = family.samples
    except (ValueError, IndexError) as error:
        raise ExpositionError("the name or labels of a line are malformed") from error
    if sample.value != 0 or sample.timestamp is not None:  # an exemplar, or text between the braces and the value
        raise ExpositionError("expected lines of the form name{labels} value")
    if "\0" in series:
        raise ExpositionError("a label contains a NUL character")
    return sample.name, dict(sample.labels)
