"""What engines report beyond the common figures: queue and prefill time, waiting by reason, prompt tokens by source."""

from django.db import migrations, models

from controlplane.database.operations import AddFieldOnce

COUNTERS = (
    *("computed_prompt_tokens", "cached_prompt_tokens", "transferred_prompt_tokens"),
    *("mm_cache_queries", "mm_cache_hits"),
    *("queue_ms", "queue_count", "prefill_ms", "prefill_count"),
    *("block_lifetime_ms", "block_lifetime_count", "block_idle_ms", "block_idle_count"),
    *("block_reuse_gap_ms", "block_reuse_gap_count"),
)
GAUGES = ("waiting_capacity", "waiting_deferred")
ROLLUPS = tuple(f"telemetry_reading_{suffix}" for suffix in ("1m", "5m", "1h", "6h"))
PARTS = {"sum": "double precision", "n": "integer", "min": "double precision", "max": "double precision"}
COLUMNS = {name: "bigint" for name in COUNTERS} | {
    f"{gauge}_{part}": sql_type for gauge in GAUGES for part, sql_type in PARTS.items()
}


def alter(table: str, action: str) -> str:
    """One statement a table, for all columns: nullable ones without a default need no rewrite."""
    return f"alter table {table} {action}"


ADD = ", ".join(f"add column if not exists {name} {sql_type}" for name, sql_type in COLUMNS.items())
DROP = ", ".join(f"drop column if exists {name}" for name in COLUMNS)


class Migration(migrations.Migration):
    atomic = False  # each table is changed by itself, beside writers; each step may come again

    dependencies = [
        ("telemetry", "0025_default_rules"),
    ]

    operations = [
        *(AddFieldOnce("reading", name, models.BigIntegerField(null=True)) for name in COUNTERS),
        *(AddFieldOnce("reading", name, models.FloatField(null=True)) for name in GAUGES),
        migrations.RunSQL(
            [alter(table, ADD) for table in ROLLUPS],
            [alter(table, DROP) for table in ROLLUPS],
            hints={"brief": "columns that may be null, without a default"},
        ),
    ]
