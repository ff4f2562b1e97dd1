"""The control plane as a Django application."""

from django.apps import AppConfig


class ControlPlaneConfig(AppConfig):
    """Fleet, task groups, policies, revisions, rollouts, and who changed what."""

    name = "controlplane"
    verbose_name = "Control plane"
