"""A version of each row that users edit, which the database increases; not for columns that workers write."""

from importlib import import_module

from django.db import migrations

versions = import_module("controlplane.migrations.0012_versions").versions

UNVERSIONED = {
    "alertrule": ("evaluated_at", "verdict", "updated_at"),
    "channel": ("delivered_at", "failed_at", "error", "catches_up"),
    "heartbeat": ("due_at", "sent_at", "failed_at", "error", "withheld"),
    "metricsserver": ("asked_at", "error", "found", "missing"),
    "silence": (),
}


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0020_evaluation_state"), ("controlplane", "0012_versions")]

    operations = versions("telemetry", UNVERSIONED)
