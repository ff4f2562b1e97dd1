"""Configuration of the Django application."""

from importlib import import_module

from django.apps import AppConfig


class TelemetryConfig(AppConfig):
    name = "telemetry"
    verbose_name = "Telemetry"

    def ready(self) -> None:
        """Register signal handlers, and the check of drafts before they are published."""
        import_module("telemetry.services.alerts.rules")
        publish_checks = import_module("controlplane.services.policies.publish_checks")
        publish_checks.register_check(import_module("telemetry.services.lab.publish_check").check_draft)
