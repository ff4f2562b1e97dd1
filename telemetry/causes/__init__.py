"""Why a hit rate fell: a function for each cause evaluates the evidence, and ``rank`` orders the results. Pure."""

from telemetry.causes.evidence import Cause, CauseKind, Evidence
from telemetry.causes.ranking import rank

__all__ = ["Cause", "CauseKind", "Evidence", "rank"]
