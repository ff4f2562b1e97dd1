from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('telemetry', '0003_what_if'),
    ]

    operations = [
        migrations.AddField(
            model_name='capacitycurve',
            name='placements',
            field=models.JSONField(null=True),
        ),
        migrations.AddField(
            model_name='capacitycurve',
            name='working_set',
            field=models.JSONField(null=True),
        ),
    ]
