"""The evidence of a cause, as alerts store it, in sentences for people. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from telemetry.causes.evidence import CauseKind, percent

Document = Mapping[str, Any]


def evidence_lines(cause: Document) -> list[str]:
    """One sentence for each known fact; a figure without a sentence of its own has its name."""
    evidence: Document = cause.get("evidence") or {}
    written: set[str] = set()
    lines = []
    for names, text in _SENTENCES:
        if names[0] in evidence:
            written.update(names)
            lines += [line for line in text(evidence, str(cause.get("kind"))) if line]
    rest = (name for name in evidence if name not in written)
    return [*lines, *(f"{name.replace('_', ' ').capitalize()}: {evidence[name]}." for name in rest)]


def _explained(evidence: Document, _: str) -> Iterator[str]:
    explained, lost = evidence["explained_tokens"], evidence.get("lost_tokens") or 0
    yield f"Explains {explained:,} of {lost:,} lost tokens ({percent(evidence.get('explained_ratio'))})."


def _revision(evidence: Document, _: str) -> Iterator[str]:
    strategy = f", strategy {evidence['strategy']}" if evidence.get("strategy") else ""
    yield f"Revision {evidence.get('revision')} of policy {evidence['policy']}{strategy}."
    if evidence.get("author"):
        yield f"Published by {evidence['author']}{_reason(evidence)}."
    if (other := evidence.get("other_revisions_ratio")) is not None:
        yield f"The policy's other revisions have a hit rate of {percent(other)} at the same time."
    if evidence.get("normal_before_drop"):
        yield "It placed requests before the drop, and these hit as usual."


def _reason(evidence: Document) -> str:
    return f": {evidence['reason']}" if evidence.get("reason") else ""


def _replicas(evidence: Document, _: str) -> Iterator[str]:
    rates = evidence.get("hit_rates") or {}
    named = (f"{name} (hit rate {percent(rates[name])})" if name in rates else name for name in evidence["replicas"])
    yield f"Replicas: {', '.join(named)}."


def _share(evidence: Document, kind: str) -> Iterator[str]:
    share = percent(evidence["share_ratio"])
    had = kind == CauseKind.REPLICA_LOST
    yield f"Share of the requests before: {share}." if had else f"Share of the tokens now: {share}."


def _prompts(evidence: Document, _: str) -> Iterator[str]:
    yield f"{percent(evidence['new_ratio'])} of the prompts did not occur before."
    yield "Each new prompt begins differently." if evidence.get("keeps_changing") else "The new beginnings repeat."
    if (at := evidence.get("offset_tokens")) is not None:
        yield f"The change is about {at:,.0f} tokens into the {str(evidence.get('segment')).replace('_', ' ')}."
    if (stable := evidence.get("stable_tokens")) is not None:
        yield f"About {stable:,.0f} tokens behind it did not change."


def _groups(evidence: Document, kind: str) -> Iterator[str]:
    names = ", ".join(name or "no task group" for name in evidence["groups"])
    label = "Task groups that grew" if kind == CauseKind.WORKLOAD_CHANGED else "Task groups"
    yield f"{label}: {names}." if names else ""


def _now_and_before(name: str, label: str, figure: Callable[[Any], str] = percent) -> _Sentence:
    def text(evidence: Document, kind: str) -> Iterator[str]:
        now, before = evidence[name], evidence.get(f"baseline_{name}")
        words = _GAPS.get(kind, label) if name == "gap_ratio" else label
        if now is not None:
            yield f"{words}: {figure(now)}{'' if before is None else f', {figure(before)} before'}."

    return (name, f"baseline_{name}"), text


_GAPS: dict[str, str] = {CauseKind.CAPACITY: "Evicted before it was used again"}
_Text = Callable[[Document, str], Iterator[str]]
_Sentence = tuple[tuple[str, ...], _Text]
_REVISION = ("policy", "revision", "strategy", "author", "reason", "other_revisions_ratio", "normal_before_drop")
_PROMPTS = ("new_ratio", "keeps_changing", "kind", "segment", "offset_tokens", "stable_tokens")
_SENTENCES: tuple[_Sentence, ...] = (
    (("explained_tokens", "lost_tokens", "explained_ratio"), _explained),
    (_REVISION, _revision),
    (("replicas", "hit_rates"), _replicas),
    (("share_ratio",), _share),
    (("groups",), _groups),
    (_PROMPTS, _prompts),
    _now_and_before("reachable_ratio", "Reachable hit rate"),
    _now_and_before("gap_ratio", "Predicted as cached and not found"),
    _now_and_before("kv_usage_ratio", "KV cache used by running requests"),
    _now_and_before("overflow_ratio", "Requests that overflowed"),
    _now_and_before("requests_per_s", "Requests per second", lambda value: f"{value:.2g}"),
    (
        ("others_baseline_ratio",),
        lambda it, _: iter([f"Hit rate of the others before: {percent(it['others_baseline_ratio'])}."]),
    ),
    (("events",), lambda it, _: iter(it["events"])),
)
