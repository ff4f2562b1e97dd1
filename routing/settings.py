"""Settings of ``python -m routing serve`` and ``picker``: command line over environment over defaults.

Every variable that holds a value has a ``_FILE`` variant that holds the path of a file with the value, for secrets that
a platform mounts as files.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from routing.http.tls import TlsFiles
from routing.schema import KEY_HEX, NAME, ConfigError, check_base_url, is_loopback

if TYPE_CHECKING:
    from routing.response_cache.store import Store
    from routing.sharing.exchange import Exchange

MAX_WORKERS = 64
MAX_FALLBACKS = 8
DEFAULT_FALLBACKS = 2  # as ``retries`` of the limits
CONFIG_KEYS = "WARMPATH_ROUTER_CONFIG_KEYS"
CACHE_URL = "WARMPATH_ROUTER_CACHE_URL"
STATE_URL = "WARMPATH_ROUTER_STATE_URL"

_PEM_FILES = (  # flag, environment variable, help text
    ("--tls-cert", "WARMPATH_ROUTER_TLS_CERT_FILE", "the data port's certificate and its chain"),
    ("--tls-key", "WARMPATH_ROUTER_TLS_KEY_FILE", "the private key of --tls-cert"),
    ("--admin-tls-cert", "WARMPATH_ROUTER_ADMIN_TLS_CERT_FILE", "the admin port's certificate and its chain"),
    ("--admin-tls-key", "WARMPATH_ROUTER_ADMIN_TLS_KEY_FILE", "the private key of --admin-tls-cert"),
    ("--upstream-ca", "WARMPATH_ROUTER_UPSTREAM_CA_FILE", "the certificate authorities of replicas with an https URL"),
)

_config_key = re.compile(KEY_HEX).fullmatch
_token = re.compile(r"[!-~]+").fullmatch
_name = re.compile(NAME).fullmatch


class SettingsError(ValueError):
    """An invalid setting, which the message names."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of one router process."""

    name: str
    config_file: Path | None
    control_plane_url: str | None
    host: str
    port: int
    admin_host: str
    admin_port: int
    state_dir: Path
    admin_token: str | None  # None: the admin port needs no token, and must be on the loopback
    workers: int = 1  # processes that serve the data port
    reuse_port: bool = False  # whether another router may share the data port
    tls: TlsFiles = field(default_factory=TlsFiles)  # of the data port, and for connections to replicas
    admin_tls: TlsFiles = field(default_factory=TlsFiles)  # of the admin port
    config_keys: tuple[str, ...] = ()  # public keys of signed configurations; (): signatures are not checked
    fallbacks: int = 0  # further endpoints that a picker names


def read_settings(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ServeSettings:
    """Read the settings of a router; SettingsError, or SystemExit from argparse, if they are invalid."""
    return _settings(_serve_parser(environ).parse_args(argv), environ)


def read_picker_settings(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ServeSettings:
    """Read the settings of an endpoint picker; errors as in ``read_settings``."""
    return _settings(_picker_parser(environ).parse_args(argv), environ)


def _settings(arguments: argparse.Namespace, environ: Mapping[str, str]) -> ServeSettings:
    name = arguments.name or _default_name()
    if not _name(name):
        raise SettingsError(
            f"--name {name!r}: expected lower-case letters, digits, dots, dashes and underscores, at most 63"
        )
    token = from_environment(environ, "WARMPATH_ROUTER_ADMIN_TOKEN")
    _check(arguments, token)
    cache_store(environ)  # SettingsError for an invalid URL
    state_exchange(environ)
    data_dir = Path(from_environment(environ, "WARMPATH_DATA_DIR") or ".warmpath")
    return ServeSettings(
        name=name,
        config_file=arguments.config,
        control_plane_url=arguments.control_plane,
        host=arguments.host,
        port=arguments.port,
        admin_host=arguments.admin_host,
        admin_port=arguments.admin_port,
        state_dir=arguments.state_dir or data_dir / f"router-{name}",
        admin_token=token,
        workers=arguments.workers,
        reuse_port=arguments.reuse_port,
        tls=TlsFiles(arguments.tls_cert, arguments.tls_key, arguments.upstream_ca),
        admin_tls=TlsFiles(arguments.admin_tls_cert, arguments.admin_tls_key),
        config_keys=_config_keys(from_environment(environ, CONFIG_KEYS) or ""),
        fallbacks=arguments.fallbacks,
    )


def cache_store(environ: Mapping[str, str] = os.environ) -> Store | None:
    """The store of response caches that ``WARMPATH_ROUTER_CACHE_URL`` names; None if it is not set. SettingsError."""
    url = from_environment(environ, CACHE_URL)
    if url is None:
        return None
    from routing.response_cache.store import Store  # noqa: PLC0415 - most routers do not need it

    try:
        return Store(url)
    except ValueError:
        raise _invalid_url(CACHE_URL) from None


def state_exchange(environ: Mapping[str, str] = os.environ, router: str = "") -> Exchange | None:
    """The exchange with other routers at ``WARMPATH_ROUTER_STATE_URL``; None if that is not set. SettingsError.

    ``router``: of the parent, in a worker.
    """
    url = from_environment(environ, STATE_URL)
    if url is None:
        return None
    # A router that is alone does not need them.
    from routing.sharing.exchange import Exchange  # noqa: PLC0415
    from routing.sharing.transports import ServerTransport  # noqa: PLC0415

    try:
        return Exchange(ServerTransport(url), router)
    except ValueError:
        raise _invalid_url(STATE_URL) from None


def _invalid_url(name: str) -> SettingsError:
    """The error without the URL, which may contain a password."""
    return SettingsError(f"{name}: expected redis://, rediss:// or unix:// and a host or path")


def _check(arguments: argparse.Namespace, token: str | None) -> None:
    """SettingsError for settings that are invalid or contradict each other."""
    if token is not None and not _token(token):
        raise SettingsError("WARMPATH_ROUTER_ADMIN_TOKEN: expected visible ASCII characters, without spaces")
    if token is None and not is_loopback(arguments.admin_host):
        raise SettingsError(
            f"the admin port would be reachable without a token on {arguments.admin_host}: "
            "set WARMPATH_ROUTER_ADMIN_TOKEN, or bind it to 127.0.0.1"
        )
    if arguments.workers > 1 and not hasattr(os, "memfd_create"):
        raise SettingsError("--workers: more than one needs Linux")
    if arguments.control_plane is not None:
        try:
            arguments.control_plane = check_base_url(arguments.control_plane, "--control-plane")
        except ConfigError as error:
            raise SettingsError(str(error)) from None
    for port, certificate, key in (
        ("", arguments.tls_cert, arguments.tls_key),
        ("admin-", arguments.admin_tls_cert, arguments.admin_tls_key),
    ):
        if (certificate is None) != (key is None):
            raise SettingsError(f"--{port}tls-cert and --{port}tls-key must be set together")


def _config_keys(text: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in text.split(",") if key.strip())
    if not all(map(_config_key, keys)):
        raise SettingsError(f"{CONFIG_KEYS}: expected public keys of 64 hex digits, separated by commas")
    return keys


def from_environment(environ: Mapping[str, str], name: str) -> str | None:
    """A variable's value, or the content of the file that its ``_FILE`` variant names; None if neither is set."""
    if value := environ.get(name):
        return value
    path = environ.get(f"{name}_FILE")
    if not path:
        return None
    try:
        value = Path(path).read_text("utf-8").strip()
    except OSError as error:
        raise SettingsError(f"{name}_FILE: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{name}_FILE: {path} is not UTF-8 text") from None
    if not value:  # a secret that is not mounted yet must not disable authentication
        raise SettingsError(f"{name}_FILE: {path} is empty")
    return value


def _serve_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _parser(environ, "serve", "Run a router.", ("WARMPATH_ROUTER_PORT", 8080))
    parser.set_defaults(fallbacks=0)
    parser.add_argument(
        "--workers",
        type=_workers,
        default=_number_from(environ, "WARMPATH_ROUTER_WORKERS", _workers, 1),
        metavar="N",
        help="processes that serve the data port; about one per core",
    )
    parser.add_argument(
        "--reuse-port",
        action="store_true",
        default=bool(_number_from(environ, "WARMPATH_ROUTER_REUSE_PORT", _zero_or_one, 0)),
        help="share the data port with another router, to replace that router without downtime",
    )
    return parser


def _picker_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = _parser(environ, "picker", "Run an endpoint picker for Envoy.", ("WARMPATH_PICKER_PORT", 9002))
    parser.set_defaults(workers=1, reuse_port=False)
    parser.add_argument(
        "--fallbacks",
        type=_fallbacks,
        default=_number_from(environ, "WARMPATH_PICKER_FALLBACKS", _fallbacks, DEFAULT_FALLBACKS),
        metavar="N",
        help="further endpoints that Envoy may try, in order; 0 for a cluster of type ORIGINAL_DST",
    )
    return parser


def _parser(
    environ: Mapping[str, str], command: str, description: str, data_port: tuple[str, int]
) -> argparse.ArgumentParser:
    """The options that routers and pickers share. ``data_port``: its environment variable and its default."""
    bind = from_environment(environ, "WARMPATH_BIND") or "127.0.0.1"
    parser = argparse.ArgumentParser(prog=f"python -m routing {command}", description=description)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE", help="a configuration snapshot to start with")
    source.add_argument(
        "--control-plane",
        metavar="URL",
        help="announce to this control plane, and run the configurations that it pushes",
    )
    parser.add_argument("--name", help="this router's name (default: the host's name)")
    parser.add_argument("--host", default=bind, help="address of the data port")
    port_variable, default_port = data_port
    parser.add_argument("--port", type=_port, default=_number_from(environ, port_variable, _port, default_port))
    parser.add_argument("--admin-host", default=bind, help="address of the admin port")
    parser.add_argument(
        "--admin-port", type=_port, default=_number_from(environ, "WARMPATH_ROUTER_ADMIN_PORT", _port, 8081)
    )
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="directory of the last known good configuration")
    for flag, variable, text in _PEM_FILES:
        parser.add_argument(flag, default=environ.get(variable) or None, metavar="FILE", help=f"{text}; or {variable}")
    return parser


def _number_from(environ: Mapping[str, str], name: str, read: Callable[[str], int], default: int) -> int:
    text = from_environment(environ, name)
    try:
        return default if text is None else read(text)
    except argparse.ArgumentTypeError as error:
        raise SettingsError(f"{name}: {error}") from None


def _whole_number(minimum: int, maximum: int, expected: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"expected {expected}")
        return int(text)

    return read


_port = _whole_number(0, 65_535, "a port number")
_workers = _whole_number(1, MAX_WORKERS, f"a number of workers from 1 to {MAX_WORKERS}")
_zero_or_one = _whole_number(0, 1, "0 or 1")
_fallbacks = _whole_number(0, MAX_FALLBACKS, f"a number of endpoints from 0 to {MAX_FALLBACKS}")


def _default_name() -> str:
    """The host's name with the characters that a router's name may have."""
    name = re.sub(r"[^a-z0-9.-]+", "-", socket.gethostname().lower()).strip(".-")[:63].rstrip(".-")
    return name or "router"
