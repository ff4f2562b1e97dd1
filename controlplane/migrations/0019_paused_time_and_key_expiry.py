"""Pauses that a stage's clock leaves out, and when a client key ends."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("controlplane", "0018_router_signature")]

    operations = [
        migrations.AddField(
            model_name="rollout", name="paused_at", field=models.DateTimeField(blank=True, null=True)
        ),
        migrations.AddField(
            model_name="rollout", name="stage_paused_s", field=models.FloatField(default=0.0, db_default=0.0)
        ),
        migrations.AddField(
            model_name="clientkey", name="expires_at", field=models.DateTimeField(blank=True, null=True)
        ),
    ]
