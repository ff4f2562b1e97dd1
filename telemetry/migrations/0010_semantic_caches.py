from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('telemetry', '0009_response_cache'),
    ]

    operations = [
        migrations.AddField(
            model_name='scrapestate',
            name='semantic_caches',
            field=models.JSONField(null=True),
        ),
    ]
