"""Settings of ``serve``: command line over environment over defaults."""

import sys
from pathlib import Path

import pytest

from routing import __main__ as commands
from routing.http.tls import TlsFiles
from routing.settings import SettingsError, read_settings


def test_the_defaults_bind_loopback_ports_8080_and_8081():
    settings = read_settings(["--config", "c.json", "--name", "one"], {})
    assert (settings.host, settings.port, settings.admin_host, settings.admin_port) == (
        "127.0.0.1",
        8080,
        "127.0.0.1",
        8081,
    )
    assert settings.state_dir == Path(".warmpath/router-one")
    assert settings.admin_token is None
    assert (settings.workers, settings.reuse_port) == (1, False)
    assert settings.tls == TlsFiles()


def test_the_environment_is_read_and_the_command_line_wins(tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    environ = {
        "WARMPATH_ROUTER_PORT": "9000",
        "WARMPATH_ROUTER_ADMIN_PORT": "9001",
        "WARMPATH_BIND": "0.0.0.0",
        "WARMPATH_DATA_DIR": "/data",
        "WARMPATH_ROUTER_WORKERS": "4",
        "WARMPATH_ROUTER_REUSE_PORT": "1",
        "WARMPATH_ROUTER_TLS_CERT_FILE": "/tls/cert.pem",
        "WARMPATH_ROUTER_TLS_KEY_FILE": "/tls/key.pem",
        "WARMPATH_ROUTER_UPSTREAM_CA_FILE": "/tls/ca.pem",
        "WARMPATH_ROUTER_ADMIN_TLS_CERT_FILE": "/tls/admin.pem",
        "WARMPATH_ROUTER_ADMIN_TLS_KEY_FILE": "/tls/admin.key",
        "WARMPATH_ROUTER_ADMIN_TOKEN_FILE": str(tmp_path / "token"),
    }
    settings = read_settings(["--control-plane", "HTTP://Cp", "--name", "one", "--port", "7000"], environ)
    assert (settings.host, settings.port, settings.admin_port) == ("0.0.0.0", 7000, 9001)
    assert (settings.admin_token, settings.state_dir) == ("s3cret", Path("/data/router-one"))
    assert settings.control_plane_url == "http://cp"
    assert (settings.workers, settings.reuse_port) == (4, True)
    assert settings.tls == TlsFiles("/tls/cert.pem", "/tls/key.pem", "/tls/ca.pem")
    assert settings.admin_tls == TlsFiles("/tls/admin.pem", "/tls/admin.key")


def test_workers_are_rejected_without_shared_memory(monkeypatch):
    monkeypatch.delattr("os.memfd_create")
    assert read_settings(["--config", "c", "--workers", "1"], {}).workers == 1
    with pytest.raises(SettingsError, match="--workers: more than one needs Linux"):
        read_settings(["--config", "c", "--workers", "2"], {})


def test_reuse_port_can_be_off():
    assert not read_settings(["--config", "c"], {"WARMPATH_ROUTER_REUSE_PORT": "0"}).reuse_port


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (["--config", "c", "--name", "No Name"], {}, "--name"),
        (["--config", "c", "--admin-host", "0.0.0.0"], {}, "WARMPATH_ROUTER_ADMIN_TOKEN"),
        (["--config", "c"], {"WARMPATH_BIND": "0.0.0.0"}, "WARMPATH_ROUTER_ADMIN_TOKEN"),
        (["--config", "c"], {"WARMPATH_ROUTER_PORT": "many"}, "WARMPATH_ROUTER_PORT"),
        (["--config", "c"], {"WARMPATH_ROUTER_WORKERS": "0"}, "WARMPATH_ROUTER_WORKERS"),
        (["--config", "c"], {"WARMPATH_ROUTER_WORKERS": "65"}, "WARMPATH_ROUTER_WORKERS"),
        (["--config", "c"], {"WARMPATH_ROUTER_ADMIN_TOKEN_FILE": "/nowhere"}, "WARMPATH_ROUTER_ADMIN_TOKEN_FILE"),
        (["--config", "c"], {"WARMPATH_ROUTER_ADMIN_TOKEN_FILE": "/dev/null"}, "_TOKEN_FILE: /dev/null is empty"),
        (["--config", "c"], {"WARMPATH_ROUTER_ADMIN_TOKEN_FILE": sys.executable}, "_TOKEN_FILE: .* is not UTF-8 text"),
        (["--config", "c"], {"WARMPATH_ROUTER_ADMIN_TOKEN": "two words"}, "WARMPATH_ROUTER_ADMIN_TOKEN"),
        (["--config", "c"], {"WARMPATH_ROUTER_REUSE_PORT": "yes"}, "WARMPATH_ROUTER_REUSE_PORT: expected 0 or 1"),
        (["--control-plane", "cp:8000"], {}, "--control-plane: expected http"),
        (["--control-plane", "http://cp:http"], {}, "--control-plane: not a URL"),
        (["--config", "c", "--tls-cert", "c.pem"], {}, "--tls-key"),
        (["--config", "c"], {"WARMPATH_ROUTER_TLS_KEY_FILE": "k.pem"}, "--tls-cert"),
        (["--config", "c", "--admin-tls-key", "k.pem"], {}, "--admin-tls-cert"),
    ],
)
def test_an_error_names_the_invalid_setting(arguments, environ, message):
    with pytest.raises(SettingsError, match=message):
        read_settings(arguments, environ)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--config", "c", "--control-plane", "http://x"],
        ["--config", "c", "--port", "-1"],
        ["--config", "c", "--workers", "many"],
    ],
)
def test_an_invalid_command_line_prints_the_usage(arguments, capsys):
    with pytest.raises(SystemExit):
        read_settings(arguments, {})
    assert "usage: python -m routing serve" in capsys.readouterr().err


def test_an_unknown_command_lists_the_known_ones(capsys):
    assert commands.main(["fly"]) == 2
    assert commands.main(["--help"]) == 0
    text = capsys.readouterr().err
    assert all(name in text for name in ("serve", "replica", "play"))
