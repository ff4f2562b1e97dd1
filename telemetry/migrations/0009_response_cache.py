"""Counters of response caches, in readings and their rollups."""

from django.db import migrations, models

COUNTERS = ("cache_hits", "cache_misses", "cache_bypasses", "cache_prompt_tokens", "cache_generated_tokens")
ROLLUPS = tuple(f"telemetry_routerreading_{suffix}" for suffix in ("1m", "5m", "1h", "6h"))


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0008_pool_loads")]

    operations = [
        *(
            migrations.AddField("routerreading", name, models.BigIntegerField(null=True))
            for name in (*COUNTERS, "cache_store_errors")
        ),
        migrations.AddField("routerreading", "cache_store_up", models.FloatField(null=True)),
        migrations.RunSQL(
            "".join(f"alter table {table} add column {name} bigint;" for table in ROLLUPS for name in COUNTERS),
            "".join(f"alter table {table} drop column {name};" for table in ROLLUPS for name in COUNTERS),
            hints={"brief": "nullable columns without a default, which change no row"},
        ),
    ]
