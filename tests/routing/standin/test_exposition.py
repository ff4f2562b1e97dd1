"""The writer of the text exposition format."""

from __future__ import annotations

import math

import pytest

from routing.simulation.statistics import Histogram, request_token_edges
from routing.standin.metrics import Family, label_text, number, render


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.0"),
        (9, "9.0"),
        (306127, "306127.0"),
        (619069440, "6.1906944e+08"),
        (1802537, "1.802537e+06"),
        (10_000_000, "1e+07"),
        (0.83984375, "0.83984375"),
        (1e-07, "1e-07"),
        (1795195532.9163601, "1.7951955329163601e+09"),
        (math.inf, "+Inf"),
    ],
)
def test_numbers_are_formatted_as_by_prometheus_client(value: float, text: str) -> None:
    assert number(value) == text


def test_labels_are_in_alphabetical_order_and_escaped() -> None:
    assert label_text({"b": 'say "hi"\n', "a": "back\\slash"}) == '{a="back\\\\slash",b="say \\"hi\\"\\n"}'
    assert label_text({}) == ""


def test_a_histogram_is_cumulative_with_count_before_sum() -> None:
    histogram = Histogram((1, 5))
    for value in (0.5, 1.0, 3.0, 9.0):
        histogram.observe(value)
    family = Family("h", "histogram", "Some help.")
    family.histogram({"x": "y"}, histogram)

    assert render([family]).decode().splitlines() == [
        "# HELP h Some help.",
        "# TYPE h histogram",
        'h_bucket{le="1.0",x="y"} 2.0',
        'h_bucket{le="5.0",x="y"} 3.0',
        'h_bucket{le="+Inf",x="y"} 4.0',
        'h_count{x="y"} 4.0',
        'h_sum{x="y"} 13.5',
    ]


def test_request_buckets_go_up_to_the_longest_request() -> None:
    assert request_token_edges(16_384) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000]
    assert request_token_edges(5) == [1, 2, 5]
