"""Messages of every channel have figures, scope, change point, causes and links."""

import json

import pytest

from telemetry.channels.alertmanager import to_alerts
from telemetry.channels.email import mail_of
from telemetry.channels.message_text import Line, fitting
from telemetry.channels.pagerduty import events_of
from telemetry.channels.slack import blocks_of
from tests.telemetry.channels.messages import ISO, message, several
from tests.telemetry.conftest import T0

SITE = "https://warmpath.example"
PLACES = [{"name": f"place-{number}", "hit_rate_ratio": number / 10, "recomputed_tokens": 1} for number in range(1, 7)]
FULL = {
    "labels": {"pool": "chat", "group": "coding", "replica": "r9", "severity": "critical"},
    "value": 0.201, "limit": 0.64, "baseline": 0.79, "unit": "ratio",
    "detail": {
        "extra_recomputed_tokens": 532580, "top_replicas": PLACES[:3],
        "top_groups": [*PLACES[3:5], PLACES[5] | {"accounted_ratio": 0.25}],
        "onset": ISO, "accounted_ratio": 0.5,
        "reachable": {"ratio": 0.985, "standard_error": 0.012, "requests": 4321, "from": ISO, "to": ISO},
    },
    "causes": [
        {"kind": kind, "confidence": sure, "summary": f"It is {kind}.", "advice": f"Mend {kind}."}
        for kind, sure in (("revision", 0.9), ("capacity", 0.4), ("index_stale", 0.1))
    ],
    "links": {
        "alert": "/alerts/7/", "revision": "/policies/3/revisions/?before=6",
        "silence": "/alerts/silences/new/?alert=7", "pool": "/?pool=chat&from=2031-03-04T11%3A00&to=2031-03-04T12%3A00",
    },
}  # fmt: skip
NEEDED = [
    "coding", "r9", "critical", "20.1 %", "64.0 %", "79.0 %", "98.5 % ± 2.4 points, 4,321 requests, ",
    "50.0 %", "532,580 tokens",
    *(f"place-{number} ({number}0.0 %)" for number in range(1, 6)), "place-6 (60.0 % of 25.0 % of responses)",
    "Started",
    "It is revision. (confidence 90 %) Mend revision.", "It is capacity. (confidence 40 %) Mend capacity.",
    "It is index_stale. (confidence 10 %) Mend index_stale.", *(f"{SITE}{path}" for path in FULL["links"].values()),
]  # fmt: skip


def slack(told):
    return json.dumps(blocks_of(told, SITE), ensure_ascii=False)


def mail(told, part="plain"):
    written = mail_of(told, sender="w@example.org", recipients=["a@example.org"], site=SITE)
    return written.get_body((part,)).get_content().replace("&amp;", "&")


def pager(told):
    return json.dumps(events_of(told, routing_key="k", source="wp", site=SITE), ensure_ascii=False)


def manager(told):
    return json.dumps(to_alerts(told.alerts, T0, SITE), ensure_ascii=False)


CHANNELS = {"slack": slack, "mail": mail, "html": lambda told: mail(told, "html"), "pager": pager, "manager": manager}


@pytest.mark.parametrize("channel", CHANNELS)
def test_every_channel_shows_all_facts(channel):
    said = CHANNELS[channel](message(**FULL))

    assert [words for words in NEEDED if words not in said] == []


@pytest.mark.parametrize("channel", CHANNELS)
def test_each_of_several_alerts_has_its_cause_and_link(channel):
    said = CHANNELS[channel](several(7, 8))

    assert said.count("Revision 7 moved homes.") >= 2
    assert f"{SITE}/alerts/7/" in said
    assert f"{SITE}/alerts/8/" in said


@pytest.mark.parametrize("limit", [0, 1, 2, 500, 1000, 1001])
def test_the_lines_that_fit_are_found_by_bisection(limit):
    composed = []

    def compose(shown):
        composed.append(shown)
        return "\n".join(line.text for line in shown).encode()

    shown = [Line("", str(number)) for number in range(1000)]
    kept = fitting(shown, compose, lambda text: len(text.splitlines()) <= limit).splitlines()
    assert len(kept) == max(1, min(limit, 1000))
    assert kept[-1] == (b"999" if limit >= 1000 else b"%d more lines were left out." % (1001 - max(1, limit)))
    assert len(composed) <= 12
