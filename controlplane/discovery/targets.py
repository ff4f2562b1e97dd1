"""What the settings of every kind share.

What a look finds: targets that were checked, in a fixed order, no engine twice, and never too many. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta, Struct

from controlplane.egress import Rules, written_addresses
from controlplane.models import TargetCondition
from routing.schema import ConfigError, check_base_url

Port = Annotated[int, Meta(ge=1, le=65_535, description="The port at which every engine listens.")]


class Scheme(StrEnum):
    """How engines are spoken to."""

    HTTP = "http"
    HTTPS = "https"


SchemeChoice = Annotated[Scheme, Meta(description="How engines are spoken to.")]


class SourceSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of a kind's settings: a field nobody knows is an error rather than a silent no-op."""


LONGEST_KEY = 253  # characters: the longest name that DNS and Kubernetes know
MOST_LABELS = 32
LONGEST_LABEL = 200  # characters
MOST_REFUSALS = 20  # that are told; the others are counted


class PollError(Exception):
    """A look that found out nothing: nothing changes. The text is for an operator, and holds no secret."""


_ORDER = {TargetCondition.READY: 0, TargetCondition.NOT_READY: 1, TargetCondition.TERMINATING: 2}


@dataclass(frozen=True, slots=True)
class Target:
    """One engine, as a source names it."""

    key: str  # its identity within the source: a pod's name survives a new address
    url: str  # http(s)://host:port
    condition: TargetCondition = TargetCondition.READY
    labels: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""  # why its kind can make nothing of it


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a look may go."""

    rules: Rules  # where it may connect, and where targets may be
    deadline_s: float
    max_targets: int


@dataclass(frozen=True, slots=True)
class Found:
    """A look's answer. What was refused is left out, but whoever has its key is not taken for gone."""

    targets: tuple[Target, ...]
    refused: tuple[str, ...] = ()  # in words, at most 20
    refused_keys: frozenset[str] = frozenset()


def base_url(scheme: str, host: str, port: int) -> str:
    """A replica's base URL; an IPv6 address gets its brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def gather(candidates: Iterable[Target], bounds: Bounds) -> Found:
    """Check what a source names: each target by itself, and that no two are one engine.

    PollError for an answer that is too long, or in which nothing can be used.
    """
    named = _bounded(candidates, bounds.max_targets)
    refusals: list[tuple[str, str]] = []
    kept: dict[str, Target] = {}
    urls: dict[str, str] = {}
    for target in sorted(named, key=lambda one: (_ORDER[one.condition], one.key, one.url)):
        reason = _unusable(target, bounds.rules) or _twice(target, kept, urls)
        if reason:
            refusals.append((target.key, reason))
        elif target.key not in kept:
            kept[target.key] = _trimmed(target)
            urls[target.url] = target.key
    if len(kept) > bounds.max_targets:
        raise PollError(_too_many(len(kept), bounds.max_targets))
    if refusals and not kept:
        raise PollError(f"Nothing in the answer can be used. {_said(*refusals[0])}")
    keys = frozenset(key for key, _ in refusals) - frozenset(kept)
    targets = tuple(sorted(kept.values(), key=lambda one: one.key))
    return Found(targets, tuple(_said(*refusal) for refusal in refusals[:MOST_REFUSALS]), keys)


def shown(text: object, longest: int = 80) -> str:
    """Somebody else's words, as they may stand in a message: one line, printable, short."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in str(text)[: longest + 1])
    return plain if len(plain) <= longest else f"{plain[:longest]}..."


def _bounded(candidates: Iterable[Target], max_targets: int) -> list[Target]:
    """One engine may be named several times, but not without end."""
    named: list[Target] = []
    for target in candidates:
        named.append(target)
        if len(named) > 4 * max_targets:
            raise PollError(_too_many(len(named), max_targets))
    return named


def _unusable(target: Target, rules: Rules) -> str | None:
    """Why a target cannot be a replica."""
    if not 0 < len(target.key) <= LONGEST_KEY or not target.key.isprintable():
        return f"its name is empty, longer than {LONGEST_KEY} characters, or holds control characters"
    if target.fault:
        return target.fault
    try:
        check_base_url(target.url)
    except ConfigError as error:
        return f"{shown(target.url)}: {error.reason}"
    for address in written_addresses(urlsplit(target.url).hostname or ""):
        if refusal := rules.refusal(address):
            return f"{refusal}; WARMPATH_FLEET_NETWORKS says where replicas may be"
    return None


def _twice(target: Target, kept: Mapping[str, Target], urls: Mapping[str, str]) -> str | None:
    known = kept.get(target.key)
    if known and known.url != target.url:
        return f"it is named at {known.url} and at {target.url}; the first is taken"
    other = urls.get(target.url)
    if other not in (None, target.key):
        return f"{target.url} is {shown(other)} already"
    return None


def _trimmed(target: Target) -> Target:
    usable = [(str(name), str(value)) for name, value in target.labels.items()]
    usable = [(name, value) for name, value in usable if (name + value).isprintable() and len(name) <= LONGEST_LABEL]
    labels = {name: value[:LONGEST_LABEL] for name, value in sorted(usable)[:MOST_LABELS]}
    return Target(target.key, target.url, target.condition, labels)


def _said(key: str, reason: str) -> str:
    return f"{shown(key) or 'A target without a name'}: {reason}."


def _too_many(seen: int, most: int) -> str:
    return f"The answer names {seen} targets or more; this source takes at most {most}."
