"""Targets of a poll: validated, without duplicates, sorted and limited in number; and what all kinds of sources share.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Self

from msgspec import Meta, Struct

from controlplane.egress import Rules, literal_denial
from controlplane.models import TargetCondition
from routing.schema import ConfigError, ReplicaRole, check_base_url

Port = Annotated[int, Meta(ge=1, le=65_535, description="Port of every engine.")]


class Scheme(StrEnum):
    """URL scheme of engines."""

    HTTP = "http"
    HTTPS = "https"


SchemeChoice = Annotated[Scheme, Meta(description="URL scheme of the engines.")]


class SourceSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of each kind's settings."""

    def checked(self, rules: Rules) -> Self:  # noqa: ARG002 - used by kinds that connect to a configured address
        """The settings in their normal form; ConfigError names the field with which every poll would fail."""
        return self


MAX_KEY_CHARS = 253  # length of the longest name in DNS and Kubernetes
MAX_LABELS = 32
MAX_LABEL_CHARS = 200
MAX_LISTED_REJECTIONS = 20


class PollError(Exception):
    """A poll failed, so nothing changes. The text is for operators and holds no secret."""


_READINESS = (TargetCondition.READY, TargetCondition.NOT_READY, TargetCondition.TERMINATING)


@dataclass(frozen=True, slots=True)
class Target:
    """One engine as a source reports it."""

    key: str  # its identity within the source: a pod's name stays the same when the address changes
    url: str  # http(s)://host:port
    condition: TargetCondition = TargetCondition.READY
    labels: Mapping[str, str] = field(default_factory=dict)
    error: str = ""  # why the source cannot use it


@dataclass(frozen=True, slots=True)
class PollLimits:
    """Limits of one poll."""

    rules: Rules  # egress rules, for the poll's own connections and for targets
    deadline_s: float
    max_targets: int


@dataclass(frozen=True, slots=True)
class PollResult:
    """Valid targets, sorted by key. A rejected target is left out, but its replica does not count as missing."""

    targets: tuple[Target, ...]
    rejections: tuple[str, ...] = ()  # "target: reason.", at most 20
    rejected_keys: frozenset[str] = frozenset()


ROLE_LABELS = ("role", "llm-d.ai/role")


def role_of(labels: Mapping[str, str]) -> ReplicaRole:
    """The role of an engine by its labels, in the words of llm-d too; ``both`` without one, or for an unknown word."""
    word = next((labels[name] for name in ROLE_LABELS if name in labels), "")
    return ReplicaRole(word) if word in {role.value for role in ReplicaRole} else ReplicaRole.BOTH


def base_url(scheme: str, host: str, port: int) -> str:
    """Base URL of a replica in its normal form, with brackets around an IPv6 address."""
    return f"{scheme}://[{host}]:{port}".lower() if ":" in host else f"{scheme}://{host}:{port}".lower()


def collect(candidates: Iterable[Target], limits: PollLimits) -> PollResult:
    """Validate each target and reject duplicates of one engine.

    PollError if there are too many targets, or none is valid.
    """
    rejections: list[tuple[str, str]] = []
    accepted: dict[str, Target] = {}
    keys: dict[str, str] = {}  # of accepted targets, by URL
    for target in sorted(_check_number(candidates, limits.max_targets), key=_sort_key):
        if reason := _invalid(target, limits.rules) or _duplicate(target, accepted, keys):
            rejections.append((target.key, reason))
        elif target.key not in accepted:
            accepted[target.key] = _trim_labels(target)
            keys[target.url] = target.key
    if len(accepted) > limits.max_targets:
        raise _too_many(len(accepted), limits.max_targets)
    texts = [f"{printable(key) or 'A target without a name'}: {reason}." for key, reason in rejections]
    if rejections and not accepted:
        raise PollError(f"No target is valid. {texts[0]}")
    rejected_keys = frozenset(key for key, _ in rejections) - frozenset(accepted)
    targets = tuple(sorted(accepted.values(), key=lambda target: target.key))
    return PollResult(targets, tuple(texts[:MAX_LISTED_REJECTIONS]), rejected_keys)


def printable(text: object, max_chars: int = 80) -> str:
    """Untrusted text for a message: one line, printable, cut to ``max_chars``."""
    line = "".join(letter if letter.isprintable() else "?" for letter in str(text)[: max_chars + 1])
    return line if len(line) <= max_chars else f"{line[:max_chars]}..."


def _sort_key(target: Target) -> tuple[int, str, str]:
    return (_READINESS.index(target.condition), target.key, target.url)


def _check_number(candidates: Iterable[Target], max_targets: int) -> list[Target]:
    """The candidates as a list; PollError for more than four per allowed target (an engine may be reported twice)."""
    reported: list[Target] = []
    for target in candidates:
        reported.append(target)
        if len(reported) > 4 * max_targets:
            raise _too_many(len(reported), max_targets)
    return reported


def _invalid(target: Target, rules: Rules) -> str | None:
    """Why a target cannot be a replica."""
    if not 0 < len(target.key) <= MAX_KEY_CHARS or not target.key.isprintable():
        return f"its name is empty, longer than {MAX_KEY_CHARS} characters, or has control characters"
    if target.error:
        return target.error
    try:
        check_base_url(target.url)
    except ConfigError as error:
        return f"{printable(target.url)}: {error.reason}"
    refusal = literal_denial(target.url, rules)
    return refusal and f"{refusal}; WARMPATH_FLEET_NETWORKS lists the networks of replicas"


def _duplicate(target: Target, accepted: Mapping[str, Target], keys: Mapping[str, str]) -> str | None:
    same_key = accepted.get(target.key)
    if same_key and same_key.url != target.url:
        return f"reported at {same_key.url} and at {target.url}; the first is used"
    same_url = keys.get(target.url)
    if same_url not in (None, target.key):
        return f"{target.url} is already target {printable(same_url)}"
    return None


def _trim_labels(target: Target) -> Target:
    labels = [(str(name), str(value)) for name, value in target.labels.items()]
    labels = [(name, value) for name, value in labels if (name + value).isprintable() and len(name) <= MAX_LABEL_CHARS]
    kept = {name: value[:MAX_LABEL_CHARS] for name, value in sorted(labels)[:MAX_LABELS]}
    return Target(target.key, target.url, target.condition, kept)


def _too_many(reported: int, limit: int) -> PollError:
    return PollError(f"The source reports at least {reported} targets; its limit is {limit}.")
