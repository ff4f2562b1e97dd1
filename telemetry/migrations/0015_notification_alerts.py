"""Messages are found by any of their alerts."""

from django.contrib.postgres.indexes import GinIndex
from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations


class Migration(migrations.Migration):
    atomic = False
    dependencies = [("telemetry", "0014_outbox_state")]

    operations = [
        AddIndexConcurrently(
            "notification", GinIndex(fields=["alert_ids"], name="notification_alerts", fastupdate=False)
        )
    ]
