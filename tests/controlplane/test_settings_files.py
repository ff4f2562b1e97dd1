"""Settings of the local stack and of production, read in a separate process."""

import re

import pytest

from tests.controlplane.settings_files import PRODUCTION, read


def test_production_requires_https_and_secure_cookies():
    names = ("SESSION_COOKIE_SECURE", "SESSION_COOKIE_HTTPONLY", "SESSION_COOKIE_SAMESITE", "CSRF_COOKIE_SECURE")
    names += ("CSRF_COOKIE_SAMESITE", "SECURE_HSTS_SECONDS", "SECURE_SSL_REDIRECT", "X_FRAME_OPTIONS", "DEBUG")
    names += ("SECURE_REDIRECT_EXEMPT",)
    values, _ = read("production", names, **PRODUCTION, WARMPATH_DEBUG="1")
    exempt = values.pop("SECURE_REDIRECT_EXEMPT")
    assert tuple(values.values()) == (True, True, "Lax", True, "Lax", 31_536_000, True, "DENY", False)
    paths = ("api/v1/pools", "healthz", "readyz", "metrics", "", "metrics-servers/", "fleet/healthz")
    assert [path for path in paths if any(re.search(pattern, path) for pattern in exempt)] == list(paths[:4])


def test_production_cookies_have_the_host_prefix():
    names = ("SESSION_COOKIE_NAME", "CSRF_COOKIE_NAME", "SESSION_COOKIE_DOMAIN", "CSRF_COOKIE_DOMAIN")
    names += ("SESSION_COOKIE_PATH", "CSRF_COOKIE_PATH")
    values, _ = read("production", names, **PRODUCTION)
    assert list(values.values())[:2] == ["__Host-sessionid", "__Host-csrftoken"]
    assert set(list(values.values())[2:]) <= {None, "/"}, "browsers refuse the prefix with a domain or another path"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WARMPATH_SECRET_KEY", "short"),
        ("WARMPATH_SECRET_KEY", "a" * 60),
        ("WARMPATH_ALLOWED_HOSTS", "*"),
        ("WARMPATH_ROUTER_ADMIN_TOKEN", "short"),
        ("WARMPATH_REQUIRE_TOTP_FOR", "king"),
        ("WARMPATH_OIDC_ISSUER", "http://id.example"),
        ("WARMPATH_FLEET_CA_FILE", "/nowhere.pem"),
        ("WARMPATH_FLEET_CA_FILE", __file__),
        ("WARMPATH_OIDC_GROUP_ROLES", "platform"),
        ("WARMPATH_DATABASE_OWNER_URL", "sqlite:///x"),
    ],
)
def test_an_invalid_setting_stops_the_start(variable, value):
    values, errors = read("production", (), **PRODUCTION | {variable: value})
    assert values is None
    assert f"ImproperlyConfigured: {variable.removesuffix('_OWNER_URL')}" in errors


def test_debug_is_limited_to_loopback(tmp_path):
    local = {"WARMPATH_DEBUG": "1", "WARMPATH_DATA_DIR": str(tmp_path)}
    assert read("dev", ("DEBUG",), **local)[0] == {"DEBUG": True}
    values, errors = read("dev", ("DEBUG",), **local, WARMPATH_ALLOWED_HOSTS="localhost,warmpath.example")
    assert values is None
    assert "ImproperlyConfigured: WARMPATH_DEBUG" in errors


def test_the_local_stack_migrates_as_the_owner_and_serves_as_the_application(tmp_path):
    values, _ = read("dev", ("DATABASES", "DATABASE_OWNER"), WARMPATH_DATA_DIR=str(tmp_path))
    assert (values["DATABASES"]["default"]["USER"], values["DATABASE_OWNER"]["USER"]) == ("warmpath", "postgres")
    configured = {"WARMPATH_DATABASE_URL": "postgresql://me@/x", "WARMPATH_DATA_DIR": str(tmp_path)}
    values, _ = read("dev", ("DATABASES", "DATABASE_OWNER"), **configured)
    assert (values["DATABASES"]["default"]["USER"], values["DATABASE_OWNER"]) == ("me", {})
