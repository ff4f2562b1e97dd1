"""Replicas by traffic share are removed. The previous release still reads the columns, so they stay in the tables."""

from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("controlplane", "0013_audit_expires")]

    operations = [
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.RemoveConstraint("pool", "pool_share_half_life_range"),
                migrations.RemoveField("pool", "share_half_life"),
                migrations.RemoveField("taskgroup", "auto_replicas"),
            ]
        )
    ]
