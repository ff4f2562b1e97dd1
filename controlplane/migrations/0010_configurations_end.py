"""A configuration snapshot still never changes, but may be deleted after its retention."""

from django.db import migrations

TRIGGER = """
drop trigger snapshot_frozen on controlplane_configsnapshot;
create trigger snapshot_frozen before update on controlplane_configsnapshot
    for each row execute function controlplane_guard_snapshot();
"""


class Migration(migrations.Migration):
    dependencies = [("controlplane", "0009_revision_fault")]

    operations = [
        migrations.RunSQL(TRIGGER, hints={"brief": "replaces a trigger; its lock is held for an instant, no row is read"})
    ]
