"""The chart renders, is valid for Kubernetes, and its objects fit each other, the programs and their limits."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from routing.schema import Limits
from routing.settings import read_settings
from tests.contracts.documents.test_completeness import is_variable
from tests.contracts.test_compose_file import SERVICES, command_of

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/warmpath"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
DEFINITIONS = json.loads((ROOT / "tests/data/kubernetes/definitions-1.34.json").read_text())
KINDS = {
    (f"{kind['group']}/{kind['version']}".removeprefix("/"), kind["kind"]): name
    for name, definition in DEFINITIONS["$defs"].items()
    for kind in definition.get("x-kubernetes-group-version-kind", ())
}
MINIMAL = {"host": "warmpath.example.com"}
PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "other"}}}]
EVERYTHING = {
    "host": "warmpath.example.com",
    "image": {"registry": "registry.example.com/team", "tag": "0.1.1"},
    "imagePullSecrets": [{"name": "registry"}],
    "extraHosts": ["routes.example.com"],
    "secret": {"name": "kept", "keys": {"databaseOwnerUrl": "owner", "metricsToken": "m", "adminPassword": "admin"}},
    "controlPlane": {
        "env": {"WARMPATH_FLEET_NETWORKS": "10.0.0.0/8", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"},
        "secretEnv": {"WARMPATH_OIDC_CLIENT_SECRET": "oidc", "WARMPATH_CONFIG_SIGNING_KEY": "signing"},
        "volumes": [{"name": "authorities", "configMap": {"name": "authorities"}}],
        "volumeMounts": [{"name": "authorities", "mountPath": "/authorities"}],
    },
    "router": {
        "configKeys": "0" * 64,
        "env": {"WARMPATH_ROUTER_TLS_CERT_FILE": "/tls/tls.crt"},
        "secretEnv": {"WARMPATH_ROUTER_CACHE_URL": "cache-url"},
        "volumes": [{"name": "tls", "secret": {"secretName": "tls"}}],
        "volumeMounts": [{"name": "tls", "mountPath": "/tls"}],
        "drainTimeoutSeconds": 600,
        "state": {"storageClassName": "fast"},
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "autoscaling": {"enabled": True},
    },
    "discovery": {"namespaces": ["inference", "models"], "inferencePools": True},
    "ingress": {"enabled": True, "className": "nginx", "tlsSecretName": "tls", "annotations": {"a": "b"}},
    "networkPolicy": {"clients": PEERS, "proxies": PEERS, "prometheus": PEERS},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "cpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "important",
}
NOTHING_OPTIONAL = {
    "host": "warmpath.example.com",
    "discovery": {"enabled": False},
    "networkPolicy": {"enabled": False},
}
INVALID = {
    "no host": {},
    "a URL as host": {"host": "https://warmpath.example.com"},
    "an unknown value": {"host": "a.example", "routers": 3},
    "an unknown setting": {"host": "a.example", "router": {"env": {"LD_PRELOAD": "x"}}},
    "a setting of the chart": {"host": "a.example", "controlPlane": {"env": {"WARMPATH_ALLOWED_HOSTS": "b.example"}}},
    "an ingress that may not connect": {"host": "a.example", "ingress": {"enabled": True}},
    "clients that may not connect": {"host": "a.example", "router": {"service": {"type": "LoadBalancer"}}},
    "a Prometheus that may not connect": {"host": "a.example", "serviceMonitor": {"enabled": True}},
    "more routers than the maximum": {
        "host": "a.example",
        "router": {"replicas": 10, "autoscaling": {"enabled": True}},
    },
    "a wrong key": {"host": "a.example", "router": {"configKeys": "secret"}},
}
REASONS = {
    "an ingress that may not connect": "networkPolicy.proxies: with ingress.enabled, expected",
    "clients that may not connect": "networkPolicy.clients: with router.service.type",
    "a Prometheus that may not connect": "networkPolicy.prometheus: with serviceMonitor.enabled",
    "more routers than the maximum": "router.autoscaling.maxReplicas: expected router.replicas",
}
VALUES = {"minimal": MINIMAL, "everything": EVERYTHING, "nothing optional": NOTHING_OPTIONAL}
STANDARD = {"DJANGO_SETTINGS_MODULE", "OTEL_EXPORTER_OTLP_ENDPOINT", "POD_IP", "POD_NAME", "WEB_CONCURRENCY"}
SECRETS = Path("/run/secrets")
Object = dict[str, Any]


@pytest.fixture(scope="module")
def helm() -> Object:
    """What Helm renders and finds."""
    if importlib.util.find_spec("helm_python") is None:
        assert os.environ.get("REQUIRE_PROGRAMS") != "1", "helm-python-sdk is missing"
        pytest.skip("helm-python-sdk has no build for this platform")
    command = [sys.executable, "-m", "tests.contracts.helm", str(CHART)]
    values = json.dumps([*VALUES.values(), *INVALID.values()])
    done = subprocess.run(command, input=values, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=VALUES)
def objects(helm: Object, request: pytest.FixtureRequest) -> list[Object]:
    """All objects of a release."""
    return documents(helm["rendered"][list(VALUES).index(request.param)])


def documents(rendered: Object) -> list[Object]:
    assert "error" not in rendered, rendered.get("error")
    texts = (text for name, text in rendered["files"].items() if name.endswith(".yaml"))
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def workloads(objects: list[Object]) -> Iterator[tuple[str, Object, Object]]:
    """Component, object and pod of each workload."""
    for item in objects:
        if "template" in item.get("spec", {}):
            pod = item["spec"]["template"]
            yield pod["metadata"]["labels"]["app.kubernetes.io/component"], item, pod


def containers(pod: Object) -> list[Object]:
    return [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]


def of_kind(objects: list[Object], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def selects(selector: Object, pod: Object) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


def test_helm_lint_finds_nothing(helm: Object) -> None:
    assert [finding for finding in helm["findings"] if "icon is recommended" not in finding["error"]] == []


@pytest.mark.parametrize("case", INVALID)
def test_invalid_values_are_rejected(helm: Object, case: str) -> None:
    assert REASONS.get(case, "") in helm["rendered"][len(VALUES) + list(INVALID).index(case)]["error"]


def test_every_object_is_valid_for_kubernetes(objects: list[Object]) -> None:
    for item in objects:
        if item["apiVersion"] == "monitoring.coreos.com/v1":
            continue
        name = KINDS[item["apiVersion"], item["kind"]]
        jsonschema_rs.validate({"$schema": DRAFT, "$ref": f"#/$defs/{name}", **DEFINITIONS}, item)
    names = [(item["kind"], item["metadata"].get("namespace"), item["metadata"]["name"]) for item in objects]
    assert len(names) == len(set(names))


def test_every_container_is_confined_and_limited(objects: list[Object]) -> None:
    for component, _, pod in workloads(objects):
        context = pod["spec"]["securityContext"]
        assert context["runAsNonRoot"]
        assert context["runAsUser"] >= 10_000
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["spec"]["automountServiceAccountToken"] is False or component == "worker"
        for container in containers(pod):
            own = container["securityContext"]
            assert own == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert set(container["resources"]["requests"]) == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("component", ["worker", "beat"])
def test_a_probe_by_command_is_the_health_check_of_the_compose_service(objects: list[Object], component: str) -> None:
    (pod,) = [pod for name, _, pod in workloads(objects) if name == component]
    probes = [probe for name, probe in pod["spec"]["containers"][0].items() if name.endswith("Probe")]
    commands = [" ".join(probe["exec"]["command"]).strip() for probe in probes]
    assert set(commands) == {" ".join(SERVICES[component]["healthcheck"]["test"][1:]).strip()}


def test_every_service_process_has_probes(objects: list[Object]) -> None:
    probes = {
        component: {name for name in pod["spec"]["containers"][0] if name.endswith("Probe")}
        for component, _, pod in workloads(objects)
    }
    every = {"startupProbe", "readinessProbe", "livenessProbe"}
    assert probes == {
        "web": every,
        "router": every,
        "beat": {"startupProbe", "livenessProbe"},
        "worker": {"startupProbe"},  # each costs seconds of CPU
        "migration": set(),
    }


def test_every_mount_and_port_exists(objects: list[Object]) -> None:
    for _, item, pod in workloads(objects):
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in item["spec"].get("volumeClaimTemplates", ())}
        mounts = [mount for container in containers(pod) for mount in container["volumeMounts"]]
        assert {mount["name"] for mount in mounts} == volumes
        for container in containers(pod):
            ports = {port["name"] for port in container.get("ports", ())}
            probed = [container[name] for name in container if name.endswith("Probe")]
            assert {probe["httpGet"]["port"] for probe in probed if "httpGet" in probe} <= ports


def test_every_selector_finds_its_pods_and_every_target_port_exists(objects: list[Object]) -> None:
    pods = [pod for _, _, pod in workloads(objects)]
    for _, item, pod in workloads(objects):
        if item["kind"] != "Job":
            assert selects(item["spec"]["selector"]["matchLabels"], pod)
    for service in of_kind(objects, "Service"):
        (pod,) = [pod for pod in pods if selects(service["spec"]["selector"], pod)]
        ports = {port["name"] for container in containers(pod) for port in container["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    selectors = [item["spec"]["selector"]["matchLabels"] for item in of_kind(objects, "PodDisruptionBudget")]
    policies = of_kind(objects, "NetworkPolicy")
    selectors += [item["spec"]["podSelector"]["matchLabels"] for item in policies]
    for selector in selectors:
        assert len([pod for pod in pods if selects(selector, pod)]) == 1
    assert len(policies) in {0, len(pods)}, "every pod has a policy"


def test_every_policy_allows_named_ports_only_from_listed_peers(objects: list[Object]) -> None:
    for policy in of_kind(objects, "NetworkPolicy"):
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        for rule in policy["spec"].get("ingress", ()):
            assert rule["from"]
            assert {port["port"] for port in rule["ports"]} <= {"http", "data", "admin"}
            if rule["ports"] == [{"port": "admin"}]:
                assert {} not in [peer.get("podSelector") for peer in rule["from"]]


def test_every_monitor_selects_one_service_with_its_port(objects: list[Object]) -> None:
    for monitor in of_kind(objects, "ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [item for item in of_kind(objects, "Service") if selects(selector, item)]
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= ports


def test_every_variable_is_a_setting_and_every_secret_is_a_mounted_file(objects: list[Object]) -> None:
    for _, _, pod in workloads(objects):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for container in containers(pod):
            names = [variable["name"] for variable in container["env"]]
            assert len(names) == len(set(names))
            assert [name for name in names if not (name in STANDARD or is_variable(name))] == []
            files = {
                f"{mount['mountPath']}/{entry['path']}"
                for mount in container["volumeMounts"]
                for entry in volumes.get(mount["name"], {}).get("secret", {}).get("items", ())
            }
            values = {variable["value"] for variable in container["env"] if "value" in variable}
            assert {value for value in values if value.startswith("/run/secrets")} == files
            assert not any("secretKeyRef" in str(variable) for variable in container["env"])


def test_a_router_has_time_to_drain_and_its_state_on_a_volume(objects: list[Object]) -> None:
    ((_, item, pod),) = [workload for workload in workloads(objects) if workload[0] == "router"]
    (router,) = containers(pod)
    pause_s = router["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["spec"]["terminationGracePeriodSeconds"] >= pause_s + Limits().drain_timeout_s + 15
    assert item["spec"]["volumeClaimTemplates"]
    environment = {variable["name"]: variable.get("value", "x") for variable in router["env"]}
    environment = {name: value for name, value in environment.items() if not value.startswith(("/run", "/tls"))}
    arguments = [argument.replace("$(POD_NAME)", "warmpath-router-0") for argument in router["command"][4:]]
    settings = read_settings(arguments, {**environment, "WARMPATH_ROUTER_ADMIN_TOKEN": "secret"})
    assert (settings.name, settings.reuse_port) == ("warmpath-router-0", True)
    assert {"data": settings.port, "admin": settings.admin_port} == {
        port["name"]: port["containerPort"] for port in router["ports"]
    }
    assert settings.state_dir.is_relative_to(
        *(mount["mountPath"] for mount in router["volumeMounts"] if mount["name"] == "state")
    )
    host = settings.control_plane_url.removeprefix("http://").partition(":")[0]
    (web,) = [pod for component, _, pod in workloads(objects) if component == "web"]
    (hosts,) = [
        variable["value"] for variable in web["spec"]["containers"][0]["env"] if "ALLOWED_HOSTS" in variable["name"]
    ]
    assert {host, "warmpath.example.com"} <= set(hosts.split(","))
    for ingress in of_kind(objects, "Ingress"):
        served = [rule["host"] for rule in ingress["spec"]["rules"]]
        assert served == ingress["spec"]["tls"][0]["hosts"] == hosts.split(",")[: len(served)]
    assert host in {service["metadata"]["name"] for service in of_kind(objects, "Service")}


def test_a_scaled_router_set_has_no_fixed_number_of_replicas(objects: list[Object]) -> None:
    (routers,) = of_kind(objects, "StatefulSet")
    scalers = of_kind(objects, "HorizontalPodAutoscaler")
    assert ("replicas" in routers["spec"]) == (not scalers)
    for scaler in scalers:
        assert scaler["spec"]["scaleTargetRef"]["name"] == routers["metadata"]["name"]


def test_workers_may_only_read_what_discovery_needs(objects: list[Object]) -> None:
    slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list"]}
    pools = {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "verbs": ["get"]}
    pods = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
    roles = of_kind(objects, "Role")
    assert all(role["rules"] in ([slices], [slices, pools, pods]) for role in roles)
    assert [role for role in roles if len(role["rules"]) > 1] in ([], roles)
    assert not of_kind(objects, "ClusterRole")
    places = [(role["metadata"]["namespace"], role["metadata"]["name"]) for role in roles]
    bindings = of_kind(objects, "RoleBinding")
    assert [(item["metadata"]["namespace"], item["roleRef"]["name"]) for item in bindings] == places
    accounts = {(subject["namespace"], subject["name"]) for item in bindings for subject in item["subjects"]}
    assert accounts <= {("inference", item["metadata"]["name"]) for item in of_kind(objects, "ServiceAccount")}


def test_pods_are_listed_only_where_inference_pools_are_discovered(helm: Object) -> None:
    named = {name: documents(rendered) for name, rendered in zip(VALUES, helm["rendered"], strict=False)}
    resources = {
        name: {resource for role in of_kind(found, "Role") for rule in role["rules"] for resource in rule["resources"]}
        for name, found in named.items()
    }
    assert resources == {
        "minimal": {"endpointslices"},
        "everything": {"endpointslices", "inferencepools", "pods"},
        "nothing optional": set(),
    }


def test_migrations_run_before_an_installation_and_before_an_upgrade(objects: list[Object]) -> None:
    (job,) = of_kind(objects, "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    pod = job["spec"]["template"]
    commands = [container["command"][-1] for container in containers(pod)]
    has_password = "WARMPATH_ADMIN_PASSWORD_FILE" in str(pod)
    assert commands == ["migrate", "maintain_partitions", *(["seed_fleet"] if has_password else [])]
    assert len(pod["spec"]["containers"]) == 1  # init containers run one after the other


def test_every_value_that_a_template_uses_has_a_default_and_a_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = {tuple(match.split(".")) for match in re.findall(r"\.Values\.([\w.]+)", templates)}

    def paths(value: object, definition: Object, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
        if isinstance(value, dict) and "properties" in definition:
            assert set(definition["properties"]) - {"global"} == set(value), prefix
            for name, item in value.items():
                yield from paths(item, definition["properties"][name], (*prefix, name))
        else:
            yield prefix

    known = set(paths(values, schema))
    assert {path for path in used if not any(path == item[: len(path)] for item in known)} == set()


@pytest.mark.parametrize("component", ["web", "worker", "beat", "router"])
def test_a_pod_runs_the_same_command_as_the_compose_service(objects: list[Object], component: str) -> None:
    (pod,) = [pod for name, _, pod in workloads(objects) if name == component]
    command = [word.replace("$(POD_NAME)", "router-1") for word in pod["spec"]["containers"][0]["command"]]
    service = "router-1" if component == "router" else component
    assert [word.replace("warmpath-web:", "web:") for word in command] == command_of(service)
