"""Telemetry as a Django application."""

from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    """Readings, rates, dashboards and alerts."""

    name = "telemetry"
    verbose_name = "Telemetry"
