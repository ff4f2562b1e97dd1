"""Kubernetes discovery against an API server over HTTP and TLS."""

import ipaddress
import time

import msgspec
import pytest

from controlplane.discovery import kubernetes_api
from controlplane.discovery.kubernetes import (
    InferencePoolKind,
    InferencePoolSettings,
    KubernetesKind,
    KubernetesSettings,
)
from controlplane.discovery.targets import PollError, PollLimits, role_of
from controlplane.egress import fleet_rules
from tests.fakes.certificates import Authority
from tests.fakes.fake_kubernetes import (
    PODS,
    POOLS,
    TOKEN,
    endpoint_slice,
    engine_pod,
    inference_pool,
    pod,
    serving_kubernetes,
)
from tests.pace import is_within


@pytest.fixture
def server():
    with serving_kubernetes() as server:
        server.slices = [endpoint_slice(pod("vllm-0", "10.0.0.1"), pod("vllm-1", "10.0.0.2"))]
        yield server


def poll(server, *, token=TOKEN, deadline_s=5.0, max_targets=100, **settings):
    values = {"service": "vllm", "namespace": "prod", "api_url": server.url, **settings}
    limits = PollLimits(fleet_rules(), deadline_s, max_targets)
    return KubernetesKind().poll(msgspec.convert(values, KubernetesSettings), token, limits)


def summary(result):
    return [(target.key, target.url, str(target.condition)) for target in result.targets]


def test_a_pods_name_is_the_identity(server):
    result = poll(server)
    assert summary(result) == [("vllm-0", "http://10.0.0.1:8000", "ready"), ("vllm-1", "http://10.0.0.2:8000", "ready")]
    assert result.targets[0].labels == {"node": "gpu-node-1", "zone": "eu-central-1a"}
    path, query, authorization = server.requests[0]
    assert path == "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
    assert query["labelSelector"] == "kubernetes.io/service-name=vllm"
    assert authorization == f"Bearer {TOKEN}"


def test_a_role_is_read_from_the_services_labels(server):
    server.slices = [endpoint_slice(pod("vllm-0", "10.0.0.1"), labels={"llm-d.ai/role": "prefill", "team": "search"})]
    assert poll(server).targets[0].labels == {
        "node": "gpu-node-1", "zone": "eu-central-1a", "llm-d.ai/role": "prefill"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("labels", "role"),
    [
        ({"role": "prefill"}, "prefill"),
        ({"llm-d.ai/role": "decode"}, "decode"),
        ({"role": "decode", "llm-d.ai/role": "prefill"}, "decode"),
        ({"role": "both"}, "both"),
        ({"llm-d.ai/role": "prefill-decode"}, "both"),
        ({"role": "gpu"}, "both"),
        ({}, "both"),
    ],
)
def test_the_role_of_an_engine_follows_its_labels(labels, role):
    assert role_of(labels) == role


@pytest.mark.parametrize(
    ("reported", "condition"),
    [
        ({"ready": True, "serving": True, "terminating": False}, "ready"),
        ({"ready": None, "serving": None, "terminating": None}, "ready"),  # unknown counts as ready
        ({"ready": False, "serving": False, "terminating": False}, "not_ready"),
        ({"ready": False, "serving": True, "terminating": True}, "terminating"),
        ({"ready": False, "serving": False, "terminating": True}, "terminating"),
    ],
)
def test_conditions_have_kubernetes_meaning(server, reported, condition):
    server.slices = [endpoint_slice(pod("vllm-0", "10.0.0.1", **reported))]
    assert summary(poll(server))[0][2] == condition


def test_all_pages_are_read(server):
    server.page = 2
    server.slices = [endpoint_slice(pod(f"vllm-{n}", f"10.0.0.{n}"), name=f"vllm-{n}") for n in range(1, 8)]
    assert len(poll(server).targets) == 7
    assert len(server.requests) == 4


def test_a_list_that_expires_while_it_is_read_is_read_again(server):
    server.page, server.expire = 1, 1
    server.slices = [endpoint_slice(pod(f"vllm-{n}", f"10.0.0.{n}")) for n in range(1, 4)]
    assert len(poll(server).targets) == 3
    server.expire = 2
    with pytest.raises(PollError, match="expired twice"):
        poll(server)


def test_an_endpoint_in_two_slices_is_one_target_with_the_readier_condition(server):
    stale = pod("vllm-0", "10.0.0.1", ready=False, serving=False)
    server.slices = [endpoint_slice(stale), endpoint_slice(pod("vllm-0", "10.0.0.1"))]
    assert summary(poll(server)) == [("vllm-0", "http://10.0.0.1:8000", "ready")]


def test_a_dual_stack_pod_is_one_replica(server):
    server.slices.append(endpoint_slice(pod("vllm-0", "fd00::1"), pod("vllm-1", "fd00::2"), family="IPv6"))
    assert [url for _, url, _ in summary(poll(server))] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    server.slices = server.slices[1:]
    assert summary(poll(server))[0][1] == "http://[fd00::1]:8000"


def test_an_address_of_two_pods_belongs_to_the_ready_one(server):
    server.slices = [endpoint_slice(pod("old", "10.0.0.1", terminating=True), pod("new", "10.0.0.1"))]
    result = poll(server)
    assert [key for key, _, _ in summary(result)] == ["new"]
    assert "http://10.0.0.1:8000 is already target new" in result.rejections[0]


PORTS = [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9400}]


def test_the_port_is_the_configured_or_the_only_one(server):
    server.slices = [endpoint_slice(pod("vllm-0", "10.0.0.1"), ports=PORTS)]
    assert summary(poll(server, port="metrics"))[0][1] == "http://10.0.0.1:9400"
    assert summary(poll(server, port="8080"))[0][1] == "http://10.0.0.1:8080"
    with pytest.raises(PollError, match=r"more or fewer than one port .it has: http, metrics"):
        poll(server)
    with pytest.raises(PollError, match="no port named grpc"):
        poll(server, port="grpc")


def test_an_endpoint_without_a_pod_is_identified_by_its_address(server):
    server.slices = [endpoint_slice({"addresses": ["10.0.0.9"]})]
    assert summary(poll(server)) == [("10.0.0.9:8000", "http://10.0.0.9:8000", "ready")]


def test_a_service_without_pods_has_no_targets(server):
    server.slices = [endpoint_slice()]
    assert poll(server).targets == ()
    assert poll(server, service="other").targets == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token": "wrong"}, "rejected the token"),
        ({"namespace": "other"}, "may not list endpointslices in namespace other"),
        ({"mode": "500"}, r"status 500: etcdserver: request timed out\?\?Set-Cookie: x\."),
        ({"mode": "garbage"}, "not return a list of EndpointSlices"),
        ({"mode": "redirect"}, "status 307"),  # the token is not sent to another server
        ({"mode": "hang", "deadline_s": 0.5}, "did not respond in time"),
    ],
)
def test_a_rejecting_or_failing_server_is_a_failed_poll_with_the_reason(server, change, message):
    server.mode = change.pop("mode", "answer")
    started = time.monotonic()
    with pytest.raises(PollError, match=message) as failed:
        poll(server, **change)
    assert is_within(time.monotonic() - started, 4)
    assert TOKEN not in str(failed.value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"items": 3}',
        b'{"items": [{"addressType": "IPv4", "endpoints": [{"addresses": "10.0.0.1"}]}]}',
        b'{"items": [{"addressType": "IPv4", "endpoints": [{"addresses": [1]}]}]}',
        b'{"items": ' + b"[" * 5000,
        b'{"items": [], "metadata": {"continue": 7}}',
        b"\xff\xfe",
    ],
)
def test_a_malformed_response_is_a_failed_poll(server, monkeypatch, body):
    monkeypatch.setattr("tests.fakes.fake_kubernetes.Handler._page", lambda handler, *_: handler._send(200, body))
    with pytest.raises(PollError, match="not return a list of EndpointSlices"):
        poll(server)


def test_too_many_endpoints_are_rejected_before_all_pages_are_read(server):
    server.page = 1
    server.slices = [endpoint_slice(*[pod(f"p{n}-{m}", f"10.{n}.0.{m}") for m in range(100)]) for n in range(100)]
    with pytest.raises(PollError, match="the limit is 100"):
        poll(server)
    assert len(server.requests) < 10


def test_an_endless_list_is_rejected(server):
    server.page, server.slices = 1, [endpoint_slice() for _ in range(100)]
    with pytest.raises(PollError, match="more than 40 pages"):
        poll(server)


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        (pod("a\r\nX-Evil: 1", "10.0.0.5"), "control characters"),
        (pod("x" * 300, "10.0.0.5"), "longer than 253"),
        (pod("meta", "169.254.169.254"), "link-local"),
        (pod("public", "8.8.8.8"), "not in an allowed network"),
        (pod("odd", "0x7f000001@evil"), "expected no credentials"),
        (pod("octal", "0251.0376.0251.0376"), "link-local"),
        (pod("none", ""), "host or port is missing"),
    ],
)
def test_an_invalid_pod_is_rejected_with_a_reason_on_one_line(server, endpoint, message):
    server.slices[0]["endpoints"].append(endpoint)
    result = poll(server)
    assert len(result.targets) == 2
    assert message in result.rejections[0]
    assert result.rejections[0].isprintable()


def test_the_servers_certificate_is_verified_with_the_configured_authority_only(tmp_path):
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    with serving_kubernetes(authority.issue("api").server()) as server:
        server.slices = [endpoint_slice(pod("vllm-0", "10.0.0.1"))]
        assert len(poll(server, ca=authority.path.read_text()).targets) == 1
        requests = len(server.requests)
        for ca in ("", other.path.read_text()):
            with pytest.raises(PollError, match=r"(?i)certificate verify failed"):
                poll(server, ca=ca)
        with pytest.raises(PollError, match="Invalid certificate authority"):
            poll(server, ca="nonsense")
        assert len(server.requests) == requests  # the token was not sent


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://10.255.255.1:6443", "over HTTPS only"),
        ("https://169.254.169.254", "link-local"),
        ("https://8.8.8.8", "not in an allowed network"),
        ("ftp://10.0.0.1", "Invalid API server"),
        ("https://user:secret@10.0.0.1", "Invalid API server"),
    ],
)
def test_a_token_is_sent_over_https_to_an_allowed_address_only(server, url, message):
    with pytest.raises(PollError, match=message):
        poll(server, api_url=url)


def test_an_invalid_token_is_rejected_without_being_shown(server):
    with pytest.raises(PollError) as failed:
        poll(server, token="abc\r\nX-Evil: 1")
    assert "abc" not in str(failed.value)


@pytest.fixture
def own_cluster(tmp_path, monkeypatch):
    """The API server of the cluster that this process seems to run in, and the folder of its service account."""
    authority = Authority(tmp_path)
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text(f"{TOKEN}\n")
    (account / "ca.crt").write_text(authority.path.read_text())
    monkeypatch.setattr(kubernetes_api, "ACCOUNT", account)
    with serving_kubernetes(authority.issue("api").server()) as server:
        server.slices = [endpoint_slice(pod("vllm-0", "10.0.0.1"))]
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_address[1]))
        yield server, account


def test_in_a_cluster_each_poll_reads_the_pods_service_account(own_cluster):
    server, account = own_cluster
    (account / "token").write_text("an-old-token\n")
    with pytest.raises(PollError, match="rejected the token"):
        poll(server, api_url="", token="")
    (account / "token").write_text(f"{TOKEN}\n")
    assert len(poll(server, api_url="", token="").targets) == 1


def test_in_a_cluster_its_own_api_server_is_allowed_and_no_other_address(own_cluster, settings):
    """Some clusters give their services public addresses."""
    settings.FLEET_NETWORKS = [ipaddress.ip_network("10.0.0.0/8")]
    server, account = own_cluster
    assert len(poll(server, api_url="", token="").targets) == 1
    with pytest.raises(PollError, match="not in an allowed network"):
        poll(server, ca=(account / "ca.crt").read_text())


def test_outside_a_cluster_the_api_server_must_be_configured(server, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(PollError, match="does not run in a Kubernetes cluster"):
        poll(server, api_url="")


# --- InferencePools -------------------------------------------------------------------------------------------


@pytest.fixture
def pool_server(server):
    server.pools = [inference_pool()]
    server.pods = [engine_pod("vllm-0", "10.0.0.1"), engine_pod("vllm-1", "10.0.0.2")]
    server.pods.append(engine_pod("web-0", "10.0.0.9", labels={"app": "web"}))
    return server


def poll_pool(server, *, token=TOKEN, deadline_s=5.0, max_targets=100, **settings):
    values = {"inference_pool": "llama", "namespace": "prod", "api_url": server.url, **settings}
    limits = PollLimits(fleet_rules(), deadline_s, max_targets)
    return InferencePoolKind().poll(msgspec.convert(values, InferencePoolSettings), token, limits)


def test_the_pods_that_an_inference_pool_selects_are_the_replicas(pool_server):
    pool_server.pools = [inference_pool(8000, labels={"app": "vllm", "llm-d.ai/model": "llama-3"})]
    for each in pool_server.pods[:2]:
        each["metadata"]["labels"]["llm-d.ai/model"] = "llama-3"
    assert summary(poll_pool(pool_server)) == [
        ("vllm-0", "http://10.0.0.1:8000", "ready"),
        ("vllm-1", "http://10.0.0.2:8000", "ready"),
    ]
    (pool_path, _, authorization), (pods_path, query, _) = pool_server.requests
    assert (pool_path, pods_path) == (f"{POOLS}llama", PODS)
    assert authorization == f"Bearer {TOKEN}"
    assert query["labelSelector"] == "app=vllm,llm-d.ai/model=llama-3"


def test_each_target_port_is_a_replica_and_the_first_keeps_the_pods_name(pool_server):
    pool_server.pools = [inference_pool(8000, 8001)]
    assert [(key, url) for key, url, _ in summary(poll_pool(pool_server))] == [
        ("vllm-0", "http://10.0.0.1:8000"),
        ("vllm-0:8001", "http://10.0.0.1:8001"),
        ("vllm-1", "http://10.0.0.2:8000"),
        ("vllm-1:8001", "http://10.0.0.2:8001"),
    ]


def test_a_pods_own_labels_name_its_role(pool_server):
    pool_server.pods[0] = engine_pod("vllm-0", "10.0.0.1", labels={"llm-d.ai/role": "prefill", "team": "search"})
    prefill, other = poll_pool(pool_server).targets
    assert prefill.labels == {"llm-d.ai/role": "prefill", "node": "gpu-node-1"}
    assert (role_of(prefill.labels), role_of(other.labels)) == ("prefill", "both")


@pytest.mark.parametrize(
    ("state", "condition"),
    [
        ({"ready": "True"}, "ready"),
        ({"ready": "False"}, "not_ready"),
        ({"ready": "Unknown"}, "not_ready"),  # its node is not reachable
        ({"ready": None}, "not_ready"),
        ({"ready": "True", "is_terminating": True}, "terminating"),
        ({"address": None, "ready": None, "phase": "Pending"}, None),
        ({"ready": "False", "phase": "Failed"}, None),
        ({"ready": "False", "phase": "Succeeded"}, None),
    ],
)
def test_a_pods_state_is_the_targets_condition_and_one_without_an_engine_is_none(pool_server, state, condition):
    pool_server.pods[0] = engine_pod("vllm-0", **{"address": "10.0.0.1", **state})
    conditions = {key: state for key, _, state in summary(poll_pool(pool_server))}
    assert conditions == {"vllm-1": "ready"} | ({"vllm-0": condition} if condition else {})


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (inference_pool(labels={}), "no label in its selector"),  # it would select every pod of the namespace
        (inference_pool(labels={"app": "vllm,app!=vllm"}), "invalid label: app"),
        (inference_pool(labels={"app in (web)": ""}), "invalid label"),
        (inference_pool(protocol="kubernetes.io/h2c"), "appProtocol kubernetes.io/h2c is not supported"),
        (
            {**inference_pool(), "spec": {"selector": {"matchLabels": {"app": "vllm"}}}},
            "not return a valid InferencePool",
        ),
        ({**inference_pool(), "spec": {**inference_pool()["spec"], "targetPorts": []}}, "no target port"),
        (inference_pool(70_000), "No target is valid"),
    ],
)
def test_an_unusable_inference_pool_is_a_failed_poll(pool_server, pool, message):
    pool_server.pools = [pool]
    with pytest.raises(PollError, match=message):
        poll_pool(pool_server)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inference_pool": "other"}, r"There is no InferencePool other in namespace prod .404."),
        ({"namespace": "other"}, "may not get inferencepools in namespace other"),
        ({"forbidden": PODS}, "may not list pods in namespace prod"),
        ({"token": "wrong"}, "rejected the token"),
        ({"mode": "redirect"}, "status 307"),
        ({"mode": "garbage"}, "not return a valid InferencePool"),
        ({"mode": "hang", "deadline_s": 0.5}, "did not respond in time"),
    ],
)
def test_a_failed_request_of_an_inference_pool_names_its_reason(pool_server, change, message):
    pool_server.mode, pool_server.forbidden = change.pop("mode", "answer"), change.pop("forbidden", "")
    with pytest.raises(PollError, match=message) as failed:
        poll_pool(pool_server, **change)
    assert TOKEN not in str(failed.value)


def test_pods_are_read_in_pages_and_limited_in_number(pool_server):
    pool_server.page = 50
    pool_server.pods = [engine_pod(f"vllm-{n}", f"10.0.{n // 250}.{n % 250 + 1}") for n in range(120)]
    assert len(poll_pool(pool_server, max_targets=120).targets) == 120
    with pytest.raises(PollError, match="at least 120 targets; its limit is 119"):
        poll_pool(pool_server, max_targets=119)
    requests = len(pool_server.requests)
    pool_server.pools = [inference_pool(*range(8000, 8008))]  # 960 engines
    with pytest.raises(PollError, match="at least 400 endpoints; the limit is 90"):
        poll_pool(pool_server, max_targets=90)
    assert len(pool_server.requests) == requests + 2, "no further page is read"
