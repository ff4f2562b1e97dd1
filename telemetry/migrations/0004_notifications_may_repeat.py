"""Messages may be repeated, tell of several alerts, and outlive their alert."""

from typing import Any

import django.contrib.postgres.fields
import django.db.models.deletion
from django.db import migrations, models

import telemetry.models.notification

ALERT: models.ForeignKey[Any, Any] = models.ForeignKey(
    null=True, on_delete=django.db.models.deletion.SET_NULL, related_name="notifications", to="telemetry.alert"
)
KINDS = [
    ("firing", "Firing"),
    ("repeated", "Still firing"),
    ("acknowledged", "Acknowledged"),
    ("resolved", "Resolved"),
    ("test", "Test"),
    ("notice", "Notice"),
]
SEQUENCE = "telemetry_notification_number"


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0003_reading_first_tokens")]

    operations = [
        migrations.RemoveConstraint("notification", "notification_once"),
        migrations.AddField(
            "notification",
            "alert_ids",
            django.contrib.postgres.fields.ArrayField(models.BigIntegerField(), default=list, db_default=models.Value([])),
        ),
        migrations.AddField("notification", "number", models.BigIntegerField(db_default=0, editable=False)),
        migrations.AddField("notification", "sequence", models.PositiveIntegerField(default=0, db_default=0)),
        migrations.AlterField("notification", "kind", models.CharField(choices=KINDS, max_length=12)),
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunSQL(
                    [
                        f"create sequence {SEQUENCE}",
                        f"alter table telemetry_notification alter column number set default nextval('{SEQUENCE}')",
                    ],
                    [
                        "alter table telemetry_notification alter column number set default 0",
                        f"drop sequence {SEQUENCE}",
                    ],
                    hints={"brief": "a default is written down, and no row is touched"},
                ),
            ],
            state_operations=[
                migrations.AlterField("notification", "alert", ALERT),  # what becomes of a row is decided by Django
                migrations.AlterField(
                    "notification",
                    "number",
                    models.BigIntegerField(db_default=telemetry.models.notification.NextNumber(), editable=False),
                ),
            ],
        ),
    ]
