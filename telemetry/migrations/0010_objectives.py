"""Counters of objectives for TTFT, in readings of routers and their rollups."""

from django.db import migrations, models

COLUMNS = ("objective_requests", "objective_kept")
SUFFIXES = ("1m", "5m", "1h", "6h")
ADD = "; ".join(
    f"alter table telemetry_routerreading_{suffix} add column {column} bigint"
    for suffix in SUFFIXES
    for column in COLUMNS
)


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0009_unread_columns")]

    operations = [
        *(
            migrations.AddField("routerreading", column, models.BigIntegerField(null=True))
            for column in COLUMNS
        ),
        migrations.RunSQL(ADD, hints={"brief": "nullable columns are added without reading the tables"}),
    ]
