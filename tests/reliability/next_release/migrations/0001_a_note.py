"""Columns for tables that are read and written all the time, and an index of one that has rows."""

from django.db import migrations


class Migration(migrations.Migration):
    atomic = False  # an index is built beside those who write

    operations = [
        migrations.RunSQL(
            "alter table controlplane_event add column if not exists next_note text",
            "alter table controlplane_event drop column next_note",
        ),
        migrations.RunSQL(
            "alter table telemetry_routerreading add column if not exists next_figure bigint",
            "alter table telemetry_routerreading drop column next_figure",
        ),
        migrations.RunSQL(
            "create index concurrently if not exists next_note_of_event on controlplane_event (next_note, summary)",
            "drop index concurrently next_note_of_event",
        ),
    ]
