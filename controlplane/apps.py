"""The control plane as a Django application."""

from importlib import import_module

from django.apps import AppConfig


class ControlPlaneConfig(AppConfig):
    name = "controlplane"
    verbose_name = "Control plane"

    def ready(self) -> None:
        """Register the signal receivers for sign-ins."""
        import_module("controlplane.accounts.sessions")
