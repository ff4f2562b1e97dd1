"""Whether telemetry itself keeps up, and what it tells of that."""
