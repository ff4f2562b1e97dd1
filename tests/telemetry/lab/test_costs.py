"""Prefill time and money of tokens."""

import pytest

from telemetry.lab.costs import Prefill, Price, prefill_of

PRICE = Price(gpu_hour=3.6, gpus_per_replica=2, currency="USD")  # 0.002 a second, 172.80 a day


def test_a_replica_costs_its_gpus():
    assert PRICE.replica_s == pytest.approx(0.002)
    assert PRICE.replica_day == pytest.approx(172.8)
    assert Price.of({"gpu_hour_price": 3.6, "gpus_per_replica": 2, "currency": "USD"}) == PRICE
    assert Price.of(None) is None


def test_no_tokens_are_no_time_and_no_money_and_what_is_unknown_stays_unknown():
    assert prefill_of(0.0, 1000, PRICE) == Prefill(0.0, 0.0, 0.0)
    assert prefill_of(500.0, None, PRICE) == Prefill(500.0, None, None)
    assert prefill_of(500.0, 1000, None) == Prefill(500.0, 0.5, None)
