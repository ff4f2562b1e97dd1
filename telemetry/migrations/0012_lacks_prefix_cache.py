from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('telemetry', '0011_request_digests'),
    ]

    operations = [
        migrations.AddField(
            model_name='scrapestate',
            name='lacks_prefix_cache',
            field=models.BooleanField(db_default=False, default=False),
        ),
    ]
