"""No channel connects to a forbidden address, however it is written and whatever its name resolves to."""

import socket
from unittest.mock import patch

import pytest

from telemetry.channels import KINDS
from telemetry.channels.base import DeliveryError
from tests.fakes.fake_webhook_receiver import Reply
from tests.fakes.mail_server import mail_server
from tests.telemetry.channels.messages import TEST, config

HOSTS = [
    "127.0.0.1", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.1", "017700000001", "0177.0.0.1", "0",
    "0.0.0.0", "localhost", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]",
    "169.254.169.254", "2852039166", "0xa9fea9fe", "[::ffff:169.254.169.254]", "[fd00:ec2::254]", "100.100.100.200",
    "168.63.129.16", "192.0.0.192", "10.0.0.1", "10.1", "172.16.0.1", "192.168.0.1", "192.168.1", "100.64.0.1",
    "198.18.0.1", "192.0.0.8", "192.0.2.1", "203.0.113.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
    "[fe80::1]", "[fc00::1]", "[ff02::1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[2001:db8::1]",
]  # fmt: skip


def refusal(kind, host, port):
    with pytest.raises(DeliveryError) as caught:
        KINDS[kind].send(KINDS[kind].complete(config(kind, host, port)), TEST)
    return caught.value


@pytest.mark.parametrize("kind", KINDS)
def test_no_form_of_a_private_address_is_reached(kind, receiver, settings):
    settings.WEBHOOK_NETWORKS = []
    assert len(set(HOSTS)) >= 40
    with mail_server() as mail:
        port = mail.port if kind == "email" else receiver.server_address[1]
        errors = {host: refusal(kind, host, port) for host in HOSTS}
        assert {host: str(error) for host, error in errors.items() if error.retryable} == {}
        assert mail.mails == []
    assert receiver.received == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_is_resolved_once_and_rejected_for_one_forbidden_address(kind, receiver, settings):
    settings.WEBHOOK_NETWORKS = []
    asked = []

    def rebinding(host, port, *_args, **_options):
        asked.append(host)
        address = "93.184.216.34" if len(asked) > 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in ("93.184.216.34", address)]

    with patch("socket.getaddrinfo", rebinding):
        error = refusal(kind, "rebind.example", 25 if kind == "email" else 80)

    assert asked == ["rebind.example"]
    assert not error.retryable
    assert receiver.received == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "email"])
def test_redirects_are_not_followed(kind, receiver):

    receiver.replies = [Reply(302, {"Location": "http://169.254.169.254/"})]

    assert "redirects" in str(refusal(kind, "127.0.0.1", receiver.server_address[1]))
    assert len(receiver.received) == 1
