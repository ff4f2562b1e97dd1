from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('telemetry', '0007_kv_streams'),
    ]

    operations = [
        migrations.AddField(
            model_name='scrapestate',
            name='pool_loads',
            field=models.JSONField(null=True),
        ),
    ]
