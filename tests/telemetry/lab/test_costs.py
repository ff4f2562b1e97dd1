"""Savings a day from a breakdown, a prefill rate and a price; None for whatever is unknown."""

from dataclasses import replace

import pytest

from telemetry.lab.breakdown import Breakdown
from telemetry.lab.costs import Prefill, Price, Savings, prefill_of

PRICE = Price(gpu_hour=3.6, gpus_per_replica=2, currency="USD")  # 0.002 a second, 172.80 a day
BREAKDOWN = Breakdown(
    prompt_tokens=1_000_000,
    reachable=800_000,
    capacity=700_000,
    split=650_000,
    best=600_000,
    predicted=550_000,
    delivered=500_000,
    requests=1000,
    sample_ratio=1.0,
)


def test_a_replica_costs_its_gpus():
    assert PRICE.replica_s == pytest.approx(0.002)
    assert PRICE.replica_day == pytest.approx(172.8)
    assert Price.of({"gpu_hour_price": 3.6, "gpus_per_replica": 2, "currency": "USD"}) == PRICE
    assert Price.of(None) is None


def test_an_hour_is_extrapolated_to_a_day():
    savings = Savings.of(BREAKDOWN, 3600, 1000, PRICE)

    assert savings.requests == 1000
    assert savings.prompt_tokens_per_day == pytest.approx(24_000_000)
    assert savings.saved_per_day == Prefill(12_000_000, 12_000, pytest.approx(24.0))
    assert savings.missed_per_day == Prefill(7_200_000, 7200, pytest.approx(14.4))
    assert savings.computed_per_day == Prefill(12_000_000, 12_000, pytest.approx(24.0))


@pytest.mark.parametrize(
    ("breakdown", "rate", "price", "saved", "missed"),
    [
        (BREAKDOWN, None, PRICE, Prefill(500_000, None, None), Prefill(300_000, None, None)),
        (BREAKDOWN, 1000, None, Prefill(500_000, 500, None), Prefill(300_000, 300, None)),
        (replace(BREAKDOWN, delivered=None), 1000, PRICE, Prefill(None, None, None), Prefill(None, None, None)),
        (replace(BREAKDOWN, reachable=None), 1000, None, Prefill(500_000, 500, None), Prefill(None, None, None)),
        (replace(BREAKDOWN, delivered=900_000), 1000, None, Prefill(900_000, 900, None), Prefill(0, 0, None)),
    ],
)
def test_what_is_unknown_stays_unknown(breakdown, rate, price, saved, missed):
    savings = Savings.of(breakdown, 86_400, rate, price)
    assert (savings.saved_per_day, savings.missed_per_day) == (saved, missed)


def test_no_tokens_are_no_time_and_no_money():
    assert prefill_of(0.0, 1000, PRICE) == Prefill(0.0, 0.0, 0.0)
