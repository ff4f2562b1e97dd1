from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("telemetry", "0012_rollups"),
    ]

    operations = [
        migrations.AddField(
            model_name="scrapeshard",
            name="refused_since",
            field=models.DateTimeField(null=True),
        ),
    ]
