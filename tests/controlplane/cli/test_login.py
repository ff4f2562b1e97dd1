"""The site and token of a command."""

import stat

import pytest

from controlplane.cli import rest

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def warmpath_without_login(warmpath, monkeypatch):
    """Runs ``warmpath`` without a site or token in the environment."""
    monkeypatch.delenv("WARMPATH_URL")
    monkeypatch.delenv("WARMPATH_TOKEN")
    return warmpath


def test_login_checks_and_stores_a_token_and_logout_deletes_it(warmpath_without_login, live_server, token, pool):
    assert warmpath_without_login("get", "pools").status == 2
    result = warmpath_without_login("login", live_server.url, "--token-stdin", stdin=f"{token}\n")
    assert (result.status, token in result.out + result.err) == (0, False)
    assert stat.S_IMODE(rest.credentials_path().stat().st_mode) == 0o600
    assert warmpath_without_login("get", "pools").status == 0
    assert warmpath_without_login("logout").status == 0
    assert not rest.credentials_path().exists()
    assert warmpath_without_login("get", "pools").status == 2


def test_an_invalid_token_is_not_stored(warmpath_without_login, live_server):
    result = warmpath_without_login("login", live_server.url, "--token-stdin", stdin="wp_0000000000000000.nonsense\n")
    assert result.status == 1
    assert not rest.credentials_path().exists()


def test_a_stored_token_is_sent_to_its_own_site_only(warmpath_without_login, live_server, token):
    warmpath_without_login("login", live_server.url, "--token-stdin", stdin=f"{token}\n")
    result = warmpath_without_login("--url", "http://127.0.0.1:9", "get", "pools")
    assert result.status == 2
    assert "login" in result.err


@pytest.mark.parametrize("url", ["ftp://site", "site", "https://", "https://site/?a=b"])
def test_an_invalid_url_is_rejected(warmpath_without_login, url):
    assert warmpath_without_login("login", url, "--token-stdin", stdin="x\n").status == 2


def test_an_unavailable_site_is_reported_without_the_token(warmpath, monkeypatch, unused_tcp_port, token):
    monkeypatch.setattr(rest, "RETRY_FOR_S", 0.0)
    result = warmpath("--url", f"http://127.0.0.1:{unused_tcp_port}", "get", "pools")
    assert (result.status, "does not respond" in result.err, token in result.err) == (1, True, False)


def test_errors_show_status_and_request_id(warmpath, pool):
    result = warmpath("get", "pools", "nowhere")
    assert result.status == 1
    assert "status 404, request " in result.err
