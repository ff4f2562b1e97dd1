"""Rules of the kind hit_rate_drop: settings that the detector of changes no longer has are taken out."""

from typing import Any

from django.db import migrations

GONE = ("window_s",)
LEAST, MOST = 300, 14_400  # seconds that baseline_s may be


def convert(apps: Any, schema_editor: Any) -> None:
    rules = apps.get_model("telemetry", "AlertRule")
    for rule in rules.objects.filter(kind="hit_rate_drop").exclude(settings={}).iterator():
        rule.settings = {name: value for name, value in rule.settings.items() if name not in GONE}
        if "baseline_s" in rule.settings:
            rule.settings["baseline_s"] = min(max(rule.settings["baseline_s"], LEAST), MOST)
        rule.save(update_fields=["settings"])


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0022_usage_without_details")]
    operations = [migrations.RunPython(convert, migrations.RunPython.noop, hints={"brief": "a pool has few such rules"})]
