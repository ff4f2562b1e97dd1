"""Stored decisions as columns: what the collector stored comes back, whatever is missing."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest

from telemetry.lab.chains import Requests
from telemetry.models import Decision
from telemetry.storage.decisions import counts, first_at, latest_requests, requests_between
from tests.telemetry.conftest import T0
from tests.telemetry.decisions import store
from tests.telemetry.lab.traces import columns, request

pytestmark = pytest.mark.django_db
HIGHEST = (1 << 64) - 1
TOLD = [
    request(0, [1, HIGHEST, 1 << 63], group="g\x1f", replica="a#b"),
    request(1, [], replica="b", block_count=0),
    request(2, [5, 6], positions=[3, 700], block_count=900, sample_ratio=0.25, group="ü, {null}"),
    request(3, [], positions=[], block_count=4, sample_ratio=0.25),
    request(4, [7], prompt_tokens=None, cached_tokens=None, block_tokens=None),
    request(5, list(range(8, 300)), cached_tokens=0, prompt_tokens=0),
]
AT = [one._replace(at_s=one.at_s + T0.timestamp()) for one in TOLD]
END = T0 + timedelta(minutes=1)


def shown(requests: Requests) -> dict[str, object]:
    """Columns as lists, in which all that is unknown is the same."""
    told = {name: getattr(requests, name) for name in Requests.__dataclass_fields__}
    plain = {name: np.nan_to_num(one, nan=-1).tolist() for name, one in told.items() if isinstance(one, np.ndarray)}
    names = {name: [told[name].names[code] for code in told[name].codes] for name in ("groups", "replicas")}
    return plain | names


def test_what_was_stored_comes_back_in_the_order_of_time():
    for ratio in (0.25, 1.0):  # of a page; decisions with all their blocks say so themselves
        store([one for one in reversed(AT) if one.sample_ratio == ratio])
    assert shown(requests_between("chat", T0, END, at_most=100)) == shown(columns(AT))
    assert shown(requests_between("chat", T0, END, at_most=2)) == shown(columns(AT[:2]))
    assert shown(latest_requests("chat", T0, END, at_most=4)) == shown(columns(AT[2:]))
    assert shown(Requests.concatenated([columns(AT[:2]), columns([]), columns(AT[2:])])) == shown(columns(AT))


def test_ranks_are_part_of_a_replicas_name_and_failures_are_left_out():
    store(AT)
    Decision.objects.filter(at__lt=T0 + timedelta(seconds=1)).update(rank=2)
    Decision.objects.filter(at__gte=T0 + timedelta(seconds=2)).update(status=503)
    found = requests_between("chat", T0, END, at_most=100)
    assert shown(found)["replicas"] == ["a#b#2", "b"]
    assert counts("chat", T0, END, timedelta(minutes=1)) == {T0: 2}
    assert first_at("chat", T0, END) == T0


def test_where_nothing_was_decided_columns_are_empty():
    found = requests_between("chat", T0, END, at_most=100)
    assert (len(found), len(found.blocks), found.groups.names) == (0, 0, [])
    assert first_at("chat", T0, END) is None
