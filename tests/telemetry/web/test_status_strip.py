"""The status strip: on every page, the worst first, with the remedy; and a remedy or a reason for every kind."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.test import Client

from controlplane.models import Replica, Role, Rollout, RoutingPolicy
from controlplane.services.access.users import set_role
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollout_plans import Plan, make_plan
from controlplane.web.tags import seconds, signed_points
from telemetry.alerts.remedies import REMEDIES, remedy_of
from telemetry.causes.evidence import CauseKind
from telemetry.models import Alert, RuleKind, ScrapeShard
from telemetry.services.notifications.channels import create_channel
from telemetry.services.self_monitoring import telemetry_status
from tests.alert_history import alerts_of_every_state
from tests.end_to_end.every_page import ANYWHERE
from tests.fleet_history import drop_alert

BAD_PUBLISH = "Hit rate fell from 64.0 % to 31.0 % at 12:00 UTC: olga published random (r3)"


def publish(pool, by, strategy, **plan):
    policy = RoutingPolicy.objects.get(pool=pool, group=None)
    plan = {"plan": make_plan(policy, **plan)} if plan else {}
    return publish_revision(save_draft(policy, {"strategy": strategy}).pk, by=by, reason="a try", **plan).revision


def cause_of(revision):
    evidence = {"policy": revision.policy.name, "revision": revision.number, "strategy": revision.strategy}
    evidence |= {"author": "olga", "reason": "a try", "published_at": "2031-03-04T11:59:30+00:00"}
    return {"kind": "revision", "confidence": 0.9, "summary": "S.", "advice": "A.", "evidence": evidence}


@pytest.fixture
def calm(fleet):
    create_channel("on call", config={"url": "https://hooks.example/x"})
    return fleet


@pytest.fixture
def bad_publish(calm, operator, noon):
    """Revision 3 caused the firing alert."""
    alert = drop_alert(calm, noon)
    alert.causes = [cause_of(publish(calm, operator, "random"))]
    alert.save()
    return alert


def strip_of(text):
    return re.sub(r"\s+", " ", text[text.index('id="status"') : text.index('id="strip-form"')])


def test_nothing_is_shown_when_all_is_well(visitor, calm):
    assert "message" not in strip_of(visitor.get("/").text)


def test_every_page_names_the_bad_publication_with_its_remedy(visitor, bad_publish):
    revert = f"/policies/{RoutingPolicy.objects.get(group=None).pk}/revert/2/?reason=Alert+{bad_publish.pk}"
    for path in (*ANYWHERE, f"/alerts/{bad_publish.pk}/", "/replicas/gpu-1/"):
        answer = visitor.get(path)
        if answer.status_code not in {200, 404} or path == "/accounts/confirm/":
            continue
        strip = strip_of(answer.text)
        assert BAD_PUBLISH in strip, path
        assert re.search(rf'<a class="button primary" href="{re.escape(revert)}[^"]*">Roll back to r2, \w+</a>', strip)
        assert f'formaction="/alerts/{bad_publish.pk}/acknowledge/">Acknowledge' in strip
        assert f'href="/alerts/{bad_publish.pk}/">Investigate' in strip


def test_while_the_hit_rate_is_down_no_number_of_replicas_is_advised(visitor, bad_publish):
    text = visitor.get("/?pool=chat").text
    assert "No recommendation during an incident" in text
    assert re.search(r'data-ago="For">Since [^<]* UTC</time>\.', strip_of(text))
    Alert.objects.update(state="resolved")
    assert "during an incident" not in visitor.get("/?pool=chat").text


def test_a_duration_has_the_unit_of_the_longer_one_beside_it_and_a_difference_a_minus():
    assert [seconds(0.32), seconds(0.32, 0.9), seconds(0.32, 1.2)] == ["320 ms", "320 ms", "0.32 s"]
    assert signed_points(-0.031) == "\u22123.1 points"


def test_the_strip_costs_at_most_two_queries_beyond_that_of_every_page(visitor, bad_publish, django_assert_num_queries):
    signed_in = 2  # session and user
    with django_assert_num_queries(signed_in + 3):
        visitor.get("/status/")
    Alert.objects.all().delete()
    with django_assert_num_queries(signed_in + 1):
        visitor.get("/status/")


def test_the_worst_comes_first(visitor, bad_publish, operator, noon):
    alerts_of_every_state(bad_publish.pool, operator)
    publish(bad_publish.pool, operator, "least_load", plan=Plan.BY_SHARE)
    ScrapeShard.objects.create(number=0, due_at=noon - timedelta(minutes=2), lag_s=0.0)
    Alert.objects.filter(rule__kind="kv_pressure").update(severity="critical")  # and acknowledged

    strip = strip_of(visitor.get("/").text)

    names = re.findall(r'class="message[^"]*"(?: id="([a-z-]+))?', strip)
    assert names == ["worst-alert", "late", ""]
    assert "Telemetry is late: scraping is 115 s late" in strip
    assert "Rollout of r4, least_load: 5.0 % of prefixes." in strip
    assert '<a href="/alerts/">and 1 more</a>' in strip
    Rollout.objects.filter(state="pending").update(state="awaiting_approval")
    assert "Rollout of r4" not in strip_of(visitor.get("/").text)
    assert re.search(r"awaiting approval: least_load r4", visitor.get("/?pool=chat").text)


def test_a_refresh_is_empty_while_nothing_changed_and_has_the_number_of_alerts(visitor, bad_publish):
    first = visitor.get("/status/")
    assert '<span class="count" id="firing-count" hx-swap-oob="true">1<' in first.text
    again = visitor.get("/status/", headers={"If-None-Match": first["ETag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_an_acknowledgement_returns_to_the_page_and_to_no_other_site(visitor, bad_publish, settings):
    settings.LIVE_PARTS_FRESH_S = 60
    assert "Acknowledge<" in strip_of(visitor.get("/fleet/").text)
    url = f"/alerts/{bad_publish.pk}/acknowledge/"
    for page, back in (("/fleet/?pool=chat", "/fleet/?pool=chat"), ("//evil.example/", f"/alerts/{bad_publish.pk}/")):
        assert visitor.post(url, {"next": page}).headers["Location"] == back
    assert "Acknowledge<" not in strip_of(visitor.get("/fleet/").text)


def test_a_viewer_is_offered_no_remedy(bad_publish, django_user_model):
    user = django_user_model.objects.create_user("vera")
    set_role(user, Role.VIEWER, bad_publish.pool.project)
    client = Client()
    client.force_login(user)
    strip = strip_of(client.get("/fleet/").text)
    assert BAD_PUBLISH in strip
    assert re.findall(r">(Roll back|Acknowledge|Investigate)", strip) == ["Investigate"]


def test_each_kind_of_cause_and_alert_has_a_remedy_or_a_reason_why_none(visitor, calm, noon):
    assert set(REMEDIES) == {*CauseKind, *RuleKind.values}, "a row of REMEDIES in telemetry/alerts/remedies.py"
    alert = drop_alert(calm, noon)
    alert.subject = "gpu-2"
    for kind in REMEDIES:
        alert.rule.kind = kind if kind in RuleKind.values else "hit_rate_drop"
        causes = [] if kind in RuleKind.values else [{"kind": kind, "evidence": {"replicas": ["gpu-2"]}}]
        if kind == CauseKind.REVISION:
            causes = [cause_of(calm.policies.get(group=None).live())]
        remedy = remedy_of(alert, causes)
        assert remedy.path or remedy.hint, kind
        assert not remedy.path or visitor.get(remedy.path).status_code == 200, kind
        assert "gpu-2" in remedy.label or kind not in {"caching_off", "replica_lost", "replica_ejected"}
    assert remedy_of(alert, [{"kind": "of a later release"}]).path == ""
    Replica.objects.update(state="draining")  # what went down while it drained is not activated
    alert.rule.kind, lost = "replica_down", [{"kind": "replica_lost", "evidence": {"replicas": ["gpu-2"]}}]
    assert [remedy_of(alert, causes).label for causes in ((), lost)] == ["Open gpu-2", "Activate gpu-2"]


def test_the_remedy_of_a_canary_aborts_it_and_that_of_a_former_revision_is_none(calm, operator, noon):
    alert = drop_alert(calm, noon)
    canary = publish(calm, operator, "random", plan=Plan.BY_SHARE)
    assert remedy_of(alert, [cause_of(canary)]).label == "Abort the canary r3"
    Rollout.objects.update(started_at=alert.started_at + timedelta(seconds=1))
    assert not remedy_of(alert, []).label
    Rollout.objects.update(started_at=alert.started_at - timedelta(seconds=1))
    assert remedy_of(alert, []).label == "Abort the canary r3"  # though no cause is known yet
    publish(calm, operator, "least_load")
    assert remedy_of(alert, [cause_of(canary)]).hint.startswith("Revision 3 is no longer active")


def test_no_failure_of_the_strip_breaks_a_page(visitor, calm, noon, monkeypatch, caplog):
    drop_alert(calm, noon)
    with monkeypatch.context() as patched:  # it resolves between the number of alerts and their rows
        patched.setattr("telemetry.web.pages._firing", lambda _: Alert.objects.none())
        patched.setattr("telemetry.web.pages._status", lambda _: telemetry_status(Alert.objects.all(), noon))
        assert "message" not in strip_of(visitor.get("/events/").text)
    monkeypatch.setattr("telemetry.web.pages.present_remedy", None)
    for path in ("/events/", "/status/"):
        assert "Status unknown." in visitor.get(path).text
    assert "cannot be shown" in caplog.text
