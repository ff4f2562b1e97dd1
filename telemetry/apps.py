"""Telemetry as a Django application."""

from importlib import import_module

from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    """Readings, rates, dashboards and alerts."""

    name = "telemetry"
    verbose_name = "Telemetry"

    def ready(self) -> None:
        """Connect the signals."""
        import_module("telemetry.signals")
