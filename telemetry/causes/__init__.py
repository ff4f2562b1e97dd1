"""Why a hit rate fell: a file for each cause, which judges it from what was seen, and their ranking. Pure."""

from telemetry.causes.cause import Cause, CauseKind
from telemetry.causes.evidence import Evidence
from telemetry.causes.ranking import rank

__all__ = ["Cause", "CauseKind", "Evidence", "rank"]
