"""Kubernetes discovery against an API server over HTTP and TLS."""

import time

import msgspec
import pytest

from controlplane.discovery import kubernetes
from controlplane.discovery.kubernetes import KubernetesKind, KubernetesSettings
from controlplane.discovery.targets import PollError, PollLimits
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
    given = {"service": "vllm", "namespace": "prod", "api_url": server.url, **settings}
    bounds = PollLimits(fleet_rules(), deadline_s, max_targets)
    return KubernetesKind().poll(msgspec.convert(given, KubernetesSettings), token, bounds)


def seen(found):
    return [(target.key, target.url, str(target.condition)) for target in found.targets]


def test_a_pods_name_is_the_identity(server):
    found = poll(server)
    assert seen(found) == [("vllm-0", "http://10.0.0.1:8000", "ready"), ("vllm-1", "http://10.0.0.2:8000", "ready")]
    assert found.targets[0].labels == {"node": "gpu-node-1", "zone": "eu-central-1a"}
    path, query, authorization = server.requests[0]
    assert path == "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
    assert query["labelSelector"] == "kubernetes.io/service-name=vllm"
    assert authorization == f"Bearer {TOKEN}"


@pytest.mark.parametrize(
    ("said", "condition"),
    [
        ({"ready": True, "serving": True, "terminating": False}, "ready"),
        ({"ready": None, "serving": None, "terminating": None}, "ready"),  # unsaid is ready
        ({"ready": False, "serving": False, "terminating": False}, "not_ready"),
        ({"ready": False, "serving": True, "terminating": True}, "terminating"),
        ({"ready": False, "serving": False, "terminating": True}, "terminating"),
    ],
)
def test_conditions_are_read_as_kubernetes_means_them(server, said, condition):
    server.slices = [endpoint_slice(pod("vllm-0", "10.0.0.1", **said))]
    assert seen(poll(server))[0][2] == condition


def test_pages_are_followed_to_the_last(server):
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


def test_an_endpoint_in_two_slices_is_one_and_counts_as_ready_as_it_is(server):
    stale = pod("vllm-0", "10.0.0.1", ready=False, serving=False)
    server.slices = [endpoint_slice(stale), endpoint_slice(pod("vllm-0", "10.0.0.1"))]
    assert seen(poll(server)) == [("vllm-0", "http://10.0.0.1:8000", "ready")]


def test_a_pod_with_addresses_of_both_kinds_is_one_replica(server):
    server.slices.append(endpoint_slice(pod("vllm-0", "fd00::1"), pod("vllm-1", "fd00::2"), family="IPv6"))
    assert [url for _, url, _ in seen(poll(server))] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    server.slices = server.slices[1:]
    assert seen(poll(server))[0][1] == "http://[fd00::1]:8000"


def test_an_address_that_two_pods_claim_is_the_one_that_is_ready(server):
    server.slices = [endpoint_slice(pod("old", "10.0.0.1", terminating=True), pod("young", "10.0.0.1"))]
    found = poll(server)
    assert [key for key, _, _ in seen(found)] == ["young"]
    assert "http://10.0.0.1:8000 is already target young" in found.rejections[0]


PORTS = [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9400}]


def test_the_port_is_the_only_one_or_the_one_that_is_set(server):
    server.slices = [endpoint_slice(pod("vllm-0", "10.0.0.1"), ports=PORTS)]
    assert seen(poll(server, port="metrics"))[0][1] == "http://10.0.0.1:9400"
    assert seen(poll(server, port="8080"))[0][1] == "http://10.0.0.1:8080"
    with pytest.raises(PollError, match=r"more or fewer than one port .it has: http, metrics"):
        poll(server)
    with pytest.raises(PollError, match="no port named grpc"):
        poll(server, port="grpc")


def test_an_endpoint_that_is_no_pod_is_named_by_its_address(server):
    server.slices = [endpoint_slice({"addresses": ["10.0.0.9"]})]
    assert seen(poll(server)) == [("10.0.0.9:8000", "http://10.0.0.9:8000", "ready")]


def test_a_service_without_pods_is_an_answer_that_names_nobody(server):
    server.slices = [endpoint_slice()]
    assert poll(server).targets == ()
    assert poll(server, service="other").targets == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"token": "wrong"}, "rejected the token"),
        ({"namespace": "other"}, "may not list endpointslices in namespace other"),
        ({"mode": "500"}, r"status 500: etcdserver: request timed out\?\?Set-Cookie: x\."),
        ({"mode": "garbage"}, "not return a list of EndpointSlices"),
        ({"mode": "hang", "deadline_s": 0.5}, "did not respond in time"),
    ],
)
def test_a_server_that_refuses_or_fails_is_a_failed_poll_that_says_why(server, change, says):
    server.mode = change.pop("mode", "answer")
    begun = time.monotonic()
    with pytest.raises(PollError, match=says) as failed:
        poll(server, **change)
    assert is_within(time.monotonic() - begun, 4)
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
def test_an_answer_of_another_form_is_a_failed_poll(server, monkeypatch, body):
    monkeypatch.setattr("tests.fakes.fake_kubernetes.Handler._page", lambda handler, _: handler._send(200, body))
    with pytest.raises(PollError, match="not return a list of EndpointSlices"):
        poll(server)


def test_ten_thousand_endpoints_are_refused_before_they_are_all_read(server):
    server.page = 1
    server.slices = [endpoint_slice(*[pod(f"p{n}-{m}", f"10.{n}.0.{m}") for m in range(100)]) for n in range(100)]
    with pytest.raises(PollError, match="the limit is 100"):
        poll(server)
    assert len(server.requests) < 10


def test_a_list_without_end_is_left(server):
    server.page, server.slices = 1, [endpoint_slice() for _ in range(100)]
    with pytest.raises(PollError, match="more than 40 pages"):
        poll(server)


@pytest.mark.parametrize(
    ("endpoint", "says"),
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
def test_a_pod_that_nobody_may_use_is_left_out_and_said_on_one_line(server, endpoint, says):
    server.slices[0]["endpoints"].append(endpoint)
    found = poll(server)
    assert len(found.targets) == 2
    assert says in found.rejections[0]
    assert found.rejections[0].isprintable()


def test_the_server_is_believed_by_the_authority_that_is_given_and_by_no_other(tmp_path):
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
        assert len(server.requests) == requests  # nobody got the token


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://10.255.255.1:6443", "over HTTPS only"),
        ("https://169.254.169.254", "link-local"),
        ("https://8.8.8.8", "not in an allowed network"),
        ("ftp://10.0.0.1", "Invalid API server"),
        ("https://user:secret@10.0.0.1", "Invalid API server"),
    ],
)
def test_a_token_goes_nowhere_that_it_should_not(server, url, says):
    with pytest.raises(PollError, match=says):
        poll(server, api_url=url)


def test_a_token_that_cannot_be_a_header_is_refused_without_being_shown(server):
    with pytest.raises(PollError) as failed:
        poll(server, token="abc\r\nX-Evil: 1")
    assert "abc" not in str(failed.value)


def test_in_a_cluster_the_pods_own_account_is_used_and_read_anew_each_time(tmp_path, monkeypatch):
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


def test_outside_a_cluster_the_server_has_to_be_named(server, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(PollError, match="does not run in a Kubernetes cluster"):
        poll(server, api_url="")
