"""Whether a replica's counters, its answers and the routers' predictions tell of the same hit rate (H17)."""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.metrics.reconciling import AnswerSide, Comparison, EngineSide, compare
from telemetry.metrics.windows import Window
from telemetry.services.engine_notes import EngineNotes, engine_notes
from telemetry.services.overview import Pools, names_of, replicas_of
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


def reconcile(pools: Pools, window: Window) -> list[Reconciled]:
    """Each replica of some pools, or of all, by pool and name. 5 queries."""
    replicas = replicas_of(pools)
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
