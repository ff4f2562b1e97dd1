"""File discovery: targets in Prometheus' ``file_sd_configs`` format, JSON or YAML."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Self

import yaml
from django.conf import settings as django_settings
from msgspec import Meta

from controlplane.discovery.targets import (
    PollError,
    PollLimits,
    PollResult,
    Scheme,
    SchemeChoice,
    SourceSettings,
    Target,
    collect,
    printable,
)
from controlplane.egress import Rules
from routing.schema import ConfigError

MAX_FILE_BYTES = 1 << 20
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class FileSettings(SourceSettings, frozen=True):
    """File and how its targets are named."""

    path: Annotated[
        str,
        Meta(
            pattern=r"^[^/\x00-\x1f][^\x00-\x1f]{0,500}\.(json|yml|yaml)\Z",
            description="A .json, .yml or .yaml file below the directory WARMPATH_DISCOVERY_DIR.",
        ),
    ]
    name_label: Annotated[
        str,
        Meta(
            max_length=100,
            description="Label with a permanent name, so that the replica keeps its name when its address changes.",
        ),
    ] = "replica"
    scheme: SchemeChoice = Scheme.HTTP

    def checked(self, rules: Rules) -> Self:  # noqa: ARG002 - a file is at no address
        if ".." in PurePosixPath(self.path).parts:
            raise ConfigError("path", "expected a file below the directory WARMPATH_DISCOVERY_DIR, without ..")
        return self


class FileKind:
    name = "file"
    label = "File"
    help = (
        "A file written by your own tools, in Prometheus' file_sd format: groups of targets with labels, JSON or YAML."
    )
    settings: type[SourceSettings] = FileSettings
    secret = ""

    def poll(self, settings: Any, secret: str, limits: PollLimits) -> PollResult:  # noqa: ARG002 - a file needs none
        """Read the file."""
        path = resolved_path(settings.path)
        return collect(targets(_parsed(path, _content(path)), settings), limits)


def targets(groups: object, settings: FileSettings) -> Iterator[Target]:
    """The targets of a parsed file; PollError if it has another format."""
    if not isinstance(groups, list):
        raise PollError("Expected a list of groups, each with targets.")
    for number, group in enumerate(groups):
        labels, addresses = _group(group, number)
        for address in addresses:
            yield _target(address, labels, settings, is_single=len(addresses) == 1)


def resolved_path(path: str) -> Path:
    """The file's real path; PollError if it is outside ``WARMPATH_DISCOVERY_DIR``, also through links."""
    if not django_settings.DISCOVERY_DIR:
        raise PollError("WARMPATH_DISCOVERY_DIR is not set: file discovery reads only files below it.")
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise PollError("The path is outside WARMPATH_DISCOVERY_DIR.")
    try:
        folder = Path(django_settings.DISCOVERY_DIR).resolve(strict=True)
        resolved = (folder / path).resolve(strict=True)  # links are followed here; opening follows none
    except (OSError, RuntimeError, ValueError) as error:
        raise PollError(f"{printable(path)} cannot be read: {_error_text(error)}.") from None
    if not resolved.is_relative_to(folder):
        raise PollError("The path is outside WARMPATH_DISCOVERY_DIR.")
    return resolved


def _content(path: Path) -> bytes:
    """The whole file. PollError for a pipe or device, a file that is too long, or one that changes while it is read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            before = os.fstat(handle)
            if not stat.S_ISREG(before.st_mode):
                raise PollError(f"{printable(path.name)} is not a regular file.")
            content = file.read(MAX_FILE_BYTES + 1)
            after = os.fstat(handle)
    except OSError as error:
        raise PollError(f"{printable(path.name)} cannot be read: {_error_text(error)}.") from None
    if len(content) > MAX_FILE_BYTES:
        raise PollError(f"{printable(path.name)} is longer than {MAX_FILE_BYTES} bytes.")
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size) or len(content) != after.st_size:
        raise PollError(f"{printable(path.name)} changed while it was read: write a new file and rename it.")
    return content


def _parsed(path: Path, content: bytes) -> object:
    try:
        text = content.decode()
        return json.loads(text) if path.suffix == ".json" else yaml.load(text, _LOADER)  # noqa: S506 - a safe loader
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        reason = str(error).replace("\n", " ") or "it is nested too deeply"
        raise PollError(f"{printable(path.name)} cannot be parsed: {printable(reason, 200)}") from None


def _group(group: object, number: int) -> tuple[Mapping[str, Any], list[object]]:
    if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
        raise PollError(f"Group {number + 1}: expected an object with a list of targets.")
    labels = group.get("labels") or {}
    if not isinstance(labels, dict):
        raise PollError(f"Group {number + 1}: expected labels as an object.")
    return labels, group["targets"]


def _target(address: object, labels: Mapping[str, Any], settings: FileSettings, *, is_single: bool) -> Target:
    """The name label applies only to a group with a single target."""
    name = labels.get(settings.name_label) if is_single and settings.name_label else None
    scheme = str(labels.get("__scheme__", settings.scheme))
    label_texts = {str(key): str(value) for key, value in labels.items() if isinstance(value, str | int | float)}
    error = "" if _ADDRESS.fullmatch(str(address)) else "expected host:port"
    return Target(key=str(name or address), url=f"{scheme}://{address}".lower(), labels=label_texts, error=error)


def _error_text(error: Exception) -> str:
    return (getattr(error, "strerror", None) or type(error).__name__).lower()
