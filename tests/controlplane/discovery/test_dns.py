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


def poll(fake, *, deadline_s=5.0, max_targets=100, **settings):
    settings = msgspec.convert({"host": "vllm.test", "server": fake.address, **settings}, DnsSettings)
    return DnsKind().poll(settings, "", PollLimits(fleet_rules(), deadline_s, max_targets))


def test_each_address_of_a_name_is_a_target(server):
    server.records[NAME]["A"] = ["10.0.0.2", "10.0.0.1"]
    found = poll(server, port=9000)
    assert [(target.key, target.url) for target in found.targets] == [
        ("10.0.0.1:9000", "http://10.0.0.1:9000"),
        ("10.0.0.2:9000", "http://10.0.0.2:9000"),
    ]
    assert server.queries == [("udp", NAME, "A")]  # asked once: what was checked is what is connected to


def test_an_ipv6_address_is_written_as_urls_want_it(server):
    server.records[NAME]["AAAA"] = ["fd00::5"]
    (target,) = poll(server, record="AAAA", scheme="https").targets
    assert target.url == "https://[fd00::5]:8000"


def test_srv_records_name_their_host_and_port(server):
    server.records[NAME]["SRV"] = ["0 10 8001 vllm-0.vllm.test.", "0 10 8000 VLLM-1.vllm.test.", "0 0 0 ."]
    found = poll(server, record="SRV")
    assert [target.url for target in found.targets] == ["http://vllm-0.vllm.test:8001", "http://vllm-1.vllm.test:8000"]


def test_a_long_answer_is_fetched_over_tcp(server):
    server.mode = "truncate"
    server.records[NAME]["A"] = [f"10.1.{number}.1" for number in range(90)]
    assert len(poll(server).targets) == 90
    assert {transport for transport, *_ in server.queries} == {"udp", "tcp"}


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("silent", "No name server answered within 1 s"),
        ("SERVFAIL", "The name server failed"),
        ("REFUSED", "The name server failed"),
        ("NXDOMAIN", "DNS name vllm.test does not exist"),
        ("garbage", "DNS|The name server failed|No name server"),
    ],
)
def test_a_server_that_is_failing_is_a_failed_poll_in_time(server, mode, says):
    server.mode = mode
    with pytest.raises(PollError, match=says):
        poll(server, deadline_s=1.0)


def test_a_name_without_such_records_is_a_failed_poll(server):
    with pytest.raises(PollError, match=r"vllm\.test has no A record"):
        poll(server)


def test_a_link_local_address_is_left_out_and_said(server):
    server.records[NAME]["A"] = ["169.254.169.254", "10.0.0.1"]
    found = poll(server)
    assert [target.key for target in found.targets] == ["10.0.0.1:8000"]
    assert "link-local" in found.rejections[0]
    assert found.rejected_keys == {"169.254.169.254:8000"}


def test_an_answer_of_nothing_usable_is_a_failed_poll(server):
    server.records[NAME]["A"] = ["169.254.169.254"]
    with pytest.raises(PollError, match="No target is valid"):
        poll(server)


def test_more_targets_than_allowed_are_refused_whole(server):
    server.records[NAME]["A"] = [f"10.1.{number}.1" for number in range(90)]
    with pytest.raises(PollError, match="limit is 50"):
        poll(server, max_targets=50)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("169.254.169.254", "link-local"),
        ("8.8.8.8", "not in an allowed network"),
        ("ns.example", "Invalid name server ns.example"),
    ],
)
def test_no_name_server_is_asked_that_nobody_may_connect_to(server, address, says):
    with pytest.raises(PollError, match=says):
        poll(server, server=address)
    assert server.queries == []
