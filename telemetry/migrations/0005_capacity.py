"""What sizing a pool and a shared cache need: the fitted prefill rate, and lengths of lost prefixes."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("telemetry", "0004_worth")]

    operations = [
        migrations.AddField("capacitycurve", "prefill_rate", models.FloatField(null=True)),
        migrations.AddField("capacitycurve", "fitted_requests", models.IntegerField(db_default=0, default=0)),
        migrations.AddField("capacitycurve", "gaps", models.JSONField(null=True)),
    ]
