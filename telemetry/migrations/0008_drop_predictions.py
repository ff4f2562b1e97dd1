"""Predictions are no longer stored. The table remains for the previous release, without its foreign keys: nothing
deletes its rows with what they refer to.
"""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("controlplane", "0007_pool_keep_alive_s"),
        ("telemetry", "0007_decision_continued_after"),
    ]

    operations = [
        migrations.AlterField(
            "prediction",
            "rollout",
            models.OneToOneField(
                "controlplane.rollout", models.CASCADE, related_name="prediction", db_constraint=False
            ),
        ),
        migrations.AlterField(
            "prediction",
            "what_if",
            models.ForeignKey("telemetry.whatif", models.SET_NULL, null=True, related_name="+", db_constraint=False),
        ),
        migrations.SeparateDatabaseAndState(state_operations=[migrations.DeleteModel("Prediction")]),
    ]
