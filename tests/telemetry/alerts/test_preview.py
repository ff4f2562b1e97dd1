"""Previews of rules on stored readings give the same alerts as the evaluation."""

from datetime import timedelta

import pytest
import time_machine

from controlplane.errors import InvalidError
from controlplane.models import EventKind
from controlplane.services.events import record_event
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.routers import announce
from telemetry.alerts import pipeline
from telemetry.alerts.history import engine_hours
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.notifications import notify_due
from telemetry.causes.evidence import Cause, CauseKind
from telemetry.models import Alert, AlertRule, Notification
from telemetry.services.alerts import explanations, previews
from telemetry.services.alerts.explanations import explain_drops
from telemetry.services.alerts.previews import preview_rule, replay
from telemetry.services.alerts.rules import create_rule, update_rule
from telemetry.services.notifications.channels import create_channel
from telemetry.web.breakdown_figures import draw
from tests.telemetry.alerts.histories import past, window
from tests.telemetry.conftest import T0
from tests.telemetry.readings import engine_reading, route_reading, router_scraped, stored_together

pytestmark = pytest.mark.django_db
SETTINGS = {"baseline_s": 600, "days": 0, "for_s": 10, "keep_firing_s": 120}


def at(seconds):
    return T0 + timedelta(seconds=seconds)


@stored_together()
def minutes(replica, rates, *, start=0):
    """A reading every 20 s, with one hit rate for each minute."""
    for minute, rate in enumerate(rates):
        for part in (20, 40, 60):
            second = start + 60 * minute + part
            engine_reading(replica, at(second), queries=20_000, hits=int(20_000 * rate), finished=40)


DROPS = [0.8] * 10 + [0.2] * 3 + [0.8] * 6 + [0.1] * 2 + [0.8] * 4


def test_a_preview_lists_each_alert_that_would_have_fired(pool, r1):
    minutes(r1, DROPS)
    with time_machine.travel(at(60 * len(DROPS)), tick=False):
        preview = preview_rule(pool, kind="hit_rate_drop", settings=SETTINGS, days=0.02)

    assert preview.summary == "Would have fired 2 times in the last 29 min."
    second, first = preview.episodes
    assert at(600) < first.started_at <= at(690)  # readings every 20 s: every second bin is empty
    assert at(1140) < second.started_at <= at(1230)
    assert first.worst.value == pytest.approx(0.2, abs=0.05)


def test_a_preview_fires_where_the_evaluation_did(pool, r1):
    """The same code: every moment that the preview judges is judged by the pipeline as well."""
    minutes(r1, DROPS)
    rule = update_rule(AlertRule.objects.get(pool=pool, kind="hit_rate_drop"), settings=SETTINGS)
    for second in range(60, 60 * len(DROPS) + 1, 10):
        (one,) = AlertRule.objects.select_related("pool", "group").filter(pk=rule.pk)
        pipeline.evaluate([one], at(second))
    evaluated_starts = list(Alert.objects.order_by("pk").values_list("started_at", flat=True))
    with time_machine.travel(at(60 * len(DROPS)), tick=False):
        preview = preview_rule(pool, kind="hit_rate_drop", settings=SETTINGS, days=0.02)

    assert [one.started_at for one in reversed(preview.episodes)] == evaluated_starts


def test_a_slow_decline_is_found_against_the_same_hours_of_days_before(pool, r1):
    engine_hours.cache_clear()
    for hour in range(1, 4 * 24 + 1):
        rate = 0.8 if hour > 12 else 0.8 - 0.02 * (12 - hour)
        engine_reading(r1, at(1800) - timedelta(hours=hour), queries=100_000, hits=int(100_000 * rate), finished=100)
    minutes(r1, [0.55] * 10, start=-600)
    verdicts = {}
    for days in (0, 3):
        rule = update_rule(AlertRule.objects.get(pool=pool, kind="hit_rate_drop"), settings={**SETTINGS, "days": days})
        (one,) = AlertRule.objects.select_related("pool", "group").filter(pk=rule.pk)
        pipeline.evaluate([one], at(0))
        verdicts[days] = one.verdict

    assert (verdicts[0]["result"], verdicts[3]["result"]) == ("ok", "breach")
    assert verdicts[3]["baseline"] == pytest.approx(0.8)


def test_a_preview_is_limited_and_reports_its_period(pool, r1, monkeypatch):
    minutes(r1, DROPS)
    monkeypatch.setattr(previews, "MAX_STEPS", 5)
    with time_machine.travel(at(60 * len(DROPS)), tick=False):
        preview = preview_rule(pool, kind="hit_rate_drop", settings=SETTINGS)

    assert preview.is_shorter
    assert (preview.end - preview.start).total_seconds() == 50
    assert sum(preview.results.values()) == 5


def test_a_rule_without_stored_history_has_no_preview(pool):
    preview = preview_rule(pool, kind="rollout_stuck", settings={})
    assert "no history is stored" in preview.summary
    assert "too little history" in preview_rule(pool, kind="hit_rate_floor", settings={}, days=0.1).summary


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"kind": "colour"}, "$.kind"),
        ({"settings": {"drop_points": 0}}, "$.settings.drop_points"),
        ({"days": 31}, "$.days"),
        ({"group": "nobody"}, "$.group"),
        ({"kind": "load_skew", "group": "coding"}, "$.group"),
    ],
)
def test_a_preview_rejects_invalid_settings(pool, arguments, path):
    with pytest.raises(InvalidError) as caught:
        preview_rule(pool, **{"kind": "hit_rate_drop", "settings": {}, **arguments})
    assert caught.value.faults[0].path == path


def test_every_source_is_loaded_from_stored_readings(pool, r1):
    """One past with everything in it; each kind finds its figures there."""
    create_task_group(pool, "coding")
    router = announce(name="router-1", boot="b", admin_url="http://10.0.0.9:8081")
    for second in range(20, 301, 20):
        engine_reading(
            r1, at(second), queries=20_000, hits=10_000, finished=60, preemptions=4, gauges={"kv_usage_ratio": 0.5}
        )
        router_scraped(router, at(second))
        route_reading(router, at(second), group="coding", ttft={200: 20})
        route_reading(
            router, at(second), group="coding", requests=20, ok_requests=20, usage_reported=20, prompt_tokens=20_000,
            cached_tokens=4000, predicted_tokens=18_000, predicted_prompt_tokens=20_000, predicted_cached_tokens=4000,
            predicted_responses=20,
        )  # fmt: skip
    rules = [
        create_rule(pool, name="floor", kind="hit_rate_floor", group="coding", settings={"min_requests": 5}),
        create_rule(pool, name="gap", kind="prediction_gap"),
        create_rule(pool, name="kv", kind="kv_pressure"),
        create_rule(pool, name="slow", kind="ttft_objective", group="coding", settings={"long_s": 600}),
        create_rule(pool, name="stuck", kind="rollout_stuck"),
        create_rule(pool, name="lag", kind="evaluator_lag", settings={"behind_s": 30}),
    ]
    pipeline.evaluate(rules, at(300))

    results = {rule.name: (rule.verdict["result"], rule.verdict["value"]) for rule in rules}
    assert results["floor"] == ("breach", pytest.approx(0.2))
    assert results["gap"] == ("breach", pytest.approx(0.7))
    assert results["kv"] == ("breach", pytest.approx(12.0))
    assert results["slow"] == ("breach", 1.0)
    assert (results["stuck"][0], results["lag"]) == ("breach", ("ok", 0.0))
    assert set(Alert.objects.values_list("subject", flat=True)) == {"", "r1"}


def test_a_firing_drop_is_explained_every_three_minutes_and_notified_with_causes(pool, r1):
    create_channel("ops", config={"url": "https://hooks.example/x"})
    minutes(r1, DROPS[:12])
    restarted = "Replica r1 restarted; its cache is cold."
    record_event(EventKind.REPLICA_RESTARTED, restarted, pool=pool, replica=r1, at=at(600))
    rule = AlertRule.objects.get(pool=pool, kind="hit_rate_drop")
    alert = Alert.objects.create(
        rule=rule,
        pool=pool,
        state="firing",
        notification_count=1,
        started_at=at(660),
        last_breach_at=at(860),
        fired_at=at(670),
    )
    assert [explain_drops(at(second)) for second in (680, 859, 860)] == [1, 0, 1]
    Alert.objects.filter(pk=alert.pk).update(notification_count=0)
    alert.refresh_from_db()
    assert alert.explained_at == at(860)
    assert alert.causes[0]["kind"] == "replica_restarted"
    assert set(alert.causes[0]) == {"kind", "confidence", "summary", "evidence", "advice"}
    assert alert.history.get().transition == "explained"
    notify_due(at(861))
    assert Notification.objects.get().payload["data"]["causes"] == alert.causes


@pytest.mark.parametrize("confidence", [None, 0.49])
def test_a_drop_without_a_likely_cause_is_explained_again_soon_for_ten_minutes(pool, r1, monkeypatch, confidence):
    unlikely = [Cause(CauseKind.OVERFLOW, confidence, "", {}, "")] if confidence else []
    monkeypatch.setattr(explanations, "explain_drop", lambda *_, **__: unlikely)
    rule = AlertRule.objects.get(pool=pool, kind="hit_rate_drop")
    Alert.objects.create(
        rule=rule,
        pool=pool,
        state="firing",
        notification_count=1,
        started_at=at(660),
        last_breach_at=at(1435),
        fired_at=at(670),
    )
    assert [explain_drops(at(second)) for second in (680, 694, 695, 1255, 1270, 1300, 1435)] == [1, 0, 1, 1, 0, 0, 1]


def test_a_sketch_has_a_line_per_segment_and_a_band_per_alert():
    kind = KINDS["hit_rate_floor"]
    rates = [0.8, 0.8, None, 0.2, 0.2, 0.8]
    windows = [window(rate) if rate is not None else window(None, queries=0) for rate in rates]
    history = past(300, count=6, windows={"": windows})
    preview = replay(kind, kind.read({"keep_firing_s": 0}), history)

    sketch = draw(preview.points, preview.episodes, history.start, T0, summary="s")

    assert (len(sketch.values), len(sketch.bands)) == (2, 1)
    assert draw([], [], history.start, T0, summary="s") is None
