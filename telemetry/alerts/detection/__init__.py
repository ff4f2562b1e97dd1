"""Detection of hit-rate drops relative to the level since the last change. Pure: bins in, state out."""

from telemetry.alerts.detection.detector import Detector
from telemetry.alerts.detection.level import Bin, GroupBin
from telemetry.alerts.detection.result import Detection, GroupShortfall, Sensitivity, State

__all__ = ["Bin", "Detection", "Detector", "GroupBin", "GroupShortfall", "Sensitivity", "State"]
