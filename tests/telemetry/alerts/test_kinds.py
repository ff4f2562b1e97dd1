"""Rule kinds other than hit_rate_drop: which histories breach, which are OK, and which give no data."""

from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

import pytest

from controlplane.errors import InvalidError
from telemetry.alerts import kinds
from telemetry.alerts.findings import Reason, Result
from telemetry.alerts.history_window import ControlPlaneState, PressureStep, SemanticCacheState, ShareStep
from telemetry.alerts.kinds import KINDS, Scope
from telemetry.metrics.histograms import Buckets
from telemetry.metrics.rates import RouterCounts
from tests.telemetry.alerts.histories import FAILED, evaluated, only, past, step, window

BREACH, OK, NO_DATA = Result.BREACH, Result.OK, Result.NO_DATA


def results(findings):
    return {subject: (finding.result, finding.reason) for subject, finding in findings.items()}


@pytest.mark.parametrize(
    ("newest", "expected"),
    [
        (window(0.49), (BREACH, Reason.BELOW)),
        (window(0.5), (OK, Reason.WITHIN)),
        (window(0.1, requests=49), (NO_DATA, Reason.LITTLE_TRAFFIC)),
        (window(0.1, queries=19_999), (NO_DATA, Reason.LITTLE_TRAFFIC)),
    ],
)
def test_hit_rate_floor_compares_with_a_fixed_value(newest, expected):
    assert results(evaluated("hit_rate_floor", past(300, windows={"": [newest]}))) == {"": expected}


def responses_of(delivered, predicted=None, requests=200):
    """Responses of a replica, all of which reported their cached tokens."""
    tokens = 1_000_000
    known = RouterCounts(requests, requests, tokens, round(delivered * tokens))
    if predicted is None:
        return known
    return replace(
        known,
        predicted_responses=requests,
        predicted_prompt_tokens=tokens,
        predicted_tokens=round(predicted * tokens),
        predicted_cached_tokens=round(delivered * tokens),
    )


@pytest.mark.parametrize(
    ("responses", "engine", "expected", "between"),
    [
        (responses_of(0.70, 0.80), step(0.70, requests=200), BREACH, "predicted"),
        (responses_of(0.70, 0.70), step(0.00, requests=200), BREACH, "counted"),  # a counter stays 0: the cache works
        (responses_of(0.70), step(0.00, requests=200), BREACH, "counted"),  # a strategy that predicts nothing
        (responses_of(0.66, 0.70), step(0.67, requests=200), OK, "predicted"),
        (responses_of(0.70), step(0.00, requests=250), NO_DATA, None),  # a fifth of its requests came past the routers
        (responses_of(0.10, 0.90, requests=199), step(0.10, requests=199), NO_DATA, None),
        (responses_of(0.70), replace(step(), queries=None, hits=None), NO_DATA, None),
    ],
)
def test_two_hit_rates_more_than_five_points_apart_are_a_gap(responses, engine, expected, between):
    """H17"""
    history = past(300, replicas=("r1",), responses={"r1": [responses]}, engines={"r1": [engine]})

    finding = only(evaluated("prediction_gap", history))

    assert finding.result is expected
    assert finding.figures().get("between") == (between and (between, "delivered"))


def test_counters_of_a_decode_replica_are_not_compared():
    """H19"""
    parts = {"responses": {"r1": [responses_of(0.7)]}, "engines": {"r1": [step(0.0, requests=200)]}}
    history = past(300, replicas=("r1",), **parts)

    assert only(evaluated("prediction_gap", history)).result is BREACH
    assert (
        only(evaluated("prediction_gap", replace(history, hit_rate_replicas=frozenset()))).reason is Reason.NOT_REPORTED
    )


def late(share, requests=100):
    return Buckets((0.5, 1.0, 2.0), {0: round(requests * (1 - share)), 2: round(requests * share)})


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (0.30, 0.30, (BREACH, Reason.ABOVE)),
        (0.30, 0.00, (OK, Reason.WITHIN)),  # it is over: the short window is clean
        (0.05, 0.90, (OK, Reason.WITHIN)),  # a moment: the long window does not burn
        (0.29, 0.29, (OK, Reason.WITHIN)),
    ],
)
def test_ttft_objective_breaches_when_both_windows_burn(before, now, expected):
    """T6: 95 % within a second; six times the budget is 30 % late."""
    history = past(300, count=12, first_tokens={"": [*[late(before)] * 11, late(now)]})

    assert results(evaluated("ttft_objective", history)) == {"": expected}


def test_late_share_is_exact_at_a_named_histogram_edge():
    history = past(300, count=12, first_tokens={"": [late(0.5)] * 12})
    finding = only(evaluated("ttft_objective", history, within_s=0.9))

    assert (finding.value, finding.evidence.edge_s) == (0.5, 1.0)
    assert only(evaluated("ttft_objective", past(300, count=12))).reason is Reason.NO_READINGS


@pytest.mark.parametrize(
    ("kind", "settings", "field"),
    [
        ("ttft_objective", {"burn_rate": 21}, "burn_rate"),
        ("ttft_objective", {"long_s": 3500}, "long_s"),
        ("ttft_objective", {"long_s": 300}, "long_s"),
        ("cache_store_down", {"down_s": 301}, "down_s"),
        ("cache_share_drop", {"baseline_s": 1799}, "baseline_s"),
    ],
)
def test_a_rule_that_cannot_fire_is_rejected(kind, settings, field):
    with pytest.raises(InvalidError) as caught:
        KINDS[kind].read(settings)
    assert caught.value.faults[0].path == f"$.settings.{field}"


def test_a_replica_is_down_when_every_attempted_scrape_failed():
    engines = {"r1": [step(), FAILED, FAILED], "r2": [step(), step(), None], "r3": [step(), step(), step(failed=True)]}
    history = past(30, count=3, replicas=("r1", "r2", "r3"), engines=engines)

    findings = evaluated("replica_down", history)

    assert results(findings) == {
        "r1": (BREACH, Reason.SCRAPES_FAIL),
        "r2": (NO_DATA, Reason.NO_READINGS),
        "r3": (OK, Reason.WITHIN),
    }
    assert (findings["r1"].value, findings["r1"].unit) == (60.0, "seconds")


def test_a_new_replica_is_down_after_enough_failed_scrapes():
    engines = {"new": [None, None, FAILED], "old": [None, FAILED, FAILED]}
    history = past(30, count=3, replicas=("new", "old"), engines=engines)

    findings = evaluated("replica_down", history)

    assert results(findings) == {"new": (NO_DATA, Reason.SCRAPES_FAIL), "old": (BREACH, Reason.SCRAPES_FAIL)}
    kind = KINDS["replica_down"]
    assert kind.summarize(Scope("chat", "", "old"), kind.read({}), findings["old"]).endswith("for more than 30 s.")


def test_kv_pressure_is_usage_or_preemptions():
    full, pushed = PressureStep(0.96, 0), PressureStep(0.5, 30)
    unknown = PressureStep(None, None)
    pressure = {"r1": [full], "r2": [pushed], "r3": [PressureStep(0.94, 29)], "r4": [unknown]}
    findings = evaluated("kv_pressure", past(300, replicas=("r1", "r2", "r3", "r4", "r5"), pressure=pressure))

    assert results(findings) == {
        "r1": (BREACH, Reason.ABOVE),
        "r2": (BREACH, Reason.ABOVE),
        "r3": (OK, Reason.WITHIN),
        "r4": (NO_DATA, Reason.NOT_REPORTED),
        "r5": (NO_DATA, Reason.NO_READINGS),
    }
    assert (findings["r2"].value, findings["r2"].unit) == (6.0, "count")


@pytest.mark.parametrize(
    ("requests", "active", "expected"),
    [
        ({"r1": 300, "r2": 100}, ("r1", "r2"), (BREACH, Reason.ABOVE)),
        ({"r1": 260, "r2": 140}, ("r1", "r2"), (OK, Reason.WITHIN)),
        ({"r1": 300, "r2": 0}, ("r1",), (NO_DATA, Reason.NO_REPLICAS)),  # one drains
        ({"r1": 150, "r2": 49}, ("r1", "r2"), (NO_DATA, Reason.LITTLE_TRAFFIC)),
    ],
)
def test_skew_is_the_busiest_active_replica_over_the_mean(requests, active, expected):
    engines = {name: [step(requests=count)] for name, count in requests.items()}

    assert results(evaluated("load_skew", past(300, engines=engines, active=frozenset(active)))) == {"": expected}


@pytest.mark.parametrize(
    ("stores", "has_cache", "expected", "affected"),
    [
        ({"a": [0.4], "b": [0.0]}, True, (BREACH, Reason.ABOVE), ["a"]),  # 120 s of 300 s
        ({"a": [1.0], "b": [1.0]}, True, (BREACH, Reason.ABOVE), ["a", "b"]),
        ({"a": [0.39], "b": [0.2]}, True, (OK, Reason.WITHIN), []),
        ({"a": [1.0]}, False, (NO_DATA, Reason.NO_CACHE), None),
        ({"a": [None]}, True, (NO_DATA, Reason.NO_CACHE), None),
        ({}, True, (NO_DATA, Reason.NO_CACHE), None),
    ],
)
def test_a_store_is_down_by_the_router_that_lacks_it_longest(stores, has_cache, expected, affected):
    history = past(300, cache_stores=stores, has_response_cache=has_cache)

    findings = evaluated("cache_store_down", history)

    assert results(findings) == {"": expected}
    assert only(findings).figures().get("routers") == affected


def shares(*ratios, requests=300):
    return [None if ratio is None else ShareStep(requests, ratio * requests) for ratio in ratios]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (shares(0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.6), (BREACH, Reason.BELOW)),
        (shares(0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.61), (OK, Reason.WITHIN)),
        (shares(0.8, None, 0.8, None, 0.8, None, 0.5), (BREACH, Reason.BELOW)),
        (shares(0.8, None, None, None, 0.8, None, 0.5), (NO_DATA, Reason.LITTLE_HISTORY)),
        (shares(0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1), (BREACH, Reason.BELOW)),  # half of the level
        (shares(0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.9), (OK, Reason.WITHIN)),
        ([*shares(0.8, 0.8, 0.8, 0.8, 0.8, 0.8), ShareStep(199, 0)], (NO_DATA, Reason.LITTLE_TRAFFIC)),
        (shares(0.8, 0.8, 0.8, 0.8, 0.8, 0.8, None), (NO_DATA, Reason.LITTLE_TRAFFIC)),
    ],
)
def test_the_share_of_hits_is_compared_with_its_level_before(steps, expected):
    history = past(600, count=7, cache_requests={None: steps, "faq": shares(*[0.5] * 7)}, has_response_cache=True)

    assert results(evaluated("cache_share_drop", history)) == {"": expected}
    assert only(evaluated("cache_share_drop", history, "faq")).result is OK
    assert only(evaluated("cache_share_drop", replace(history, has_response_cache=False))).reason is Reason.NO_CACHE


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        (ControlPlaneState({"router-1": 120.0}, {}, 2), (BREACH, Reason.ABOVE)),
        (ControlPlaneState({"router-1": 119.0}, {}, 2), (OK, Reason.WITHIN)),
        (ControlPlaneState({}, {}, 2), (OK, Reason.WITHIN)),
        (ControlPlaneState(), (NO_DATA, Reason.NO_REPLICAS)),
        (None, (NO_DATA, Reason.NOT_STORED)),
    ],
)
def test_rollout_stuck_compares_the_time_that_routers_are_behind(control, expected):
    assert results(evaluated("rollout_stuck", past(60, control=control))) == {"": expected}


@pytest.mark.parametrize(
    ("peers", "expected", "apart"),
    [
        ({"a": 2, "b": 2, "c": 2}, (OK, Reason.WITHIN), []),
        ({"a": 2, "b": 3, "c": 2}, (OK, Reason.WITHIN), []),  # a picker, or a process that is being replaced
        ({"a": 1, "b": 1, "c": None}, (BREACH, Reason.BELOW), ["a", "b", "c"]),
        ({"a": 0, "b": 0}, (BREACH, Reason.BELOW), ["a", "b"]),
        ({"a": None}, (NO_DATA, Reason.NO_REPLICAS), None),
        ({}, (NO_DATA, Reason.NO_REPLICAS), None),
    ],
)
def test_routers_apart_compares_the_peers_of_each_router_with_the_others(peers, expected, apart):
    findings = evaluated("routers_apart", past(60, control=ControlPlaneState(routers=3, peers=peers)))

    assert results(findings) == {"": expected}
    assert only(findings).figures().get("routers") == apart


def test_evaluator_lag_reports_missing_scrapes_and_late_evaluations():
    quiet = past(15, count=4, engines={"r1": [step(), step(), None, None], "r2": [FAILED, None, None, None]})
    finding = only(evaluated("evaluator_lag", quiet))
    assert (finding.result, finding.value, finding.evidence.what) == (BREACH, 30.0, "scraped")

    failing = past(15, count=1, engines={"r1": [FAILED]})
    assert only(evaluated("evaluator_lag", failing)).result is OK  # somebody tries

    late_rules = ControlPlaneState(since_evaluation_s=40.04321)
    finding = only(evaluated("evaluator_lag", past(15, engines={"r1": [step()]}, control=late_rules)))
    assert (finding.result, finding.value, finding.evidence.what) == (BREACH, 40.04321, "evaluated")
    kind = KINDS["evaluator_lag"]
    assert "not evaluated for 40 s:" in kind.summarize(Scope("chat"), kind.read({}), finding)

    assert only(evaluated("evaluator_lag", past(15, count=3, engines={}))).result is NO_DATA  # it never began


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        ({"r1": [FAILED], "r2": [FAILED]}, (BREACH, Reason.NO_READINGS)),
        ({}, (BREACH, Reason.NO_READINGS)),
        ({"r1": [FAILED], "r2": [step()]}, (OK, Reason.WITHIN)),
    ],
)
def test_no_data_breaches_without_a_successful_scrape(engines, expected):
    assert results(evaluated("no_data", past(60, engines=engines))) == {"": expected}


def test_a_pool_without_replicas_gives_no_result():
    for kind in ("no_data", "evaluator_lag"):
        assert only(evaluated(kind, past(60, replicas=()))).reason is Reason.NO_REPLICAS


def test_a_semantic_cache_breaches_where_routers_stopped_serving():
    caches = {
        "good": SemanticCacheState(0.98, 0.99, 500),
        "shadow": SemanticCacheState(0.98, 0.6, 500),
        "new": SemanticCacheState(0.98),
    }
    finding = only(evaluated("semantic_cache_precision", past(60, semantic_caches=caches)))
    assert (finding.result, finding.value, finding.limit) == (OK, 0.6, None)
    caches["bad"] = SemanticCacheState(0.95, 0.94, 200, ("router-1", "router-2"))
    caches["worse"] = SemanticCacheState(0.9, 0.8, 200, ("router-2",))
    history = past(60, semantic_caches=caches)
    finding = only(evaluated("semantic_cache_precision", history))
    assert (finding.result, finding.value, finding.limit, finding.evidence.group) == (BREACH, 0.8, 0.9, "worse")
    assert only(evaluated("semantic_cache_precision", history, "bad")).value == 0.94
    assert only(evaluated("semantic_cache_precision", history, "good")).result is OK
    assert only(evaluated("semantic_cache_precision", history, "new")).reason is Reason.LITTLE_TRAFFIC
    assert only(evaluated("semantic_cache_precision", history, "none")).reason is Reason.NOT_REPORTED
    kind = KINDS["semantic_cache_precision"]
    assert kind.summarize(Scope("chat"), kind.read({}), finding) == (
        "The semantic cache of task group worse (pool chat) stopped serving a caller at router-2: "
        "80.0 % of the latest checks were right, below the limit of 90.0 %."
    )
    assert not kind.can_be_replayed


def test_every_rule_kind_is_implemented_and_described():
    modules = [import_module(f"telemetry.alerts.kinds.{found.name}") for found in iter_modules(kinds.__path__)]
    defined = {kind.name for module in modules for kind in vars(module).values() if isinstance(kind, kinds.Kind)}
    assert defined == set(KINDS)
    for kind in KINDS.values():
        assert kind.about.endswith(".")
        assert set(kind.inhibited_by) < set(KINDS)
        assert kind.condition(kind.read({}))


def test_every_summary_is_a_sentence_that_names_the_pool():
    control = ControlPlaneState({"router-1": 200.0}, {"router-1": "no strategy x"}, 2)
    cases = {
        "hit_rate_floor": past(300, windows={"": [window(0.1)]}),
        "prediction_gap": past(300, responses={"r1": [responses_of(0.1, 0.9)]}),
        "ttft_objective": past(300, count=12, first_tokens={"": [late(0.5)] * 12}),
        "replica_down": past(30, count=2, engines={"r1": [FAILED, FAILED]}),
        "kv_pressure": past(300, pressure={"r1": [PressureStep(0.99, 0)]}),
        "load_skew": past(300, engines={"r1": [step(requests=900)], "r2": [step(requests=10)]}),
        "semantic_cache_precision": past(60, semantic_caches={"faq": SemanticCacheState(0.98, 0.9, 200, ("r",))}),
        "rollout_stuck": past(60, control=control),
        "routers_apart": past(60, control=ControlPlaneState(routers=2, peers={"router-1": None, "router-2": 0})),
        "cache_store_down": past(300, cache_stores={"router-1": [1.0]}, has_response_cache=True),
        "cache_share_drop": past(600, count=7, cache_requests={None: shares(*[0.8] * 6, 0.1)}, has_response_cache=True),
        "evaluator_lag": past(15, count=3, engines={"r1": [step(), None, None]}),
        "no_data": past(60, engines={"r1": [FAILED]}),
    }
    for name, history in cases.items():
        kind = KINDS[name]
        subject, finding = next(pair for pair in evaluated(name, history).items() if pair[1].result is BREACH)
        summary = kind.summarize(Scope("chat", "", subject), kind.read({}), finding)
        assert summary.endswith((".", "x.")), summary
        assert "chat" in summary or name in {"rollout_stuck", "routers_apart"}, summary
        assert "None" not in summary, summary


def test_a_task_group_s_summary_has_the_share_of_responses_measured():
    part = replace(window(0.2), accounted_ratio=0.4)
    settings = KINDS["hit_rate_floor"].read({})
    where = Scope(pool="chat", group="coding")
    finding = only(evaluated("hit_rate_floor", past(300, windows={"coding": [part]}), "coding"))

    assert KINDS["hit_rate_floor"].summarize(where, settings, finding).endswith(" Measured on 40.0 % of the responses.")
    whole = only(evaluated("hit_rate_floor", past(300, windows={"": [window(0.2)]})))
    assert "Measured on" not in KINDS["hit_rate_floor"].summarize(Scope(pool="chat"), settings, whole)
