"""When a source was last told to look elsewhere: API keys that were given before that stay where they are."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("controlplane", "0021_worker_liveness")]

    operations = [
        migrations.AddField(
            model_name="replicasource", name="settings_changed_at", field=models.DateTimeField(blank=True, null=True)
        ),
    ]
