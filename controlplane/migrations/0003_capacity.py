"""What a pool's model takes per token, and what its replicas cost."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("controlplane", "0002_guards")]

    operations = [
        migrations.AddField("pool", "kv_cache", models.JSONField(blank=True, null=True)),
        migrations.AddField("pool", "costs", models.JSONField(blank=True, null=True)),
    ]
