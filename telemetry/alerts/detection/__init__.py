"""Detection of hit-rate drops relative to the level since the last change. Pure: bins in, state out."""

from telemetry.alerts.detection.bins import Bin, GroupBin
from telemetry.alerts.detection.detector import Detection, Detector, GroupShortfall, Sensitivity, State

__all__ = ["Bin", "Detection", "Detector", "GroupBin", "GroupShortfall", "Sensitivity", "State"]
