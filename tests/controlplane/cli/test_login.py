"""The site and token of a command."""

import stat

import pytest

from controlplane.cli import rest

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def unsigned(warmpath, monkeypatch):
    """The same without a site or token in the environment."""
    monkeypatch.delenv("WARMPATH_URL")
    monkeypatch.delenv("WARMPATH_TOKEN")
    return warmpath


def test_login_checks_and_stores_a_token_and_logout_deletes_it(unsigned, live_server, token, pool):
    assert unsigned("get", "pools").status == 2
    done = unsigned("login", live_server.url, "--token-stdin", typed=f"{token}\n")
    assert (done.status, token in done.out + done.err) == (0, False)
    assert stat.S_IMODE(rest.credentials_path().stat().st_mode) == 0o600
    assert unsigned("get", "pools").status == 0
    assert unsigned("logout").status == 0
    assert not rest.credentials_path().exists()
    assert unsigned("get", "pools").status == 2


def test_an_invalid_token_is_not_stored(unsigned, live_server):
    done = unsigned("login", live_server.url, "--token-stdin", typed="wp_0000000000000000.nonsense\n")
    assert done.status == 1
    assert not rest.credentials_path().exists()


def test_a_stored_token_is_sent_to_its_own_site_only(unsigned, live_server, token):
    unsigned("login", live_server.url, "--token-stdin", typed=f"{token}\n")
    done = unsigned("--url", "http://127.0.0.1:9", "get", "pools")
    assert done.status == 2
    assert "login" in done.err


@pytest.mark.parametrize("url", ["ftp://site", "site", "https://", "https://site/?a=b"])
def test_an_invalid_url_is_rejected(unsigned, url):
    assert unsigned("login", url, "--token-stdin", typed="x\n").status == 2


def test_an_unavailable_site_is_reported_without_the_token(warmpath, monkeypatch, unused_tcp_port, token):
    monkeypatch.setattr(rest, "RETRY_FOR_S", 0.0)
    done = warmpath("--url", f"http://127.0.0.1:{unused_tcp_port}", "get", "pools")
    assert (done.status, "does not respond" in done.err, token in done.err) == (1, True, False)


def test_errors_show_status_and_request_id(warmpath, pool):
    done = warmpath("get", "pools", "nowhere")
    assert done.status == 1
    assert "status 404, request " in done.err
