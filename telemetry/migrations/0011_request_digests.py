from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('telemetry', '0010_semantic_caches'),
    ]

    operations = [
        migrations.AddField(
            model_name='decision',
            name='request_digest',
            field=models.BigIntegerField(null=True),
        ),
        migrations.AddField(
            model_name='decision',
            name='digest_ratio',
            field=models.FloatField(null=True),
        ),
    ]
