"""What stands in quotes is now meant to the letter; in conditions of before a quote was a letter itself."""

from typing import Any

from django.db import migrations


def quote(apps: Any, _: Any) -> None:
    """Conditions of channels; silences kept parts, which are read as they are until the last of them has ended."""
    for channel in apps.get_model("telemetry.Channel").objects.all():
        written = [_with_quotes(one) for one in channel.matchers]
        if written != channel.matchers:
            channel.matchers = written
            channel.save(update_fields=["matchers"])


def _with_quotes(one: str) -> str:
    label, _, values = one.partition("=")
    return label + "=" + ",".join(_quoted(value) if '"' in value else value for value in values.split(","))


def _quoted(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


class Migration(migrations.Migration):

    dependencies = [
        ('telemetry', '0017_heartbeat'),
    ]

    operations = [
        migrations.RunPython(quote, migrations.RunPython.noop, elidable=True, hints={'brief': 'there are few channels'}),
    ]
