"""Kubernetes discovery against an API server over HTTP and TLS."""

import time

import msgspec
import pytest

from controlplane.discovery import kubernetes
from controlplane.discovery.kubernetes import KubernetesKind, KubernetesSettings
from controlplane.discovery.targets import PollError, PollLimits, role_of
from controlplane.egress import fleet_rules
from tests.fakes.certificates import Authority
from tests.fakes.fake_kubernetes import TOKEN, endpoint_slice, pod, serving_kubernetes
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
    monkeypatch.setattr("tests.fakes.fake_kubernetes.Handler._page", lambda handler, _: handler._send(200, body))
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


def test_in_a_cluster_each_poll_reads_the_pods_service_account(tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    account = tmp_path / "account"
    account.mkdir()
    (account / "token").write_text("an-old-token\n")
    (account / "ca.crt").write_text(authority.path.read_text())
    monkeypatch.setattr(kubernetes, "ACCOUNT", account)
    with serving_kubernetes(authority.issue("api").server()) as server:
        server.slices = [endpoint_slice(pod("vllm-0", "10.0.0.1"))]
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_address[1]))
        with pytest.raises(PollError, match="rejected the token"):
            poll(server, api_url="", token="")
        (account / "token").write_text(f"{TOKEN}\n")
        assert len(poll(server, api_url="", token="").targets) == 1


def test_outside_a_cluster_the_api_server_must_be_configured(server, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(PollError, match="does not run in a Kubernetes cluster"):
        poll(server, api_url="")
