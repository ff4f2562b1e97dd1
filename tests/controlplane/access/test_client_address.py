"""The client address: the peer's, or the one that a declared proxy reports."""

import logging

import pytest
import uvicorn
from django.test import Client, RequestFactory

from controlplane.request_origin import client_address, forwarded_for_missing, lacks_forwarded_for
from controlplane.stack.plan import StackSettings, control_plane
from tests.controlplane.settings_files import PRODUCTION, read

PEER = "10.0.0.2"
HTTPS = {"X-Forwarded-Proto": "https"}


@pytest.fixture
def behind_proxy(settings):
    """A declared proxy, before its first request."""
    settings.BEHIND_TLS_PROXY = True
    forwarded_for_missing.clear()
    yield
    forwarded_for_missing.clear()


def request(headers):
    return RequestFactory().get("/", headers=headers, REMOTE_ADDR=PEER)


@pytest.mark.parametrize(
    ("forwarded_for", "address"),
    [
        ("198.51.100.4", "198.51.100.4"),
        ("203.0.113.9, 198.51.100.4", "198.51.100.4"),
        ("203.0.113.9,198.51.100.4:51234", "198.51.100.4"),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("2001:DB8::1", "2001:db8::1"),
        ("unknown", "unknown"),
        ("", PEER),
    ],
)
def test_the_client_address_is_the_last_one_of_a_declared_proxy(behind_proxy, forwarded_for, address):
    assert client_address(request(HTTPS | {"X-Forwarded-For": forwarded_for})) == address


def test_without_a_declared_proxy_the_header_is_ignored(settings):
    settings.BEHIND_TLS_PROXY = False
    assert client_address(request(HTTPS | {"X-Forwarded-For": "127.0.0.1"})) == PEER


def test_a_proxy_without_client_addresses_is_logged_once(behind_proxy, caplog):
    with caplog.at_level(logging.WARNING, logger="controlplane.request_origin"):
        client_address(request({}))  # a probe that bypasses the proxy
        assert caplog.messages == []
        for _ in range(3):
            assert client_address(request(HTTPS)) == PEER
    assert len(caplog.messages) == 1
    assert "X-Forwarded-For" in caplog.messages[0]


def test_the_audit_page_warns_about_hidden_addresses(behind_proxy, client, operator):
    client.force_login(operator)
    warning = b"The addresses below may be the proxy"
    with_address = HTTPS | {"X-Forwarded-For": "198.51.100.4"}
    assert warning not in client.get("/audit/", headers=with_address).content
    assert warning in client.get("/audit/", headers=HTTPS).content


def test_hidden_client_addresses_cannot_read_metrics(behind_proxy, db):
    client = Client(REMOTE_ADDR="127.0.0.1")
    assert lacks_forwarded_for(request(HTTPS))
    assert client.get("/metrics", headers=HTTPS).status_code == 403
    assert client.get("/metrics", headers=HTTPS | {"X-Forwarded-For": "203.0.113.9"}).status_code == 403
    assert client.get("/metrics", headers=HTTPS | {"X-Forwarded-For": "127.0.0.1"}).status_code == 200
    assert client.get("/metrics").status_code == 200


def test_in_production_metrics_need_their_token_unless_networks_are_named():
    values, _ = read("production", ("METRICS_NETWORKS",), **PRODUCTION)
    assert values == {"METRICS_NETWORKS": []}
    values, _ = read("production", ("METRICS_NETWORKS",), **PRODUCTION, WARMPATH_METRICS_NETWORKS="10.1.0.0/16")
    assert values == {"METRICS_NETWORKS": ["10.1.0.0/16"]}


def test_the_local_stack_trusts_no_proxy(tmp_path):
    values, _ = read("dev", ("BEHIND_TLS_PROXY",), WARMPATH_BEHIND_TLS_PROXY="1", WARMPATH_DATA_DIR=str(tmp_path))
    assert values == {"BEHIND_TLS_PROXY": False}
    (web,) = [child for child in control_plane(StackSettings.from_environment(tmp_path)) if child.name == "web"]
    arguments = list(web.command)[list(web.command).index("uvicorn") + 1 :]
    options = uvicorn.main.make_context("uvicorn", arguments).params
    assert options["proxy_headers"] is False
