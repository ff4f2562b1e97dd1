"""Whether a replica's counters, its answers and the routers' predictions tell of the same hit rate (H17)."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.models import Replica
from telemetry.metrics.reconciling import AnswerSide, Comparison, EngineSide, compare
from telemetry.metrics.windows import Window
from telemetry.services.figures.engine_notes import EngineNotes, engine_notes
from telemetry.services.figures.overview import Pools, names_of, replicas_of
from telemetry.storage.answers import answers_by_replica
from telemetry.storage.sums import EngineSums, engine_sums


@dataclass(frozen=True, slots=True)
class Reconciled:
    """One replica's three ratios over a window, and what comes of holding them against each other."""

    pool: str
    replica: str
    engine: EngineSide
    answers: AnswerSide
    comparison: Comparison
    notes: EngineNotes


LONGEST_S = 86_400.0  # it is read from the readings themselves


def newest_part(window: Window) -> Window:
    """What of a window can be reconciled: its last day."""
    return Window.last(min(window.length_s, LONGEST_S), until=window.end, step_s=window.step_s)


def reconcile(pools: Pools, window: Window, *, only: Replica | None = None) -> list[Reconciled]:
    """Each replica of some pools, or of all, by pool and name; or one, which is of these. 5 queries at most."""
    replicas = replicas_of(pools) if only is None else [only]
    ids = [replica.pk for replica in replicas]
    counted = {row.replica_id: row for row in engine_sums(ids, window, whole=True)}
    answered = answers_by_replica(names_of(pools), window)
    notes = engine_notes(replicas, window)
    rows = []
    for replica in replicas:
        of_replica = notes[replica.pk]
        engine = _engine_side(counted.get(replica.pk), decodes=of_replica.decodes)
        answers = answered.get((replica.pool.name, replica.name), AnswerSide())
        compared = compare(engine, answers)
        rows.append(Reconciled(replica.pool.name, replica.name, engine, answers, compared, of_replica))
    return rows


def _engine_side(row: EngineSums | None, *, decodes: bool) -> EngineSide:
    if row is None:
        return EngineSide(decodes=decodes)
    return EngineSide(
        queries=row.queries,
        hits=row.hits,
        external_hits=row.external_hits,
        requests=row.requests,
        prompt_tokens=row.admitted_tokens,
        reports=not row.not_reported,
        decodes=decodes,
    )
