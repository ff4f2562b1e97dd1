import django.contrib.postgres.fields
import django.db.models.deletion
import django.db.models.functions.datetime
import uuid
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True

    dependencies = [
        ('controlplane', '0002_guards'),
    ]

    operations = [
        migrations.CreateModel(
            name='BucketLayout',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('edges', django.contrib.postgres.fields.ArrayField(base_field=models.FloatField(), size=None)),
                ('digest', models.CharField(max_length=64, unique=True)),
            ],
        ),
        migrations.CreateModel(
            name='Channel',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100, unique=True)),
                ('kind', models.CharField(max_length=32)),
                ('sealed', models.BinaryField()),
                ('enabled', models.BooleanField(default=True)),
                ('disabled_reason', models.CharField(blank=True, max_length=200)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now(), editable=False)),
            ],
            options={
                'ordering': ('name',),
            },
        ),
        migrations.CreateModel(
            name='AlertRule',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100)),
                ('kind', models.CharField(choices=[('hit_rate_drop', 'Hit rate drop')], default='hit_rate_drop', max_length=32)),
                ('settings', models.JSONField(default=dict)),
                ('enabled', models.BooleanField(default=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('updated_at', models.DateTimeField(auto_now=True)),
                ('evaluated_at', models.DateTimeField(editable=False, null=True)),
                ('verdict', models.JSONField(default=dict, editable=False)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='alert_rules', to='controlplane.pool')),
            ],
            options={
                'ordering': ('pool__name', 'name'),
            },
        ),
        migrations.CreateModel(
            name='Alert',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('state', models.CharField(choices=[('pending', 'Pending'), ('firing', 'Firing'), ('resolved', 'Resolved')], default='pending', max_length=8)),
                ('started_at', models.DateTimeField()),
                ('last_breach_at', models.DateTimeField()),
                ('fired_at', models.DateTimeField(null=True)),
                ('resolved_at', models.DateTimeField(null=True)),
                ('value_ratio', models.FloatField(null=True)),
                ('baseline_ratio', models.FloatField(null=True)),
                ('ceiling_ratio', models.FloatField(null=True)),
                ('summary', models.CharField(blank=True, max_length=300)),
                ('detail', models.JSONField(default=dict)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='alerts', to='controlplane.pool')),
                ('rule', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='alerts', to='telemetry.alertrule')),
            ],
            options={
                'ordering': ('-started_at', '-pk'),
            },
        ),
        migrations.CreateModel(
            name='Notification',
            fields=[
                ('id', models.UUIDField(default=uuid.uuid4, editable=False, primary_key=True, serialize=False)),
                ('kind', models.CharField(choices=[('firing', 'Firing'), ('resolved', 'Resolved'), ('test', 'Test')], max_length=8)),
                ('payload', models.JSONField()),
                ('state', models.CharField(choices=[('pending', 'Pending'), ('delivered', 'Delivered'), ('failed', 'Failed')], default='pending', max_length=9)),
                ('attempts', models.PositiveIntegerField(default=0)),
                ('next_at', models.DateTimeField()),
                ('leased_until', models.DateTimeField(null=True)),
                ('created_at', models.DateTimeField()),
                ('finished_at', models.DateTimeField(null=True)),
                ('alert', models.ForeignKey(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='notifications', to='telemetry.alert')),
                ('channel', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='notifications', to='telemetry.channel')),
            ],
            options={
                'ordering': ('-created_at', '-id'),
            },
        ),
        migrations.CreateModel(
            name='DeliveryAttempt',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveIntegerField()),
                ('started_at', models.DateTimeField()),
                ('duration_s', models.FloatField(null=True)),
                ('status', models.PositiveSmallIntegerField(null=True)),
                ('error', models.CharField(blank=True, max_length=200)),
                ('notification', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='log', to='telemetry.notification')),
            ],
            options={
                'ordering': ('-started_at', '-pk'),
            },
        ),
        migrations.CreateModel(
            name='ScrapeState',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('ok_at', models.DateTimeField(null=True)),
                ('health', models.CharField(choices=[('unknown', 'Unknown'), ('up', 'Up'), ('down', 'Down')], default='unknown', max_length=8)),
                ('failures', models.PositiveIntegerField(default=0)),
                ('reason', models.CharField(blank=True, max_length=200)),
                ('restarted_at', models.DateTimeField(null=True)),
                ('asleep', models.BooleanField(default=False)),
                ('lag_s', models.FloatField(null=True)),
                ('marks', models.JSONField(default=dict)),
                ('replica', models.OneToOneField(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='scrape_state', to='controlplane.replica')),
                ('router', models.OneToOneField(null=True, on_delete=django.db.models.deletion.CASCADE, related_name='scrape_state', to='controlplane.router')),
            ],
        ),
        migrations.AddConstraint(
            model_name='alertrule',
            constraint=models.UniqueConstraint(fields=('pool', 'name'), name='alert_rule_name_unique'),
        ),
        migrations.AddIndex(
            model_name='alert',
            index=models.Index(fields=['-started_at', '-id'], name='alert_started_at'),
        ),
        migrations.AddConstraint(
            model_name='alert',
            constraint=models.UniqueConstraint(condition=models.Q(('state__in', ('pending', 'firing'))), fields=('rule', 'pool'), name='alert_one_open'),
        ),
        migrations.AddIndex(
            model_name='notification',
            index=models.Index(condition=models.Q(('state', 'pending')), fields=['next_at'], name='notification_due'),
        ),
        migrations.AddIndex(
            model_name='notification',
            index=models.Index(fields=['-created_at', '-id'], name='notification_created_at'),
        ),
        migrations.AddConstraint(
            model_name='notification',
            constraint=models.UniqueConstraint(fields=('alert', 'channel', 'kind'), name='notification_once'),
        ),
        migrations.AddConstraint(
            model_name='deliveryattempt',
            constraint=models.UniqueConstraint(fields=('notification', 'number'), name='attempt_number_unique'),
        ),
        migrations.AddConstraint(
            model_name='scrapestate',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('replica', None), ('router__isnull', False)), models.Q(('replica__isnull', False), ('router', None)), _connector='OR'), name='scrape_state_one_target'),
        ),
    ]
