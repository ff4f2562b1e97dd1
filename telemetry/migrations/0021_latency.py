"""Latency of whole responses, streamed and plain, as routers observe it, and which of the two a decision's was."""

from typing import Any

import django.contrib.postgres.fields
import django.db.models.deletion
from django.db import migrations, models

from controlplane.database.operations import AddFieldOnce


def histogram(name: str) -> dict[str, Any]:
    """The columns of one histogram."""
    layout: Any = models.ForeignKey(
        db_constraint=False,
        db_index=False,
        null=True,
        on_delete=django.db.models.deletion.DO_NOTHING,
        related_name="+",
        to="telemetry.bucketlayout",
    )
    positions: Any = models.SmallIntegerField()
    counts: Any = models.BigIntegerField()
    return {
        f"{name}_layout": layout,
        f"{name}_at": django.contrib.postgres.fields.ArrayField(base_field=positions, null=True, size=None),
        f"{name}_counts": django.contrib.postgres.fields.ArrayField(base_field=counts, null=True, size=None),
        f"{name}_sum_s": models.FloatField(null=True),
    }


COLUMNS = {
    "routerreading": histogram("streamed_latency") | histogram("plain_latency"),
    "decision": {"streamed": models.BooleanField(null=True), "latency_s": models.FloatField(null=True)},
}


class Migration(migrations.Migration):
    atomic = False  # each column is added by itself, beside writers; each step may come again

    dependencies = [
        ("telemetry", "0020_short_links"),
    ]

    operations = [
        AddFieldOnce(model_name=model, name=name, field=field)
        for model, columns in COLUMNS.items()
        for name, field in columns.items()
    ]
