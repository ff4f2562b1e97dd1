"""DNS discovery against a name server on loopback."""

import msgspec
import pytest

from controlplane.discovery.dns import DnsKind, DnsSettings
from controlplane.discovery.targets import PollError, PollLimits
from controlplane.egress import fleet_rules
from tests.fakes.fake_dns import serving_dns

NAME = "vllm.test."


@pytest.fixture
def server():
    with serving_dns() as server:
        server.records[NAME] = {}
        yield server


def poll(name_server, *, deadline_s=5.0, max_targets=100, **settings):
    settings = msgspec.convert({"host": "vllm.test", "server": name_server.address, **settings}, DnsSettings)
    return DnsKind().poll(settings, "", PollLimits(fleet_rules(), deadline_s, max_targets))


def test_each_address_of_a_name_is_a_target(server):
    server.records[NAME]["A"] = ["10.0.0.2", "10.0.0.1"]
    result = poll(server, port=9000)
    assert [(target.key, target.url) for target in result.targets] == [
        ("10.0.0.1:9000", "http://10.0.0.1:9000"),
        ("10.0.0.2:9000", "http://10.0.0.2:9000"),
    ]
    assert server.queries == [("udp", NAME, "A")]  # one query: connections go to the checked address


def test_an_ipv6_address_has_brackets_in_the_url(server):
    server.records[NAME]["AAAA"] = ["fd00::5"]
    (target,) = poll(server, record="AAAA", scheme="https").targets
    assert target.url == "https://[fd00::5]:8000"


def test_srv_records_name_their_host_and_port(server):
    server.records[NAME]["SRV"] = ["0 10 8001 vllm-0.vllm.test.", "0 10 8000 VLLM-1.vllm.test.", "0 0 0 ."]
    result = poll(server, record="SRV")
    assert [target.url for target in result.targets] == ["http://vllm-0.vllm.test:8001", "http://vllm-1.vllm.test:8000"]


def test_a_truncated_response_is_fetched_over_tcp(server):
    server.mode = "truncate"
    server.records[NAME]["A"] = [f"10.1.{number}.1" for number in range(90)]
    assert len(poll(server).targets) == 90
    assert {transport for transport, *_ in server.queries} == {"udp", "tcp"}


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("silent", "No name server responded within 1 s"),
        ("SERVFAIL", "The name server failed"),
        ("REFUSED", "The name server failed"),
        ("NXDOMAIN", "DNS name vllm.test does not exist"),
        ("garbage", "DNS|The name server failed|No name server"),
    ],
)
def test_a_failing_name_server_is_a_failed_poll_within_the_deadline(server, mode, message):
    server.mode = mode
    with pytest.raises(PollError, match=message):
        poll(server, deadline_s=1.0)


def test_a_name_without_such_records_is_a_failed_poll(server):
    with pytest.raises(PollError, match=r"vllm\.test has no A record"):
        poll(server)


def test_a_link_local_address_is_rejected_with_the_reason(server):
    server.records[NAME]["A"] = ["169.254.169.254", "10.0.0.1"]
    result = poll(server)
    assert [target.key for target in result.targets] == ["10.0.0.1:8000"]
    assert "link-local" in result.rejections[0]
    assert result.rejected_keys == {"169.254.169.254:8000"}


def test_a_response_without_a_valid_target_is_a_failed_poll(server):
    server.records[NAME]["A"] = ["169.254.169.254"]
    with pytest.raises(PollError, match="No target is valid"):
        poll(server)


def test_a_response_with_more_targets_than_allowed_is_rejected_as_a_whole(server):
    server.records[NAME]["A"] = [f"10.1.{number}.1" for number in range(90)]
    with pytest.raises(PollError, match="limit is 50"):
        poll(server, max_targets=50)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("169.254.169.254", "link-local"),
        ("8.8.8.8", "not in an allowed network"),
        ("ns.example", "Invalid name server: expected an IP address"),
    ],
)
def test_a_name_server_outside_the_allowed_networks_is_never_queried(server, address, message):
    with pytest.raises(PollError, match=message):
        poll(server, server=address)
    assert server.queries == []
