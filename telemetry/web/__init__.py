"""Pages of telemetry. Every figure comes from ``telemetry.services``; pages compute none."""
