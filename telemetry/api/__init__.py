"""The REST API of telemetry, below ``/api/v1/``."""
