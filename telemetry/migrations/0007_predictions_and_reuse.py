"""What routers predicted, what they placed away from home for load, TTFT by reuse, and what engines do not report."""

import django.contrib.postgres.fields
from django.db import migrations, models

from controlplane.database.operations import AddFieldOnce
from telemetry.storage.partitions import ReplaceKey

KEY = ("at", "router_id", "pool", "group", "replica", "policy", "revision")
COUNTS = (
    "spilled_requests",
    "predicted_answers",
    "predicted_prompt_tokens",
    "predicted_tokens",
    "predicted_cached_tokens",
)


class Migration(migrations.Migration):
    atomic = False  # the indexes of the new key are built beside writers; each step may come again

    dependencies = [
        ("telemetry", "0006_alert_uniques"),
    ]

    operations = [
        AddFieldOnce(
            model_name="reading",
            name="not_reported",
            field=django.contrib.postgres.fields.ArrayField(base_field=models.TextField(), null=True, size=None),
        ),
        *(
            AddFieldOnce(
                model_name="routerreading",
                name=name,
                field=models.BigIntegerField(null=True),
            )
            for name in COUNTS
        ),
        AddFieldOnce(
            model_name="routerreading",
            name="reuse",
            field=models.TextField(db_default=""),
        ),
        ReplaceKey("routerreading", before=KEY, after=(*KEY, "reuse")),
    ]
