"""Records of predictions: what is stored at publication, what is measured afterwards, and why something is not."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
import time_machine
from django.utils import timezone

from controlplane.models import EventKind, Rollout, Router
from controlplane.services.events import record_event
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from controlplane.services.policies.rollout_transitions import AUTOMATIC, change_state, lock_rollout
from telemetry.models import Prediction, PredictionState, WhatIf, WhatIfState
from telemetry.services.lab import prediction_records
from telemetry.services.lab.prediction_records import record_predictions, records_of, summarize
from tests.telemetry.readings import route_reading
from tests.telemetry.what_if_results import predict_draft

pytestmark = pytest.mark.django_db
PUBLISHED = datetime.fromisoformat("2031-03-04T12:00:20+00:00")
COMPLETED = PUBLISHED + timedelta(seconds=10)
START = datetime.fromisoformat("2031-03-04T12:06:00+00:00")  # the first whole minute after the caches filled
MINUTE = timedelta(minutes=1)


@pytest.fixture
def policy(pool):
    return pool.policies.select_related("pool").get(group=None)


def publish(policy, **prediction) -> Rollout:
    """Publish a draft that is predicted unless ``prediction`` has ``state`` None; routers run it ten seconds later."""
    with time_machine.travel(PUBLISHED, tick=False):
        draft = save_draft(policy, {"strategy": "tiered"})
        if prediction.get("state", "") is not None:
            predict_draft(draft, **prediction)
        rollout = publish_revision(draft.pk)
    with time_machine.travel(COMPLETED, tick=False):
        locked = lock_rollout(rollout.pk)
        change_state(locked, AUTOMATIC["complete"])
    return locked


@pytest.fixture
def router(db) -> Router:
    return Router.objects.create(name="router-1", boot="b", admin_url="http://10.0.1.1:8081", last_seen_at=PUBLISHED)


def traffic(router: Router, at: datetime, requests: int = 100, cached: int = 600) -> None:
    """A reading of requests with 1,000 prompt tokens, of which ``cached`` were cached, and their TTFT."""
    answered = {"requests": requests, "ok_requests": requests, "usage_reported": requests}
    tokens = {"prompt_tokens": 1000 * requests, "cached_tokens": cached * requests}
    route_reading(router, at, **answered, **tokens)
    route_reading(router, at, ttft={8: requests})


def visit(at: datetime) -> Prediction:
    with time_machine.travel(at, tick=False):
        record_predictions(timezone.now())
    return Prediction.objects.get()


def test_the_prediction_at_publication_is_recorded_and_later_ones_do_not_change_it(policy):
    rollout = publish(policy, hit_rate=(0.2, 0.02))
    with time_machine.travel(COMPLETED + MINUTE, tick=False):
        predict_draft(save_draft(policy, {"strategy": "tiered"}), hit_rate=(-0.2, 0.02), age=timedelta())
    record = visit(COMPLETED + 2 * MINUTE)
    assert (record.rollout_id, record.state) == (rollout.pk, PredictionState.MEASURING)
    assert record.predicted["hit_rate"] == pytest.approx(0.65)
    assert record.predicted["difference"]["hit_rate"]["low"] == pytest.approx(0.18)
    assert (record.predicted["is_calibrated"], record.reason) == (True, "")
    assert record.what_if is not None

    WhatIf.objects.all().delete()
    record = visit(COMPLETED + 3 * MINUTE)
    assert (record.what_if, record.predicted["hit_rate"]) == (None, pytest.approx(0.65))


@pytest.mark.parametrize(
    ("prediction", "reason"),
    [
        ({"state": None}, "No what-if of these settings"),
        ({"state": WhatIfState.RUNNING, "ended_at": None}, "No what-if of these settings"),
        ({"state": WhatIfState.FAILED, "result": None, "reason": "No requests."}, "No requests."),
    ],
)
def test_a_rollout_without_a_prediction_says_why(policy, prediction, reason):
    publish(policy, **prediction)
    record = visit(COMPLETED + MINUTE)
    assert record.predicted is None
    assert reason in record.reason


def test_a_prediction_that_is_not_calibrated_is_recorded_as_such(policy):
    publish(policy, is_calibrated=False)
    record = visit(COMPLETED + MINUTE)
    assert (record.is_calibrated, record.predicted["is_calibrated"]) == (False, False)
    assert summarize([record]).not_calibrated == 1


def test_the_outcome_is_measured_after_the_caches_filled_and_for_half_an_hour(policy, router):
    publish(policy, hit_rate=(0.2, 0.02), ttft=(0.0, 0.05))
    traffic(router, START - MINUTE, cached=0)  # not measured
    assert visit(START + 4 * MINUTE).measured is None
    for minute in range(1, 31):
        traffic(router, START + minute * MINUTE)
    traffic(router, START + 31 * MINUTE, cached=0)  # not measured

    early = visit(START + timedelta(minutes=6, seconds=40))
    assert (early.state, early.measured["requests"]) == (PredictionState.MEASURING, 600)
    record = visit(START + 31 * MINUTE)
    assert (record.state, record.measured_from, record.measured_to) == ("measured", START, START + 30 * MINUTE)
    assert (record.measured["requests"], record.measured["timed_requests"]) == (3000, 3000)
    assert (record.measured["hit_rate"], record.measured["accounted_ratio"]) == pytest.approx((0.6, 1.0))
    assert record.hit_rate_error == pytest.approx(0.05)
    assert record.ttft_p50_error == pytest.approx(0.6 / record.measured["ttft_p50_s"] - 1)


def test_little_traffic_is_measured_for_longer_and_at_most_a_day(policy, router):
    publish(policy)
    traffic(router, START + MINUTE, requests=150)
    assert visit(START + 40 * MINUTE).state == PredictionState.MEASURING
    traffic(router, START + 50 * MINUTE, requests=60)
    record = visit(START + 55 * MINUTE)
    assert (record.state, record.measured["requests"]) == (PredictionState.MEASURED, 210)


def test_too_little_traffic_is_a_reason_not_a_figure(policy, router):
    publish(policy)
    traffic(router, START + MINUTE, requests=150)
    record = visit(START + timedelta(hours=24, minutes=1))
    assert (record.state, record.measured) == (PredictionState.UNMEASURED, None)
    assert "Only 150 requests" in record.measured_reason


def test_responses_without_cached_tokens_leave_the_hit_rate_unknown(policy, router):
    publish(policy)
    for minute in range(1, 31):
        route_reading(router, START + minute * MINUTE, requests=10, ok_requests=10, usage_reported=0)
    record = visit(START + 31 * MINUTE)
    assert (record.measured["requests"], record.measured["hit_rate"], record.hit_rate_error) == (300, None, None)


@pytest.mark.parametrize(("after", "state"), [(4, PredictionState.UNMEASURED), (12, PredictionState.MEASURED)])
def test_the_next_change_of_the_pool_ends_the_measurement(policy, router, after, state):
    publish(policy)
    for minute in range(1, 31):
        traffic(router, START + minute * MINUTE)
    summary = "Replica r1 was added."
    record_event(EventKind.REPLICA_ADDED, summary, pool=policy.pool, at=START + after * MINUTE)
    record = visit(START + 31 * MINUTE)
    assert record.state == state
    if state == PredictionState.MEASURED:
        assert record.measured_to == START + after * MINUTE
    else:
        assert record.measured_reason == "Another change came first: Replica r1 was added."


def test_a_rollout_that_did_not_complete_is_not_measured(policy):
    with time_machine.travel(PUBLISHED, tick=False):
        rollout = publish_revision(save_draft(policy, {"strategy": "tiered"}).pk)
    assert visit(COMPLETED).state == PredictionState.WAITING
    with time_machine.travel(COMPLETED + MINUTE, tick=False):
        publish_revision(save_draft(policy, {"strategy": "random"}).pk)
        record_predictions(timezone.now())
    record = Prediction.objects.get(rollout=rollout)
    assert record.state == PredictionState.UNMEASURED
    assert "superseded" in record.measured_reason


def test_a_worker_that_is_killed_between_two_steps_loses_nothing(policy, router, monkeypatch):
    publish(policy)
    for minute in range(1, 31):
        traffic(router, START + minute * MINUTE)

    class KilledError(BaseException):
        """The process ends here."""

    def killed(*_):
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(prediction_records, "_fill", killed)
        with pytest.raises(KilledError):
            visit(START + 31 * MINUTE)
    first = visit(START + 31 * MINUTE)
    assert first.state == PredictionState.MEASURED
    again = visit(START + 50 * MINUTE)
    assert (again.measured, again.measured_to, Prediction.objects.count()) == (first.measured, first.measured_to, 1)


def test_a_record_that_fails_does_not_stop_the_others(policy, monkeypatch):
    publish(policy)
    with time_machine.travel(COMPLETED + MINUTE, tick=False):
        publish_revision(save_draft(policy, {"strategy": "random"}).pk)
    create = prediction_records.create_record
    broken = Rollout.objects.order_by("pk").first()
    monkeypatch.setattr(
        prediction_records, "create_record", lambda rollout: 1 / 0 if rollout == broken else create(rollout)
    )
    assert visit(COMPLETED + 2 * MINUTE).rollout != broken


def test_rollouts_of_more_than_a_week_ago_get_no_record(policy):
    publish(policy)
    with time_machine.travel(PUBLISHED + timedelta(days=8), tick=False):
        assert record_predictions(timezone.now()) == 0
    assert not Prediction.objects.exists()


def test_the_summary_says_what_it_rests_on(policy):
    strategies = ("random", "tiered", "least_load")
    rollouts = [publish_revision(save_draft(policy, {"strategy": strategy}).pk) for strategy in strategies]
    errors = ((0.01, 1.1), (-0.02, 0.9), (0.05, 2.0))
    for rollout, (error, growth) in zip(rollouts, errors, strict=True):
        predicted = {"hit_rate": 0.5 + error, "ttft_p50_s": 0.2 * growth, "ttft_p95_s": None, "is_calibrated": True}
        measured = {"hit_rate": 0.5, "ttft_p50_s": 0.2, "ttft_p95_s": None, "requests": 900}
        state = PredictionState.MEASURED
        Prediction.objects.create(rollout=rollout, predicted=predicted, measured=measured, state=state)
    summary = summarize(records_of(type(policy.pool).objects.all(), 10))
    assert (summary.rollouts, summary.compared, summary.without_prediction) == (3, 3, 0)
    assert (summary.median_hit_rate_error, summary.within_hit_rate) == pytest.approx((0.02, 2 / 3))
    assert (summary.median_ttft_error, summary.within_ttft) == pytest.approx((0.1, 2 / 3))
    empty = summarize([])
    assert (empty.compared, empty.median_hit_rate_error, empty.within_ttft) == (0, None, None)
