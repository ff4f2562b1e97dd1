"""The control plane as a Django application."""

from importlib import import_module

from django.apps import AppConfig


class ControlPlaneConfig(AppConfig):
    """Fleet, task groups, policies, revisions, rollouts, and who changed what."""

    name = "controlplane"
    verbose_name = "Control plane"

    def ready(self) -> None:
        """Listen to those who sign in."""
        import_module("controlplane.signals")
