"""What must be known of a replica's engine before its figures are believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.models import Replica
from telemetry.metrics.engines.names import OURS
from telemetry.metrics.engines.vllm import may_count_twice
from telemetry.metrics.windows import Window
from telemetry.models import ScrapeState
from telemetry.storage.roles import is_decode
from telemetry.storage.sums import rows_of

MAY_BE_SKEWED = (
    "{} counts a request once for each time its scheduling is tried, so its hit rate may be skewed, either way, under"
    " memory pressure or with KV connectors. Releases from 0.33 on count it once."
)
DECODES = "A decode replica: its cache is filled by transfer, so its own hit rate is near 100 % whatever was reused."
LATE = "{} counts requests when they end, where vLLM counts them when they are admitted."
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}


@dataclass(frozen=True, slots=True)
class EngineNotes:
    """One replica's engine."""

    engine: str = ""  # "vLLM", "SGLang", "TensorRT-LLM"; "" while unknown
    version: str = ""  # "" while unknown
    not_reported: tuple[str, ...] = ()  # names of figures that its newest reading says it does not have
    notes: tuple[str, ...] = ()  # sentences (H13, H19)
    decodes: bool = False

    def reports(self, *figures: str) -> bool:
        """Whether it has all of some figures, by the names of ``Reading``'s columns, "ttft" and "itl"."""
        if unknown := set(figures) - OURS:
            raise ValueError(f"no figures of a reading: {', '.join(sorted(unknown))}")
        return not set(figures) & set(self.not_reported)


def engine_notes(replicas: Sequence[Replica], window: Window) -> dict[int, EngineNotes]:
    """Of each replica, by id, as of the end of a window. 2 queries."""
    ids = [replica.pk for replica in replicas]
    states = {state.replica_id: state for state in ScrapeState.objects.filter(replica_id__in=ids).defer("marks")}
    missing = _not_reported(ids, window)
    return {replica.pk: _notes(replica, states.get(replica.pk), missing.get(replica.pk, ())) for replica in replicas}


def _not_reported(replica_ids: Sequence[int], window: Window) -> dict[int, tuple[str, ...]]:
    """Of each replica's newest scrape of the window that succeeded: what none of its engines has."""
    rows = rows_of(
        """
        with newest as (
            select distinct on (replica_id) replica_id, at from telemetry_reading
            where at > %(start)s and at <= %(end)s and replica_id = any(%(ids)s::bigint[]) and not_reported is not null
            order by replica_id, at desc
        )
        select r.replica_id, r.not_reported from telemetry_reading r join newest n
            on r.replica_id = n.replica_id and r.at = n.at
        where r.at > %(start)s and r.at <= %(end)s and r.not_reported is not null
        """,
        {"start": window.start, "end": window.end, "ids": list(replica_ids)},
    )
    found: dict[int, set[str]] = {}
    for pk, names in rows:
        found[pk] = found.get(pk, set(names)) & set(names)
    return {pk: tuple(sorted(names)) for pk, names in found.items()}


def _notes(replica: Replica, state: ScrapeState | None, not_reported: tuple[str, ...]) -> EngineNotes:
    engine, version = (state.engine, state.version) if state else ("", "")
    title = TITLES.get(engine, "")
    decodes = is_decode(replica, state.role if state else "")
    sentences = [DECODES] if decodes else []
    if engine == "vllm" and may_count_twice(version, not_reported):
        sentences.append(MAY_BE_SKEWED.format(f"vLLM {version}" if version else "This release of vLLM"))
    elif title and engine != "vllm":
        sentences.append(LATE.format(title))
    return EngineNotes(title, version, not_reported, tuple(sentences), decodes)
