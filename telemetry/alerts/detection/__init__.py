"""Detection of hit-rate drops relative to the level since the last change. Pure: bins in, state out."""

from telemetry.alerts.detection.detector import Detection, Detector, Sensitivity, State
from telemetry.alerts.detection.level import Bin, GroupBin

__all__ = ["Bin", "Detection", "Detector", "GroupBin", "Sensitivity", "State"]
