"""Configuration of the Django application."""

from importlib import import_module

from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    name = "telemetry"
    verbose_name = "Telemetry"

    def ready(self) -> None:
        import_module("telemetry.signals")
