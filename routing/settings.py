"""How a router process is started: command line over environment over defaults.

Every variable that names no file has a ``_FILE`` variant that does, for secrets that a platform mounts.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from routing.http.tls import TlsFiles
from routing.schema import KEY_HEX, NAME, ConfigError, check_base_url, is_loopback

MAX_WORKERS = 64
CONFIG_KEYS = "WARMPATH_ROUTER_CONFIG_KEYS"

_PEM_FILES = (  # flag, variable, what it is
    ("--tls-cert", "WARMPATH_ROUTER_TLS_CERT_FILE", "the data port's certificate and its chain"),
    ("--tls-key", "WARMPATH_ROUTER_TLS_KEY_FILE", "its private key"),
    ("--admin-tls-cert", "WARMPATH_ROUTER_ADMIN_TLS_CERT_FILE", "the admin port's certificate and its chain"),
    ("--admin-tls-key", "WARMPATH_ROUTER_ADMIN_TLS_KEY_FILE", "its private key"),
    ("--upstream-ca", "WARMPATH_ROUTER_UPSTREAM_CA_FILE", "the authorities of replicas with an https URL"),
)

_config_key = re.compile(KEY_HEX).fullmatch
_token = re.compile(r"[!-~]+").fullmatch
_name = re.compile(NAME).fullmatch


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Everything ``python -m routing serve`` needs to know."""

    name: str
    config_file: Path | None
    control_plane_url: str | None
    host: str
    port: int
    admin_host: str
    admin_port: int
    state_dir: Path
    admin_token: str | None  # None: the admin port is open, and must be on the loopback
    workers: int = 1  # processes that serve the data port
    reuse_port: bool = False  # whether another router may have the data port as well
    tls: TlsFiles = field(default_factory=TlsFiles)  # of the data port, and towards replicas
    admin_tls: TlsFiles = field(default_factory=TlsFiles)  # of the admin port
    config_keys: tuple[str, ...] = ()  # public keys that pushed configurations are signed with; (): nobody looks


def read_settings(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ServeSettings:
    """Read the settings; SettingsError, or SystemExit from argparse, where they make no sense."""
    given = _parser(environ).parse_args(argv)
    name = given.name or _default_name()
    if not _name(name):
        raise SettingsError(
            f"--name {name!r}: expected lower-case letters, digits, dots, dashes and underscores, at most 63"
        )
    token = from_environment(environ, "WARMPATH_ROUTER_ADMIN_TOKEN")
    _check_together(given, token)
    data_dir = Path(from_environment(environ, "WARMPATH_DATA_DIR") or ".warmpath")
    return ServeSettings(
        name=name,
        config_file=given.config,
        control_plane_url=given.control_plane,
        host=given.host,
        port=given.port,
        admin_host=given.admin_host,
        admin_port=given.admin_port,
        state_dir=given.state_dir or data_dir / f"router-{name}",
        admin_token=token,
        workers=given.workers,
        reuse_port=given.reuse_port,
        tls=TlsFiles(given.tls_cert, given.tls_key, given.upstream_ca),
        admin_tls=TlsFiles(given.admin_tls_cert, given.admin_tls_key),
        config_keys=_config_keys(from_environment(environ, CONFIG_KEYS) or ""),
    )


def _check_together(given: argparse.Namespace, token: str | None) -> None:
    """What each setting may be beside the others; SettingsError where that makes no sense."""
    if token is not None and not _token(token):
        raise SettingsError("WARMPATH_ROUTER_ADMIN_TOKEN: expected letters, digits and signs of ASCII, without blanks")
    if token is None and not is_loopback(given.admin_host):
        raise SettingsError(
            f"the admin port would be open to others on {given.admin_host}: "
            "set WARMPATH_ROUTER_ADMIN_TOKEN, or bind it to 127.0.0.1"
        )
    if given.workers > 1 and not hasattr(os, "memfd_create"):
        raise SettingsError("--workers: more than one needs Linux")
    if given.control_plane is not None:
        _check_url(given.control_plane)
    for port, certificate, key in (
        ("", given.tls_cert, given.tls_key),
        ("admin-", given.admin_tls_cert, given.admin_tls_key),
    ):
        if (certificate is None) != (key is None):
            raise SettingsError(f"--{port}tls-cert and --{port}tls-key go together")


def _config_keys(text: str) -> tuple[str, ...]:
    """Public keys from a list with commas."""
    keys = tuple(word.strip() for word in text.split(",") if word.strip())
    if not all(map(_config_key, keys)):
        raise SettingsError(f"{CONFIG_KEYS}: expected public keys of 64 hex digits, separated by commas")
    return keys


def from_environment(environ: Mapping[str, str], name: str) -> str | None:
    """A variable's value, or the contents of the file that its ``_FILE`` variant names; None if neither is set."""
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
        raise SettingsError(f"{name}_FILE: {path} is no text in UTF-8") from None
    if not value:  # as where a secret has not arrived: nothing opens for it
        raise SettingsError(f"{name}_FILE: {path} is empty")
    return value


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    bind = from_environment(environ, "WARMPATH_BIND") or "127.0.0.1"
    parser = argparse.ArgumentParser(prog="python -m routing serve", description="Serve requests.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config", type=Path, metavar="FILE", help="a configuration snapshot to start with")
    source.add_argument(
        "--control-plane", metavar="URL", help="announce to this control plane, and serve what it pushes"
    )
    parser.add_argument("--name", help="this router's name; the host's name unless given")
    parser.add_argument("--host", default=bind, help="address of the data port")
    parser.add_argument("--port", type=_port, default=_from(environ, "WARMPATH_ROUTER_PORT", _port, 8080))
    parser.add_argument("--admin-host", default=bind, help="address of the admin port")
    parser.add_argument("--admin-port", type=_port, default=_from(environ, "WARMPATH_ROUTER_ADMIN_PORT", _port, 8081))
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="where the last known good configuration is kept")
    parser.add_argument(
        "--workers",
        type=_workers,
        default=_from(environ, "WARMPATH_ROUTER_WORKERS", _workers, 1),
        metavar="N",
        help="processes that serve the data port; about one for each core",
    )
    parser.add_argument(
        "--reuse-port",
        action="store_true",
        default=bool(_from(environ, "WARMPATH_ROUTER_REUSE_PORT", _switch, 0)),
        help="let another router have the data port too, as one does that takes over",
    )
    for flag, variable, what in _PEM_FILES:
        parser.add_argument(flag, default=environ.get(variable) or None, metavar="FILE", help=f"{what}; or {variable}")
    return parser


def _from(environ: Mapping[str, str], name: str, read: Callable[[str], int], default: int) -> int:
    text = from_environment(environ, name)
    try:
        return default if text is None else read(text)
    except argparse.ArgumentTypeError as error:
        raise SettingsError(f"{name}: {error}") from None


def _port(text: str) -> int:
    return _whole(text, 0, 65_535, "a port number")


def _workers(text: str) -> int:
    return _whole(text, 1, MAX_WORKERS, f"a number of workers from 1 to {MAX_WORKERS}")


def _switch(text: str) -> int:
    return _whole(text, 0, 1, "0 or 1")


def _whole(text: str, least: int, most: int, what: str) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"expected {what}")
    return int(text)


def _check_url(url: str) -> None:
    try:
        check_base_url(url, "--control-plane")
    except ConfigError as error:
        raise SettingsError(str(error)) from None


def _default_name() -> str:
    """The host's name, as far as a router may be called that."""
    name = re.sub(r"[^a-z0-9.-]+", "-", socket.gethostname().lower()).strip(".-")[:63].rstrip(".-")
    return name or "router"
