"""The time of the last evaluation is one row, so that an evaluation does not rewrite every rule."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0019_engine_probes")]

    operations = [
        migrations.CreateModel(
            name="EvaluationState",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("at", models.DateTimeField()),
            ],
        )
    ]
