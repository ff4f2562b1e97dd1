"""One open alert for each subject of a rule: built beside writers."""

from django.db import migrations, models

from controlplane.database.operations import BuildUnique


class Migration(migrations.Migration):

    atomic = False

    dependencies = [
        ("telemetry", "0005_alert_life"),
    ]

    operations = [
        BuildUnique(
            model_name='alert',
            constraint=models.UniqueConstraint(condition=models.Q(('state__in', ('pending', 'firing'))), fields=('rule', 'pool', 'subject'), name='alert_one_open_subject'),
        ),
        migrations.RemoveConstraint(
            model_name='alert',
            name='alert_one_open',
        ),
    ]
