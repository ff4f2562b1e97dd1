
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("telemetry", "0008_decisions"),
    ]

    operations = [
        migrations.CreateModel(
            name='ScrapeShard',
            fields=[
                ('number', models.PositiveSmallIntegerField(primary_key=True, serialize=False)),
                ('due_at', models.DateTimeField()),
                ('lag_s', models.FloatField()),
                ('took_s', models.FloatField(null=True)),
                ('targets', models.PositiveIntegerField(default=0)),
                ('failures', models.PositiveIntegerField(default=0)),
                ('missed', models.PositiveBigIntegerField(default=0)),
            ],
        ),
    ]
