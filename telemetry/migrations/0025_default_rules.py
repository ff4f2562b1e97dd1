"""Two kinds of rules, and for each pool without a rule of a kind the rule that new pools start with."""

from typing import Any

from django.conf import settings
from django.db import migrations, models


def add_default_rules(apps: Any, schema_editor: Any) -> None:
    """A pool that has any rule of a kind keeps what it has; later changes and deletions are the operator's."""
    behind_s = max(30.0, 3 * settings.SCRAPE_INTERVAL_S)
    added: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("TTFT objective", "ttft_objective", "warning", {"within_s": 5.0, "long_s": 900.0, "short_s": 300.0}),
        ("Error ratio", "error_ratio", "critical", {}),
        ("Replica ejected", "replica_ejected", "warning", {}),
        ("Load skew", "load_skew", "warning", {"min_waiting": 1.0}),
        ("KV pressure", "kv_pressure", "warning", {}),
        ("Configuration not converged", "rollout_stuck", "warning", {}),
        ("Telemetry behind", "evaluator_lag", "critical", {"behind_s": behind_s, "for_s": 10.0}),
    )
    rules = apps.get_model("telemetry", "AlertRule")
    for pool in apps.get_model("controlplane", "Pool").objects.all():
        known = rules.objects.filter(pool=pool)
        kinds, names = (set(known.values_list(column, flat=True)) for column in ("kind", "name"))
        rules.objects.bulk_create(
            rules(pool=pool, name=name, kind=kind, severity=severity, settings=limits)
            for name, kind, severity, limits in added
            if kind not in kinds and name not in names
        )


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0024_reachable_error"), ("controlplane", "0024_item_failures")]

    operations = [
        migrations.AlterField(
            model_name="alertrule",
            name="kind",
            field=models.CharField(
                choices=[
                    ("hit_rate_drop", "Hit rate drop"),
                    ("hit_rate_floor", "Hit rate floor"),
                    ("prediction_gap", "Prediction gap"),
                    ("ttft_objective", "TTFT objective"),
                    ("error_ratio", "Error ratio"),
                    ("replica_down", "Replica down"),
                    ("replica_ejected", "Replica ejected"),
                    ("kv_pressure", "KV pressure"),
                    ("load_skew", "Load skew"),
                    ("rollout_stuck", "Configuration not converged"),
                    ("evaluator_lag", "Telemetry behind"),
                    ("no_data", "No data"),
                ],
                default="hit_rate_drop",
                max_length=32,
            ),
        ),
        migrations.RunPython(
            add_default_rules, migrations.RunPython.noop, hints={"brief": "there are few pools: seven rows for each"}
        ),
    ]
