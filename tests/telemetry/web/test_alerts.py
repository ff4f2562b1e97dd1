import re
from datetime import timedelta
from functools import partial

import pytest
from django.db.models import F

from controlplane.models import RoutingPolicy
from controlplane.schema_fields import settings_of
from controlplane.services.fleet.pools import create_pool
from controlplane.services.policies.lifecycle import revert_policy
from telemetry.alerts.findings import Finding, Reason, Result, no_data
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.message import alert_labels, alert_payload, describe
from telemetry.alerts.notifications import notify_due
from telemetry.channels.message_text import links
from telemetry.models import Alert, AlertRule, AlertState, RouterReading, Silence
from telemetry.services.alerts.alerts import matching_alerts, open_alerts
from telemetry.services.alerts.rules import create_rule, ensure_default_rules
from telemetry.services.notifications.channels import create_channel, update_channel
from telemetry.web.pages import _urgency
from telemetry.web.views import alerts as views
from tests.alert_history import alerts_of_every_state
from tests.fleet_history import drop_alert


def test_an_open_alert_shows_the_drop_and_the_most_affected_replicas_and_groups(visitor, fleet, noon):
    drop_alert(fleet, noon)

    text = visitor.get("/alerts/").text

    assert "31.0 %, 33.0 points below its baseline" in text
    assert "396,000" in text  # tokens computed anew
    assert "Last change before it" not in text  # an event is a cause with evidence, or is not named
    assert ">gpu-1</a>:" in text
    assert "summaries:" in text
    assert '<span class="badge bad">firing</span>' in text


def test_an_alert_shows_the_share_of_responses_that_reported_cached_tokens(visitor, fleet, noon):
    RouterReading.objects.filter(usage_reported__gt=0).update(ok_requests=F("usage_reported") * 4)
    drop_alert(fleet, noon)

    assert "of 25.0 % of responses" in visitor.get("/alerts/").text

    alert = Alert.objects.select_related("rule").get()
    rule, kind = alert.rule, KINDS[alert.rule.kind]
    rule.group = fleet.groups.get(name="coding")
    verdict = Finding(Result.BREACH, Reason.BELOW, 0.31, 0.49, 0.64)
    detail = describe(rule, kind, kind.read(rule.settings), verdict, noon)
    assert detail["accounted_ratio"] == pytest.approx(0.25)
    Alert.objects.update(detail=detail)
    assert re.search(r"Responses with cached tokens</dt><dd>25.0 %", visitor.get(f"/alerts/{alert.pk}/").text)


def test_an_open_alert_shows_the_current_value_beside_that_of_the_last_breach(visitor, fleet, noon):
    alert = drop_alert(fleet, noon)
    facts = visitor.get(f"/alerts/{alert.pk}/").text
    assert re.search(r"<dt>Hit rate now</dt><dd>31.0 %", facts)
    assert "at the last breach" not in facts

    later = noon + timedelta(seconds=30)
    recovered = Finding(Result.OK, Reason.WITHIN, 0.62, 0.49, 0.64)
    AlertRule.objects.filter(pk=alert.rule_id).update(verdict=recovered.as_json(), evaluated_at=later)

    for path in ("/alerts/", f"/alerts/{alert.pk}/"):
        facts = visitor.get(path).text
        assert re.search(r"<dt>Hit rate now</dt><dd>62.0 % .*12:00:30 UTC", facts)
        assert re.search(r"<dt>Hit rate at the last breach</dt><dd>31.0 % .*12:00:00 UTC", facts)
        assert re.search(r"<dt>Resolves</dt><dd><time[^>]*>12:02:00 UTC", facts)


@pytest.mark.parametrize(
    ("kind", "figures"),
    [
        ("hit_rate_drop", {"onset": "2031-03-04T12:00:00+00:00", "drop_points": 9.5, "groups": [{"name": "coding"}]}),
        ("hit_rate_floor", {"requests": 20, "tokens": 9000, "restarted": ["gpu-1"], "others": "ok"}),
        ("replica_ejected", {"routers": ["router-1"], "ejected_because": "", "over": False}),
        ("load_skew", {"replicas": 1}),
        ("prediction_gap", {"requests": 20, "between": ["predicted", "delivered"], "predicted": 0.9, "delivered": 0.2}),
        ("no_data", {}),
    ],
)
def test_alerts_and_results_that_another_release_stored_are_shown(visitor, fleet, noon, kind, figures):
    ensure_default_rules(fleet)
    rule = AlertRule.objects.filter(pool=fleet, kind=kind).first() or create_rule(fleet, name=kind, kind=kind)
    verdict = {"result": "breach", "reason": "below", "value": 0.2, "limit": 0.5, "baseline": None, "unit": "ratio"}
    AlertRule.objects.filter(pk=rule.pk).update(verdict=verdict | {"figures": figures}, evaluated_at=noon)
    alert = Alert.objects.create(
        rule=rule, pool=fleet, state="firing", started_at=noon, last_breach_at=noon, fired_at=noon, detail=figures
    )

    for path in ("/alerts/", f"/alerts/{alert.pk}/", f"/alerts/rules/{rule.pk}/"):
        assert visitor.get(path).status_code == 200
    assert visitor.get(f"/api/v1/alerts/{alert.pk}").json()["detail"] == figures
    assert visitor.get(f"/api/v1/alert-rules/{rule.pk}").json()["verdict"]["figures"] == figures
    AlertRule.objects.filter(pk=rule.pk).update(kind="of_a_later_release")
    for path in ("/alerts/", f"/alerts/{alert.pk}/", "/status/"):
        assert "Status unknown" not in visitor.get(path).text
    page, url = f"/alerts/rules/{rule.pk}/", f"/api/v1/alert-rules/{rule.pk}"
    assert "Unknown kind of a later release: of_a_later_release." in visitor.get(page).text
    assert visitor.post(page, {"name": "x"}).status_code == 409
    answer = visitor.get(url)
    assert answer.json()["effective_settings"] == rule.settings
    change = partial(visitor.patch, url, {"name": "x"}, content_type="application/json")
    assert change(headers={"If-Match": answer["ETag"]}).status_code == 409
    visitor.post(f"{page}remove/")
    assert not AlertRule.objects.filter(pk=rule.pk).exists()


def test_an_open_alert_says_why_its_rule_has_no_current_value(visitor, fleet, noon):
    alert = drop_alert(fleet, noon)
    verdict = no_data(Reason.LITTLE_TRAFFIC).as_json()
    AlertRule.objects.filter(pk=alert.rule_id).update(verdict=verdict, evaluated_at=noon + timedelta(seconds=30))

    assert re.search(r"<dt>Hit rate now</dt><dd>unknown .*not enough traffic", visitor.get("/alerts/").text)


def test_each_kind_of_alert_names_its_value(visitor, operator, fleet, noon):
    alerts_of_every_state(fleet, operator)
    Alert.objects.update(suppression=None)
    Alert.objects.filter(subject="gpu-2").update(unit="count", value=8)

    text = visitor.get("/alerts/").text

    assert "<dt>Preemptions per minute now</dt><dd>8 " in text
    assert "<dt>Busiest replica / mean now</dt><dd>1.9 " in text
    assert "Late first tokens 40.0 %, limit 30.0 %" in text.split('id="pending"')[1]
    assert "<dt>Value" not in text


def test_a_revision_that_is_named_as_the_cause_is_linked(visitor, fleet, noon):
    alert = drop_alert(fleet, noon)
    policy = RoutingPolicy.objects.get(pool=fleet, group=None)
    evidence = {"policy": policy.name, "revision": 7}
    cause = {"kind": "revision", "confidence": 0.9, "summary": "Revision 7.", "evidence": evidence, "advice": "Act."}
    Alert.objects.update(causes=[cause])

    for path in ("/alerts/", f"/alerts/{alert.pk}/"):
        assert f'<a href="/policies/{policy.pk}/revisions/?before=8">Show revision 7</a>' in visitor.get(path).text


def test_the_rules_say_whether_anybody_is_notified(visitor, fleet, noon):
    drop_alert(fleet, noon)
    assert "Nobody is notified: no channel is set up" in visitor.get("/alerts/").text

    channel = create_channel("on call", config={"url": "https://hooks.example/x"})
    assert "Firing alerts are sent to the" in visitor.get("/alerts/").text

    update_channel(channel, enabled=False)
    assert "Nobody is notified: all channels are disabled" in visitor.get("/alerts/").text


def test_without_rules_the_page_says_the_next_step(visitor):
    assert "Add pool" in visitor.get("/alerts/").text
    create_pool("chat")
    assert "Add rule" in visitor.get("/alerts/").text


def test_the_number_of_queries_does_not_depend_on_the_length(visitor, fleet, noon, django_assert_num_queries):
    drop_alert(fleet, noon)
    for number in range(5):
        create_rule(fleet, name=f"rule {number}")

    with django_assert_num_queries(9):
        visitor.get("/alerts/")


def test_a_rule_is_added_and_changed(visitor, noon):
    pool = create_pool("chat")
    visitor.post("/alerts/rules/new/", {"name": "Big drop", "pool": pool.pk, "enabled": "on", "drop_points": "30"})
    rule = AlertRule.objects.get(name="Big drop")
    assert (rule.settings, rule.enabled) == ({"drop_points": 30.0}, True)

    visitor.post(f"/alerts/rules/{rule.pk}/", {"name": "Bigger drop", "drop_points": "40"})
    rule.refresh_from_db()
    assert (rule.name, rule.settings, rule.enabled) == ("Bigger drop", {"drop_points": 40.0}, False)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("drop_points", "200", "of at most 100"),
        ("bin_s", "soon", "Expected a number."),
        ("baseline_s", "61", "of at least 300"),
    ],
)
def test_an_invalid_setting_of_a_rule_is_rejected_with_an_error_at_its_field(visitor, field, value, words):
    rule = ensure_default_rules(create_pool("chat"))

    answer = visitor.post(f"/alerts/rules/{rule.pk}/", {"name": "x", field: value})

    assert answer.status_code == 422
    error = answer.text.split(f'id="id_{field}_error">')[1].split("<")[0]
    assert words in error


def test_removing_a_rule_first_says_that_its_alerts_are_removed_too(visitor, fleet, noon):
    alert = drop_alert(fleet, noon)
    path = f"/alerts/rules/{alert.rule_id}/remove/"

    assert "Its alerts are removed too" in visitor.get(path).text
    assert Alert.objects.get().state == AlertState.FIRING
    visitor.post(path)

    assert not AlertRule.objects.filter(pk=alert.rule_id).exists()


def test_the_page_of_an_alert_shows_its_values_causes_and_timeline(visitor, operator, fleet, noon):
    made = alerts_of_every_state(fleet, operator)

    text = visitor.get(f"/alerts/{made['firing']}/").text

    assert "changes at byte 412" in text
    assert "very likely (82 %)" in text
    assert 'href="/?pool=chat&amp;from=' in text or 'href="/?pool=chat&from=' in text  # the way to the culprit
    assert '<svg class="sketch"' in text
    assert "Acknowledge" in text
    assert "<html" not in visitor.get(f"/alerts/{made['firing']}/", headers={"HX-Request": "true"}).text
    assert visitor.get("/alerts/999999/").status_code == 404


def test_the_list_separates_notifying_suppressed_pending_and_resolved_alerts(visitor, operator, fleet, noon):
    alerts_of_every_state(fleet, operator)

    text = visitor.get("/alerts/").text

    assert "Moving a rack" in text.split('id="suppressed"')[1].split("</section>")[0]
    assert "TTFT objective of pool chat" in text.split('id="pending"')[1].split("</section>")[0]
    assert "acknowledged by olga: Adding a replica" in text
    assert "Replica down of pool chat, gpu-3" in text.split('id="recent"')[1]


def test_resolved_alerts_are_filtered_and_paged_by_plain_links(visitor, operator, fleet, noon, monkeypatch):
    made = alerts_of_every_state(fleet, operator)
    rule = AlertRule.objects.get(pool=fleet, kind="hit_rate_drop")
    for number in range(3):
        Alert.objects.create(
            rule=rule, pool=fleet, state="resolved", started_at=noon, last_breach_at=noon, summary=f"Old {number}."
        )
    monkeypatch.setattr(views, "PAGE", 2)

    first = visitor.get("/alerts/").text
    assert ("Old 2." in first, "Old 0." in first) == (True, False)
    older = Alert.objects.get(summary="Old 1.").pk
    assert f"?older={older}" in first
    second = visitor.get(f"/alerts/?older={older}").text
    assert ("Old 0." in second, "gpu-3" in second) == (True, True)
    narrowed = visitor.get("/alerts/?kind=replica_down").text.split('id="recent"')[1]
    assert (f"/alerts/{made['over']}/" in narrowed, "Old" in narrowed) == (True, False)
    assert "Enter a valid date" in visitor.get("/alerts/?after=yesterday").text


def test_an_alert_is_acknowledged_and_unacknowledged_without_a_script(visitor, fleet, noon):
    alert = drop_alert(fleet, noon)

    page = visitor.post(f"/alerts/{alert.pk}/acknowledge/", {"note": "mine"}, follow=True)
    assert "Acknowledged by olga" in page.text
    visitor.post(f"/alerts/{alert.pk}/acknowledge/")  # on a page that was open before
    alert.refresh_from_db()
    assert (alert.acknowledged_by, alert.acknowledged_note) == ("olga", "mine")
    assert alert.history.filter(transition="acknowledged").count() == 1
    visitor.post(f"/alerts/{alert.pk}/unacknowledge/")
    alert.refresh_from_db()
    assert alert.acknowledged_at is None
    Alert.objects.update(state="resolved")
    assert "cannot be acknowledged" in visitor.post(f"/alerts/{alert.pk}/acknowledge/", follow=True).text


def test_a_silence_is_previewed_created_and_expired(visitor, fleet, noon):
    alert = drop_alert(fleet, noon)
    form = visitor.get(f"/alerts/silences/new/?alert={alert.pk}").text
    assert "pool=chat\nrule=Hit rate drop" in form
    assert visitor.get(f"/alerts/silences/new/?alert={'9' * 5000}").status_code == 200
    filled = {"matchers": "pool=chat\nrule=~Hit.*", "hours": "4", "comment": "work"}

    looked = visitor.post("/alerts/silences/new/", {**filled, "preview": "1"}).text
    assert "1 current alert matches" in looked
    assert not Silence.objects.exists()
    visitor.post("/alerts/silences/new/", filled)
    silence = Silence.objects.get()
    assert (silence.created_by.username, silence.project) == ("olga", None)
    assert "pool=chat and rule=~Hit.*" in visitor.get("/alerts/silences/").text
    visitor.post(f"/alerts/silences/{silence.pk}/end/")
    assert Silence.objects.get().ends_at == noon


@pytest.mark.parametrize(
    ("matchers", "words"),
    [("pool", "expected label=value"), ("colour=red", "expected one of pool"), ("pool!=x", "match every alert")],
)
def test_a_silence_with_invalid_or_too_broad_matchers_is_rejected_at_its_field(visitor, fleet, matchers, words):
    answer = visitor.post("/alerts/silences/new/", {"matchers": matchers, "hours": "4", "comment": "work"})

    assert answer.status_code == 422
    assert words in answer.text.split('id="id_matchers_error">')[1].split("</div>")[0]


def test_the_rule_editor_previews_past_alerts_with_and_without_a_script(visitor, fleet, noon):
    rule = AlertRule.objects.get(pool=fleet, kind="hit_rate_drop")
    filled = {"name": "x", "drop_points": "20", "preview": "1"}

    page = visitor.post(f"/alerts/rules/{rule.pk}/", filled)
    part = visitor.post(f"/alerts/rules/{rule.pk}/", filled, headers={"HX-Request": "true"})

    for answer in (page, part):
        assert answer.status_code == 200
        assert "Would have fired not at all" in answer.text
        assert '<svg class="sketch"' in answer.text
    assert "<html" not in part.text
    rule.refresh_from_db()
    assert rule.name == "Hit rate drop"
    refused = visitor.post(f"/alerts/rules/{rule.pk}/", {**filled, "baseline_s": "300", "bin_s": "60"}).text
    assert "at least 20 times bin_s" in refused


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_its_form_with_its_own_settings(visitor, fleet, kind):
    path = f"/alerts/rules/new/?kind={kind}"
    text = visitor.get(path).text
    assert all(f'name="{info.field}"' in text for info in settings_of(KINDS[kind].settings))
    assert ("Preview on past data" in text) == KINDS[kind].can_be_replayed

    visitor.post(path, {"name": f"my {kind}", "pool": fleet.pk, "severity": "critical", "repeat_s": "0"})

    rule = AlertRule.objects.get(name=f"my {kind}")
    assert (rule.kind, rule.severity, rule.repeat_s, rule.settings) == (kind, "critical", 0, {})


def named_revision(fleet, noon, **evidence):
    """The firing alert, whose first cause is the active revision."""
    alert = drop_alert(fleet, noon)
    live = RoutingPolicy.objects.get(pool=fleet, group=None).live()
    evidence = {"policy": "chat", "revision": live.number, "strategy": "prefix_hash", "author": "olga", **evidence}
    alert.causes = [{"kind": "revision", "confidence": 0.84, "summary": "S.", "advice": "A.", "evidence": evidence}]
    alert.detail |= {"onset": noon.isoformat()}
    alert.save()
    return alert


def test_the_page_of_an_alert_says_who_did_what_when_and_why_with_the_remedy_and_a_line_at_the_change(
    visitor, fleet, noon
):
    at = noon - timedelta(minutes=5)
    alert = named_revision(fleet, noon, reason="a try", published_at=at.isoformat())

    text = visitor.get(f"/alerts/{alert.pk}/").text

    heading = re.search(r"<h1>([^<]*)</h1>", text)[1]
    assert heading == "Hit rate fell from 64.0 % to 31.0 % at 12:00 UTC: olga published prefix_hash (r2)"
    assert "The reason given was: “a try”" in text
    assert re.search(
        r'<div class="actions"><a class="button primary" href="[^"]*/revert/1/\?reason=[^"]*">Roll back', text
    )
    assert "very likely (84 %)" in text
    assert text.count('<line class="mark"') == 1
    assert "Vertical line" in text


def test_each_of_several_alerts_is_silenced_at_once_and_no_other(visitor, fleet, operator, noon):
    ids = alerts_of_every_state(fleet, operator)
    page = visitor.get("/alerts/").text
    assert f'<input type="checkbox" name="alert" value="{ids["firing"]}" form="several">' in page
    Silence.objects.all().delete()
    rules = [Alert.objects.get(pk=ids[name]).rule for name in ("firing", "taken")]
    create = partial(Alert.objects.create, pool=fleet, started_at=noon, last_breach_at=noon)
    subjects = [(rule, f"g{number}") for number in range(30) for rule in rules]
    made = [create(rule=rule, subject=subject, labels=alert_labels(rule, subject)) for rule, subject in subjects]
    address = "/alerts/silences/new/?" + "&".join(f"alert={alert.pk}" for alert in made)
    assert "Select 1 to 50 alerts" in visitor.post(address, {"hours": "4", "comment": "work"}, follow=True).text
    chosen = [ids["firing"], *(alert.pk for alert in made[:48:3])]  # each replica by one rule; no replica by one
    address = "/alerts/silences/new/?" + "&".join(f"alert={number}" for number in chosen)
    assert "for each of 17 alerts" in visitor.get(address).text
    assert visitor.post(address, {"hours": "4", "comment": "work"}).status_code == 302
    silenced = [
        [alert.pk for alert in matching_alerts(silence.matchers, project=silence.project, candidates=open_alerts())]
        for silence in Silence.objects.all()
    ]
    assert sorted(silenced) == sorted([number] for number in chosen)


def test_rules_are_grouped_by_pool_and_kind_behind_resolved_alerts(visitor, fleet, operator, noon):
    alerts_of_every_state(fleet, operator)
    create_pool("another")
    text = visitor.get("/alerts/").text
    assert text.index('id="recent"') < text.index('id="rules"')
    assert re.findall(r"<strong>Pool (\w+)</strong>", text) == ["another", "chat"]
    rules = re.findall(r'<th scope="row" class="text">([^<]*?) *<', text.split("Pool chat</strong>")[1])
    assert rules[:3] == ["Hit rate drop", "TTFT objective", "Error ratio"]
    kinds = re.findall(r'<th scope="rowgroup" rowspan="(\d)" class="text">([^<]*)<', text)
    assert ("2", "Router lost") in kinds


def test_a_rule_has_a_runbook_of_its_own(visitor, fleet, noon):
    alert = named_revision(fleet, noon)
    url = f"/api/v1/alert-rules/{alert.rule_id}"
    change = partial(visitor.patch, content_type="application/json")
    headers = {"If-Match": visitor.get(url)["ETag"]}
    for wrong in ("javascript:alert(1)", "/runbook", "https://user:secret@wiki.example/"):
        assert change(url, {"runbook_url": wrong}, headers=headers).status_code in {400, 422}
    good = "https://wiki.example/hit-rate"
    assert change(url, {"runbook_url": good}, headers=headers).status_code == 200
    assert f'<a href="{good}" rel="noopener noreferrer">Your runbook' in visitor.get(f"/alerts/{alert.pk}/").text
    assert f'value="{good}"' in visitor.get(f"/alerts/rules/{alert.rule_id}/").text
    alert.refresh_from_db()
    payload = alert_payload(alert, "firing", noon)["data"]
    assert payload["remedy"].startswith("Roll back to r1, ")
    addresses = dict(links(payload, "https://warmpath.example"))
    assert addresses["Runbook"] == good
    assert addresses[payload["remedy"]].startswith("https://warmpath.example/policies/")


def test_after_the_remedy_the_page_and_the_strip_say_how_far_the_hit_rate_has_recovered(visitor, fleet, noon):
    alert = named_revision(fleet, noon)
    policy = RoutingPolicy.objects.get(pool=fleet, group=None)
    recovering = Finding(Result.OK, Reason.WITHIN, 0.52, 0.49, 0.64)
    AlertRule.objects.filter(pk=alert.rule_id).update(
        verdict=recovering.as_json(), evaluated_at=noon + timedelta(seconds=30)
    )
    Alert.objects.update(started_at=noon - timedelta(seconds=40), value=0.45, detail={"lowest_ratio": 0.31})
    revert_policy(policy, 1, reason="back")
    words = "Revision 2 was replaced 0 s ago: the hit rate recovers as caches fill, now 52.0 %, usually 64.0 %."
    text, strip = visitor.get(f"/alerts/{alert.pk}/").text, visitor.get("/status/").text
    assert '<div class="message warning" id="worst-alert"' in strip
    for part in (text, strip):
        assert f"{words} The condition no longer holds; the alert resolves" in part
        assert "Hit rate fell from 64.0 % to 31.0 % at" in part  # its lowest, whatever it is now
        assert "/revert/" not in part
    live = visitor.get(f"/alerts/{alert.pk}/", headers={"HX-Request": "true"}).text
    assert words in live, "the page says so without being loaded again"
    assert alert.summary not in live, "a sentence of an earlier evaluation"
    over = Alert.objects.get(pk=alert.pk)
    lasting = Alert(rule=AlertRule(kind=over.rule.kind), state="firing", severity="info")
    assert min(over, lasting, key=_urgency) is lasting
    assert "no longer holds" not in alert_payload(over, "firing", noon)["data"]["remedy"]


def test_an_alert_without_a_channel_notified_nobody_until_one_is_added(visitor, fleet, noon):
    alert = drop_alert(fleet, noon)
    Alert.objects.update(fired_at=noon - timedelta(minutes=5), explained_at=noon, notified_at=None)
    notify_due(noon)
    text = visitor.get(f"/alerts/{alert.pk}/").text
    assert ">Notified<" not in text
    assert re.search(r'Nobody was notified:</strong> no channel is set up. <a href="/channels/">', text)
    create_channel("on call", config={"url": "https://hooks.example/x"})
    notify_due(noon + timedelta(seconds=5))
    text = visitor.get(f"/alerts/{alert.pk}/").text
    assert ">Notified<" in text
    assert "Nobody was notified" not in text
