"""Columns that nothing reads are no longer written; they remain, empty, for the previous release."""

from django.db import migrations

UNREAD = {
    "reading": ("ttft_sum_s", "itl_layout", "itl_at", "itl_counts", "itl_sum_s"),
    "routerreading": ("ttft_sum_s", "streamed_latency_sum_s", "plain_latency_sum_s", "cache_store_errors"),
}


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0008_drop_predictions")]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[migrations.RemoveField(model, name) for model, names in UNREAD.items() for name in names]
        )
    ]
