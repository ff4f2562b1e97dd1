"""One replica: what its engine's ranks count, and how scraping it goes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone

from controlplane.models import Replica
from telemetry.metrics.rates import hit_rate_ratio, ratio
from telemetry.metrics.windows import PointState, Window
from telemetry.models import Reading, ScrapeState
from telemetry.services.figures.health import HealthWord, health_of
from telemetry.storage.additions import Added, engine_additions

COUNTED = ("queries", "hits", "external_hits", "preemptions", "finished", "prompt_tokens", "generation_tokens")


@dataclass(frozen=True, slots=True)
class RankRow:
    """One data-parallel rank of an engine over a window, with its newest gauges (H15)."""

    model: str
    engine: str
    hit_rate_ratio: float | None
    hit_rate_state: PointState
    requests_per_s: float | None
    prompt_tokens_per_s: float | None
    generation_tokens_per_s: float | None
    preemptions: int | None
    running: float | None
    waiting: float | None
    kv_usage_ratio: float | None


@dataclass(frozen=True, slots=True)
class Scraping:
    """How reading a replica goes."""

    health: HealthWord
    read_at: datetime | None = None  # the newest scrape that succeeded
    restarted_at: datetime | None = None
    lag_s: float | None = None  # how long the last scrape took
    failures: int = 0  # in a row
    lora_adapters: list[str] | None = None  # with requests at the last scrape; None: unknown


def scraping_of(replica: Replica) -> Scraping:
    """One query."""
    state = ScrapeState.objects.filter(replica=replica).defer("marks").first()
    health = health_of(state, timezone.now(), added_at=replica.created_at)
    if state is None:
        return Scraping(health)
    return Scraping(health, state.ok_at, state.restarted_at, state.lag_s, state.failures, state.lora_adapters)


def rank_rows(replica: Replica, window: Window) -> list[RankRow]:
    """A row for each rank that was read in a window, by model and rank. Three queries."""
    newest = _newest(replica, window)
    return [_rank(row, newest.get(row.key)) for row in engine_additions(replica.pk, window, COUNTED, whole=True)]


def _rank(row: Added, gauges: Reading | None) -> RankRow:
    queries = row.get("queries")
    state = PointState.UNKNOWN if queries is None else PointState.OK if queries else PointState.NO_TRAFFIC
    return RankRow(
        model=row.key[0],
        engine=row.key[1],
        hit_rate_ratio=hit_rate_ratio(queries, row.get("hits"), row.get("external_hits")),
        hit_rate_state=state,
        requests_per_s=ratio(row.get("finished"), row.covered_s),
        prompt_tokens_per_s=ratio(row.get("prompt_tokens"), row.covered_s),
        generation_tokens_per_s=ratio(row.get("generation_tokens"), row.covered_s),
        preemptions=row.get("preemptions"),
        running=gauges.running if gauges else None,
        waiting=gauges.waiting if gauges else None,
        kv_usage_ratio=gauges.kv_usage_ratio if gauges else None,
    )


def _newest(replica: Replica, window: Window) -> dict[tuple[str, ...], Reading]:
    """The newest reading of each rank; none after a scrape that failed (H12)."""
    readings = Reading.objects.filter(replica=replica, at__gt=window.start, at__lte=window.end)
    last = readings.order_by("-at").values_list("at", flat=True).first()
    return {(one.model, one.engine): one for one in readings.filter(at=last) if one.state != "stale"} if last else {}
