"""The included Prometheus rules, Grafana dashboards and autoscalers parse, fire as expected, and use known metrics."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import uvloop
import yaml
from django.urls import resolve
from django.utils import timezone
from msgspec.json import schema_components

from controlplane.services.fleet.pools import create_pool
from routing.observability.metrics import PREDICTION_LINES, PREFIX
from routing.schema import ResponseCache, TaskGroupConfig
from telemetry.api.capacity import ScalingQuery
from telemetry.metrics.router import OVERFLOW_REASONS
from telemetry.services.lab.scaling import PoolScaling
from telemetry.services.self_monitoring import own_metrics
from telemetry.web.views.metrics_servers import PREFIX as CONTROLPLANE
from tests.fakes.real_prometheus import program
from tests.fakes.replica import answering, fake_replicas, streaming
from tests.routing.proxy.harness import BODY, config, routed
from tests.telemetry.breakdown_bins import breakdown_bin

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/rules.yaml"
AUTOSCALING = ROOT / "deploy/autoscaling"
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
VLLM = ROOT / "tests/data/vllm/vllm-metrics-0.32.0-busy.txt"
NAME = re.compile(r"\b(?:warmpath_|vllm:)[a-z0-9_]+")
# Metrics that the requests of the test below do not produce, because a prediction needs a warm cache.
NOT_PRODUCED = {f"{PREFIX}{name}" for name, *_ in PREDICTION_LINES}


CACHEABLE = json.dumps(
    {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 431, "completion_tokens": 1, "total_tokens": 432},
    }
).encode()


def expressions() -> dict[str, str]:
    """PromQL expressions of rules, dashboards and autoscalers by location, with all variables filled in."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    by_location = {rule.get("record") or rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        queries = [(panel["title"], target["expr"]) for panel in board["panels"] for target in panel["targets"]]
        queries += [(annotation["name"], annotation["expr"]) for annotation in board["annotations"]["list"]]
        queries += [
            (v["name"], re.sub(r"label_values\((.*), \w+\)", r"\1", v["definition"])) for v in _variables(board)
        ]
        for number, (title, expression) in enumerate(queries):
            filled = expression.replace("$__rate_interval", "5m").replace("$pool", ".*").replace("$instance", ".*")
            by_location[f"{path.stem} {number} {title}"] = filled
    return by_location | {f"keda {number}": query for number, query in enumerate(_keda_queries())} | adapter_metrics()


def documents(name: str) -> list[dict[str, Any]]:
    """The Kubernetes documents of one file."""
    return list(yaml.safe_load_all((AUTOSCALING / name).read_text()))


def _keda_queries() -> list[str]:
    (scaled,) = documents("keda-prometheus.yaml")
    return [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]


def adapter_metrics() -> dict[str, str]:
    """The PromQL of the adapter's external metrics, as it asks for those of a pool, by name."""
    (values,) = documents("prometheus-adapter.yaml")
    return {
        rule["name"]["as"]: rule["metricsQuery"]
        .replace("<<.Series>>", rule["seriesQuery"])
        .replace("<<.LabelMatchers>>", 'pool="chat"')
        for rule in values["rules"]["external"]
    }


def _variables(board):
    return [variable for variable in board["templating"]["list"] if variable["type"] == "query"]


def promtool(*arguments: str) -> str:
    process = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_rules_parse_and_pass_their_unit_tests() -> None:
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(RULES.with_name("rules_test.yaml")))


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    tests = yaml.safe_load(RULES.with_name("rules_test.yaml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test.get("alert_rule_test", ()) if case.get("exp_alerts")}
    groups = yaml.safe_load(RULES.read_text())["groups"]

    assert fired == {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}


def test_the_rules_count_the_same_reasons_as_overflow_as_telemetry() -> None:
    selectors = re.findall(r'reason=~"([^"]*)"', expressions()["warmpath:overflow:ratio5m"])

    assert [set(selector.split("|")) for selector in selectors] == [set(OVERFLOW_REASONS)]


def test_every_expression_of_a_dashboard_is_promql(tmp_path: Path) -> None:
    rules = [{"record": f"x:{number}", "expr": expr} for number, expr in enumerate(expressions().values())]
    document = tmp_path / "rules.yaml"
    document.write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))

    promtool("check", "rules", str(document))


def test_the_scrape_configuration_is_valid(tmp_path: Path) -> None:
    text = (ROOT / "deploy/prometheus/scrape.yaml").read_text()
    (tmp_path / "token").write_text("secret")
    document = tmp_path / "prometheus.yaml"
    document.write_text(text.replace("/etc/prometheus/warmpath-token", str(tmp_path / "token")))

    promtool("check", "config", str(document))


def test_the_autoscaler_reads_metrics_that_the_adapter_defines() -> None:
    (autoscaler,) = documents("hpa.yaml")

    names = [metric["external"]["metric"]["name"] for metric in autoscaler["spec"]["metrics"]]

    assert set(names) <= adapter_metrics().keys()


def test_unknown_values_scale_nothing() -> None:
    """KEDA reads an empty result as 0 unless ``ignoreNullValues`` is false."""
    (scaled,) = documents("keda-prometheus.yaml")

    assert {trigger["metadata"]["ignoreNullValues"] for trigger in scaled["spec"]["triggers"]} == {"false"}


def test_the_rest_scaler_reads_a_number_that_may_be_unknown() -> None:
    secret, authentication, scaled = documents("keda-rest.yaml")
    (trigger,) = scaled["spec"]["triggers"]
    (reference,) = authentication["spec"]["secretTargetRef"]
    url = urlsplit(trigger["metadata"]["url"])

    assert resolve(url.path).view_name == "telemetry-api:scaling"
    assert set(parse_qs(url.query)) == set(ScalingQuery().fields)
    _, components = schema_components([PoolScaling])
    member = components["PoolScaling"]["properties"][trigger["metadata"]["valueLocation"]]
    assert member["anyOf"] == [{"type": "integer"}, {"type": "null"}]
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    assert (reference["name"], reference["key"] in secret["stringData"]) == (secret["metadata"]["name"], True)


@pytest.mark.parametrize("name", ["hpa.yaml", "keda-prometheus.yaml", "keda-rest.yaml"])
def test_replicas_are_removed_one_at_a_time_and_slowly(name: str) -> None:
    spec = documents(name)[-1]["spec"]
    behavior = spec.get("behavior") or spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]

    (policy,) = behavior["scaleDown"]["policies"]
    assert (policy["type"], policy["value"]) == ("Pods", 1)
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] >= 600


@pytest.mark.django_db
def test_every_metric_in_rules_and_dashboards_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMPATH_ROUTER_CACHE_URL", "redis://127.0.0.1:9/0")
    monkeypatch.setenv("WARMPATH_ROUTER_STATE_URL", "redis://127.0.0.1:9/0")
    now = timezone.now()
    breakdown_bin(create_pool("chat"), now, requests=1000, reachable=0.5)  # the reachable share of a pool is exposed
    control_plane_metrics = {CONTROLPLANE + figure.name for figure in own_metrics(now)}
    exposed = set(NAME.findall(VLLM.read_text())) | uvloop.run(_router_metrics()) | control_plane_metrics

    used = {name for expression in expressions().values() for name in NAME.findall(expression)}
    assert "warmpath_controlplane_pool_recommended_replicas" in used

    assert used - exposed == set()


async def _router_metrics() -> set[str]:
    usage = b'{"usage":{"prompt_tokens":431,"prompt_tokens_details":{"cached_tokens":416}}}'
    groups = (TaskGroupConfig(name="faq", response_cache=ResponseCache()),)
    async with fake_replicas(1, answering(usage)) as replicas, routed(config(replicas, groups=groups)) as harness:
        await harness.until(lambda: harness.router.services.checks.status("replica-0").is_up, "a first health check")
        await harness.chat()
        replicas[0].script = streaming(b"data: " + usage + b"\n\n")
        await harness.chat()
        replicas[0].script = answering(CACHEABLE)
        for _ in range(2):
            await harness.chat(json.dumps({**json.loads(BODY), "temperature": 0}).encode(), [b"X-Task-Group: faq"])
        _, text = await harness.admin("GET", "/metrics")
    return set(NAME.findall(text)) | NOT_PRODUCED
