"""The hit-rate ladder, bin by bin, and what its replay needs to go on."""

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('controlplane', '0017_pool_warm_up'),
        ("telemetry", "0013_refused_readings"),
    ]

    operations = [
        migrations.CreateModel(
            name='CapacityCurve',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('since', models.DateTimeField(null=True)),
                ('requests', models.IntegerField(default=0)),
                ('sample_ratio', models.FloatField(default=1.0)),
                ('room_tokens', models.BigIntegerField(null=True)),
                ('replicas', models.IntegerField(default=0)),
                ('points', models.JSONField(default=list)),
                ('reason', models.CharField(blank=True, max_length=200)),
                ('pool', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='capacity_curve', to='controlplane.pool')),
            ],
        ),
        migrations.CreateModel(
            name='LadderBin',
            fields=[
                ('pk', models.CompositePrimaryKey('at', 'pool_id', 'group', blank=True, editable=False, primary_key=True, serialize=False)),
                ('at', models.DateTimeField()),
                ('group', models.TextField()),
                ('requests', models.IntegerField(default=0)),
                ('prompt_tokens', models.FloatField(default=0.0)),
                ('reachable', models.FloatField(default=0.0)),
                ('capacity', models.FloatField(default=0.0)),
                ('split', models.FloatField(default=0.0)),
                ('best', models.FloatField(default=0.0)),
                ('predicted', models.FloatField(default=0.0)),
                ('doubt', models.FloatField(default=0.0)),
                ('reported_requests', models.IntegerField(default=0)),
                ('reported_tokens', models.FloatField(default=0.0)),
                ('delivered', models.FloatField(default=0.0)),
                ('sample_ratio', models.FloatField()),
                ('reason', models.CharField(blank=True, max_length=200)),
                ('pool', models.ForeignKey(db_index=False, on_delete=django.db.models.deletion.CASCADE, related_name='+', to='controlplane.pool')),
            ],
        ),
        migrations.CreateModel(
            name='ReplayState',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('decisions', models.IntegerField(null=True)),
                ('state', models.BinaryField()),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='replay_states', to='controlplane.pool')),
            ],
            options={
                'ordering': ('at',),
                'constraints': [models.UniqueConstraint(fields=('pool', 'at'), name='replay_state_unique')],
            },
        ),
    ]
