"""Stored decisions read as columns equal what the collector stored, whatever is missing."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

from telemetry.lab.chains import Requests
from telemetry.models import Decision
from telemetry.storage.decisions import captured_between, counts, first_at, requests_between
from tests.telemetry.conftest import T0
from tests.telemetry.decisions import store
from tests.telemetry.lab.traces import columns, request

pytestmark = pytest.mark.django_db
HIGHEST = (1 << 64) - 1
REQUESTS = [
    request(0, [1, HIGHEST, 1 << 63], group="g\x1f", replica="a#b"),
    request(1, [], replica="b", block_count=0),
    request(2, [5, 6], positions=[3, 700], block_count=900, sample_ratio=0.25, group="ü, {null}"),
    request(3, [], positions=[], block_count=4, sample_ratio=0.25),
    request(4, [7], prompt_tokens=None, cached_tokens=None, block_tokens=None),
    request(5, list(range(8, 300)), cached_tokens=0, prompt_tokens=0),
]
AT = [request._replace(at_s=request.at_s + T0.timestamp()) for request in REQUESTS]
END = T0 + timedelta(minutes=1)


def plain(requests: Requests) -> dict[str, object]:
    """Columns as lists, with -1 for unknown values."""
    arrays = {name: getattr(requests, name) for name in Requests.__dataclass_fields__}
    lists = {
        name: np.nan_to_num(array, nan=-1).tolist() for name, array in arrays.items() if isinstance(array, np.ndarray)
    }
    names = {name: [arrays[name].names[code] for code in arrays[name].codes] for name in ("groups", "replicas")}
    return lists | names


def test_columns_are_in_the_order_of_time():
    for ratio in (0.25, 1.0):  # a page has one ratio
        store([stored for stored in reversed(AT) if stored.sample_ratio == ratio])
    assert plain(requests_between("chat", T0, END, at_most=100)) == plain(columns(AT))
    assert plain(requests_between("chat", T0, END, at_most=2)) == plain(columns(AT[:2]))
    assert plain(captured_between("chat", T0, END, at_most=4).requests) == plain(columns(AT[2:]))
    assert plain(Requests.concatenated([columns(AT[:2]), columns([]), columns(AT[2:])])) == plain(columns(AT))


def test_replicas_include_the_rank_and_failures_are_left_out():
    store(AT)
    Decision.objects.filter(at__lt=T0 + timedelta(seconds=1)).update(rank=2)
    Decision.objects.filter(at__gte=T0 + timedelta(seconds=2)).update(status=503)
    found = requests_between("chat", T0, END, at_most=100)
    assert plain(found)["replicas"] == ["a#b#2", "b"]
    assert counts("chat", T0, END, timedelta(minutes=1)) == {T0: 2}
    assert first_at("chat", T0, END) == T0


def test_without_decisions_columns_are_empty():
    found = requests_between("chat", T0, END, at_most=100)
    assert (len(found), len(found.blocks), found.groups.names) == (0, 0, [])
    assert first_at("chat", T0, END) is None
