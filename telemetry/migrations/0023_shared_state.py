"""What a router shares with others, at its last scrape; and the default rule on routers that do not see each other."""

from typing import Any

from django.db import migrations, models


def add_default_rule(apps: Any, _: Any) -> None:
    """Add the new default rule to the pools that exist."""
    rule = apps.get_model("telemetry", "AlertRule")
    pools = apps.get_model("controlplane", "Pool").objects.all()
    rows = [rule(pool=pool, name="Routers apart", kind="routers_apart", severity="warning") for pool in pools]
    rule.objects.bulk_create(rows, ignore_conflicts=True)


class Migration(migrations.Migration):

    dependencies = [
        ('telemetry', '0022_probe_cached_tokens'),
    ]

    operations = [
        migrations.AddField(
            model_name='scrapestate',
            name='shared_state',
            field=models.JSONField(null=True),
        ),
        migrations.AlterField(
            model_name='alertrule',
            name='kind',
            field=models.CharField(choices=[('hit_rate_drop', 'Hit rate drop'), ('hit_rate_floor', 'Hit rate floor'), ('prediction_gap', 'Prediction gap'), ('ttft_objective', 'TTFT objective'), ('error_ratio', 'Error ratio'), ('traffic_vanished', 'Traffic vanished'), ('replica_down', 'Replica down'), ('metrics_unreadable', 'Metrics unreadable'), ('replica_ejected', 'Replica ejected'), ('kv_pressure', 'KV pressure'), ('load_skew', 'Load skew'), ('cache_store_down', 'Response cache store down'), ('cache_share_drop', 'Response cache hit share drop'), ('semantic_cache_precision', 'Semantic cache precision'), ('router_lost', 'Router lost'), ('routers_apart', 'Routers apart'), ('rollout_stuck', 'Configuration not converged'), ('evaluator_lag', 'Telemetry behind'), ('no_data', 'No data')], default='hit_rate_drop', max_length=32),
        ),
        migrations.RunPython(
            add_default_rule,
            migrations.RunPython.noop,
            hints={"brief": "inserts one row for each pool; changes no row"},
        ),
    ]
