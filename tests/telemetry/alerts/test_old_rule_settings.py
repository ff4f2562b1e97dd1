"""Rules that were stored for the drop detector of before: each setting that is left is one that a rule can have."""

from importlib import import_module

import pytest
from django.apps import apps

from telemetry.alerts.kinds import KINDS
from telemetry.models import AlertRule

pytestmark = pytest.mark.django_db
convert = import_module("telemetry.migrations.0023_drop_rule_settings").convert


@pytest.mark.parametrize(
    ("stored", "converted"),
    [
        ({}, {}),
        ({"window_s": 30}, {}),
        ({"window_s": 60, "days": 0, "drop_points": 15}, {"days": 0, "drop_points": 15}),
        ({"baseline_s": 60}, {"baseline_s": 300}),
        ({"baseline_s": 86_400, "for_s": 10}, {"baseline_s": 14_400, "for_s": 10}),
    ],
)
def test_stored_settings_become_those_of_now(pool, stored, converted):
    rules = AlertRule.objects.filter(pool=pool, kind="hit_rate_drop")
    rules.update(settings=stored)
    others = list(AlertRule.objects.exclude(kind="hit_rate_drop").values("pk", "settings"))

    convert(apps, None)

    assert rules.get().settings == converted
    KINDS["hit_rate_drop"].read(converted)
    assert list(AlertRule.objects.exclude(kind="hit_rate_drop").values("pk", "settings")) == others
