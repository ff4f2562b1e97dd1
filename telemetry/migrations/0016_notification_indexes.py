"""One message for each alert, channel, kind and repetition, and the ways to what is pending: built beside writers."""

from django.db import migrations, models

from controlplane.database.operations import BuildIndex, BuildUnique

PENDING = models.Q(("state", "pending"))


class Migration(migrations.Migration):
    atomic = False

    dependencies = [("telemetry", "0015_channel_routing")]

    operations = [
        BuildUnique(
            "notification",
            models.UniqueConstraint(fields=("alert", "channel", "kind", "sequence"), name="notification_once"),
        ),
        BuildIndex(
            "notification",
            models.Index(condition=PENDING, fields=["channel", "number"], name="notification_pending"),
        ),
        BuildIndex("notification", models.Index(fields=["-number"], name="notification_number")),
    ]
