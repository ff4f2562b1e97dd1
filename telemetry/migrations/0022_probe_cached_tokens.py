"""Warm-ups by routers are left out of engines' figures like probes, with the tokens that were cached."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0021_versions")]

    operations = [
        migrations.AddField("scrapestate", "probe_cached_tokens", models.PositiveIntegerField(db_default=0, default=0))
    ]
