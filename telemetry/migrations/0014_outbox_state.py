"""What pages show of the outbox is stored by the delivery run that read it."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0013_notified_causes")]

    operations = [
        migrations.CreateModel(
            name="OutboxState",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("read_at", models.DateTimeField()),
                ("due_since", models.DateTimeField(null=True)),
            ],
        )
    ]
