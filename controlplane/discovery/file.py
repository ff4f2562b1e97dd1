"""Replicas by a file of targets in the form that Prometheus reads (``file_sd_configs``), JSON or YAML."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import yaml
from django.conf import settings as django_settings
from msgspec import Meta

from controlplane.discovery.targets import (
    Bounds,
    Found,
    PollError,
    Scheme,
    SchemeChoice,
    SourceSettings,
    Target,
    gather,
    shown,
)

LONGEST_FILE = 1 << 20  # bytes
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class FileSettings(SourceSettings, frozen=True):
    """Which file, and how its targets are named."""

    path: Annotated[
        str,
        Meta(
            pattern=r"^[^/\x00-\x1f][^\x00-\x1f]{0,500}\.(json|yml|yaml)\Z",
            description="A .json, .yml or .yaml file below the folder that WARMPATH_DISCOVERY_DIR names.",
        ),
    ]
    name_label: Annotated[
        str,
        Meta(
            max_length=100,
            description="The label that names a target for good, so that it may move to another address.",
        ),
    ] = "replica"
    scheme: SchemeChoice = Scheme.HTTP


class FileKind:
    """A file of targets."""

    name = "file"
    label = "File"
    help = "A file that something of yours writes, in Prometheus' form: groups of targets with labels, JSON or YAML."
    settings: type[SourceSettings] = FileSettings
    secret = ""

    def look(self, settings: Any, secret: str, bounds: Bounds) -> Found:  # noqa: ARG002 - it has none
        """Read the file as it is now."""
        path = place(settings.path)
        return gather(targets(_parsed(path, _content(path)), settings), bounds)


def targets(groups: object, settings: FileSettings) -> Iterator[Target]:
    """The targets of a file; PollError where it has another form."""
    if not isinstance(groups, list):
        raise PollError("Expected a list of groups, each with targets.")
    for number, group in enumerate(groups):
        labels, named = _group(group, number)
        for address in named:
            yield _target(address, labels, settings, alone=len(named) == 1)


def place(path: str) -> Path:
    """Where a file lies; PollError for one outside the folder that the operator allows, by whatever way."""
    if not django_settings.DISCOVERY_DIR:
        raise PollError("Files are read only where WARMPATH_DISCOVERY_DIR names a folder for them; it names none.")
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise PollError("The path leads out of the folder of WARMPATH_DISCOVERY_DIR.")
    try:
        folder = Path(django_settings.DISCOVERY_DIR).resolve(strict=True)
        found = (folder / path).resolve(strict=True)  # links are followed here, and by nobody later
    except (OSError, RuntimeError, ValueError) as error:
        raise PollError(f"{shown(path)} cannot be read: {_why(error)}.") from None
    if not found.is_relative_to(folder):
        raise PollError("The path leads out of the folder of WARMPATH_DISCOVERY_DIR.")
    return found


def _content(path: Path) -> bytes:
    """The whole file, which did not change meanwhile: no pipe, no device, nothing longer than it may be."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            before = os.fstat(handle)
            if not stat.S_ISREG(before.st_mode):
                raise PollError(f"{shown(path.name)} is no plain file.")
            content = file.read(LONGEST_FILE + 1)
            after = os.fstat(handle)
    except OSError as error:
        raise PollError(f"{shown(path.name)} cannot be read: {_why(error)}.") from None
    if len(content) > LONGEST_FILE:
        raise PollError(f"{shown(path.name)} is longer than {LONGEST_FILE} bytes.")
    if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size) or len(content) != after.st_size:
        raise PollError(f"{shown(path.name)} is being written; write another and rename it.")
    return content


def _parsed(path: Path, content: bytes) -> object:
    try:
        text = content.decode()
        return json.loads(text) if path.suffix == ".json" else yaml.load(text, _LOADER)  # noqa: S506 - a safe loader
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        where = str(error).replace("\n", " ") or "it is nested too deep"
        raise PollError(f"{shown(path.name)} cannot be read: {shown(where, 200)}") from None


def _group(group: object, number: int) -> tuple[Mapping[str, Any], list[object]]:
    if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
        raise PollError(f"Group {number + 1} is no object with a list of targets.")
    labels = group.get("labels") or {}
    if not isinstance(labels, dict):
        raise PollError(f"The labels of group {number + 1} are no object.")
    return labels, group["targets"]


def _target(address: object, labels: Mapping[str, Any], settings: FileSettings, *, alone: bool) -> Target:
    """A label can name a target only where its group has no other."""
    name = labels.get(settings.name_label) if alone and settings.name_label else None
    scheme = str(labels.get("__scheme__", settings.scheme))
    plain = {str(key): str(value) for key, value in labels.items() if isinstance(value, str | int | float)}
    fault = "" if _ADDRESS.fullmatch(str(address)) else "expected host:port"
    return Target(key=str(name or address), url=f"{scheme}://{address}", labels=plain, fault=fault)


def _why(error: Exception) -> str:
    return (getattr(error, "strerror", None) or type(error).__name__).lower()
