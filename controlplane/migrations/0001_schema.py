"""The tables of the models. Replaces the migrations of development, so a database that has them all is up to date."""

import controlplane.models.audit
import controlplane.models.fleet
import django.contrib.postgres.fields
import django.db.models.constraints
import django.db.models.deletion
import django.db.models.functions.comparison
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models


class Migration(migrations.Migration):

    initial = True
    replaces = [
        ('controlplane', '0001_initial'),
        ('controlplane', '0003_capacity'),
        ('controlplane', '0004_what_if_policy'),
        ('controlplane', '0005_kv_events'),
        ('controlplane', '0006_pool_requests'),
        ('controlplane', '0007_roles'),
        ('controlplane', '0008_adapter_replicas'),
        ('controlplane', '0009_revision_fault'),
        ('controlplane', '0010_configurations_end'),
        ('controlplane', '0011_allowed_origins'),
        ('controlplane', '0012_versions'),
        ('controlplane', '0013_audit_expires'),
        ('controlplane', '0014_no_auto_replicas'),
        ('controlplane', '0015_source_adoption'),
    ]

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.RunSQL('create sequence controlplane_version'),
        migrations.CreateModel(
            name='WorkerLiveness',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('seen_at', models.DateTimeField()),
            ],
        ),
        migrations.CreateModel(
            name='AuditCheck',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField()),
                ('entries', models.BigIntegerField()),
                ('digest', models.CharField(max_length=64)),
                ('fault', models.CharField(blank=True, max_length=500)),
            ],
            options={
                'ordering': ('-at', '-pk'),
                'indexes': [models.Index(fields=['-at'], name='audit_check_at')],
            },
        ),
        migrations.CreateModel(
            name='AuditEntry',
            fields=[
                ('number', models.BigIntegerField(primary_key=True, serialize=False)),
                ('at', models.DateTimeField()),
                ('kind', models.CharField(max_length=32)),
                ('actor', models.CharField(blank=True, max_length=150)),
                ('token', models.CharField(blank=True, max_length=16)),
                ('address', models.CharField(blank=True, max_length=45)),
                ('request_id', models.CharField(blank=True, max_length=64)),
                ('project', models.CharField(blank=True, max_length=30)),
                ('pool', models.CharField(blank=True, max_length=30)),
                ('summary', models.CharField(max_length=500)),
                ('reason', models.CharField(blank=True, max_length=500)),
                ('before', models.JSONField(null=True)),
                ('after', models.JSONField(null=True)),
                ('previous', models.CharField(max_length=64)),
                ('digest', models.CharField(max_length=64)),
            ],
            options={
                'ordering': ('-number',),
                'indexes': [models.Index(fields=['actor', '-number'], name='audit_actor'), models.Index(fields=['kind', '-number'], name='audit_kind')],
            },
        ),
        migrations.CreateModel(
            name='ConfigSnapshot',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('number', models.PositiveBigIntegerField(unique=True)),
                ('sha256', models.CharField(max_length=64)),
                ('document', models.JSONField()),
                ('encrypted', models.BinaryField()),
                ('reason', models.CharField(max_length=500)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('created_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('-number',),
            },
        ),
        migrations.CreateModel(
            name='FleetSecret',
            fields=[
                ('id', models.PositiveSmallIntegerField(default=1, primary_key=True, serialize=False)),
                ('encrypted', models.BinaryField()),
                ('created_at', models.DateTimeField(auto_now_add=True)),
            ],
            options={
                'constraints': [models.CheckConstraint(condition=models.Q(('id', 1)), name='fleet_secret_single_row')],
            },
        ),
        migrations.CreateModel(
            name='FleetSettings',
            fields=[
                ('version', models.BigIntegerField(db_default=controlplane.models.fleet.NextVersion(), editable=False)),
                ('id', models.PositiveSmallIntegerField(default=1, primary_key=True, serialize=False)),
                ('needs_key', models.BooleanField(default=False)),
                ('limits', models.JSONField(blank=True, null=True)),
            ],
            options={
                'verbose_name_plural': 'fleet settings',
                'constraints': [models.CheckConstraint(condition=models.Q(('id', 1)), name='fleet_settings_single_row')],
            },
        ),
        migrations.CreateModel(
            name='IdempotencyRecord',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('owner', models.CharField(max_length=40)),
                ('key', models.CharField(max_length=255)),
                ('fingerprint', models.CharField(max_length=64)),
                ('status', models.PositiveSmallIntegerField()),
                ('headers', models.JSONField()),
                ('encrypted', models.BinaryField()),
                ('created_at', models.DateTimeField(auto_now_add=True, db_index=True)),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('owner', 'key'), name='idempotency_key_unique')],
            },
        ),
        migrations.CreateModel(
            name='ItemFailure',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('task', models.CharField(max_length=32)),
                ('item', models.CharField(max_length=200)),
                ('since', models.DateTimeField()),
                ('at', models.DateTimeField()),
                ('failures', models.PositiveIntegerField(default=1)),
                ('error', models.CharField(max_length=64)),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('task', 'item'), name='item_failure_unique')],
            },
        ),
        migrations.CreateModel(
            name='PolicyRevision',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.BigIntegerField(db_default=controlplane.models.fleet.NextVersion(), editable=False)),
                ('number', models.PositiveIntegerField()),
                ('state', models.CharField(choices=[('draft', 'Draft'), ('canary', 'Canary'), ('live', 'Active'), ('retired', 'Retired'), ('rolled_back', 'Rolled back')], default='draft', max_length=11)),
                ('settings', models.JSONField()),
                ('digest', models.CharField(max_length=64)),
                ('reason', models.CharField(blank=True, max_length=500)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('published_at', models.DateTimeField(blank=True, null=True)),
                ('fault', models.CharField(blank=True, choices=[('alert', 'named by an alert'), ('analysis', 'failed analysis')], db_default='', default='', max_length=8)),
                ('fault_alert', models.BigIntegerField(blank=True, null=True)),
                ('author', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='revisions', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('policy__name', '-number'),
            },
        ),
        migrations.CreateModel(
            name='Project',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.BigIntegerField(db_default=controlplane.models.fleet.NextVersion(), editable=False)),
                ('name', models.CharField(max_length=30, unique=True)),
                ('description', models.TextField(blank=True, max_length=1000)),
                ('needs_approval', models.BooleanField(db_default=False, default=False)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
            ],
            options={
                'ordering': ('name',),
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9]([a-z0-9_-]{0,28}[a-z0-9])?$')), name='project_name_form', violation_error_message='Expected lower-case letters, digits and -, with a letter or digit at both ends.')],
            },
        ),
        migrations.CreateModel(
            name='Pool',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.BigIntegerField(db_default=controlplane.models.fleet.NextVersion(), editable=False)),
                ('name', models.CharField(max_length=30, unique=True)),
                ('models', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=256), blank=True, default=list, size=None)),
                ('aliases', models.JSONField(blank=True, default=list)),
                ('adapters', models.JSONField(blank=True, default=list)),
                ('adapter_replicas', models.PositiveIntegerField(blank=True, null=True)),
                ('description', models.TextField(blank=True, max_length=1000)),
                ('health', models.JSONField(blank=True, null=True)),
                ('breaker', models.JSONField(blank=True, null=True)),
                ('caps', models.JSONField(blank=True, null=True)),
                ('concurrency', models.JSONField(blank=True, null=True)),
                ('tier1', models.JSONField(blank=True, null=True)),
                ('stream_usage', models.CharField(blank=True, choices=[('request', 'request'), ('as_sent', 'as_sent')], max_length=8, null=True)),
                ('warm_up', models.JSONField(blank=True, null=True)),
                ('session_keys', models.JSONField(blank=True, null=True)),
                ('paths', models.JSONField(blank=True, null=True)),
                ('disaggregation', models.JSONField(blank=True, null=True)),
                ('allowed_origins', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=256), blank=True, db_default=[], default=list, size=None)),
                ('kv_cache', models.JSONField(blank=True, null=True)),
                ('costs', models.JSONField(blank=True, null=True)),
                ('what_if', models.JSONField(blank=True, null=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='pools', to='controlplane.project')),
            ],
            options={
                'ordering': ('name',),
            },
        ),
        migrations.CreateModel(
            name='ClientKey',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.BigIntegerField(db_default=controlplane.models.fleet.NextVersion(), editable=False)),
                ('name', models.CharField(max_length=30)),
                ('hint', models.CharField(max_length=12)),
                ('digest', models.CharField(max_length=64, unique=True)),
                ('models', models.JSONField(blank=True, null=True)),
                ('groups', models.JSONField(blank=True, null=True)),
                ('tenant', models.CharField(blank=True, max_length=30)),
                ('requests_per_s', models.FloatField(blank=True, null=True)),
                ('burst', models.PositiveIntegerField(blank=True, null=True)),
                ('tokens_per_min', models.PositiveBigIntegerField(blank=True, null=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('expires_at', models.DateTimeField(blank=True, null=True)),
                ('revoked_at', models.DateTimeField(blank=True, null=True)),
                ('created_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('project', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='client_keys', to='controlplane.project')),
            ],
            options={
                'ordering': ('project__name', 'name', '-created_at'),
            },
        ),
        migrations.CreateModel(
            name='Replica',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.BigIntegerField(db_default=controlplane.models.fleet.NextVersion(), editable=False)),
                ('name', models.CharField(max_length=63, unique=True)),
                ('url', models.CharField(max_length=2048)),
                ('state', models.CharField(choices=[('active', 'Active'), ('draining', 'Draining'), ('disabled', 'Disabled')], default='active', max_length=8)),
                ('weight', models.FloatField(default=1.0)),
                ('block_tokens', models.PositiveIntegerField(blank=True, null=True)),
                ('capacity_blocks', models.PositiveIntegerField(blank=True, null=True)),
                ('labels', models.JSONField(blank=True, default=dict)),
                ('adapters', models.JSONField(blank=True, null=True)),
                ('data_parallel_size', models.PositiveSmallIntegerField(default=1)),
                ('kv_events', models.JSONField(blank=True, null=True)),
                ('reported_kv_events', models.JSONField(blank=True, null=True)),
                ('role', models.CharField(choices=[('both', 'Prefill and decode'), ('prefill', 'Prefill'), ('decode', 'Decode')], db_default='both', default='both', max_length=8)),
                ('api_key_encrypted', models.BinaryField(blank=True, null=True)),
                ('api_key_set_at', models.DateTimeField(blank=True, null=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='replicas', to='controlplane.pool')),
            ],
            options={
                'ordering': ('name',),
            },
        ),
        migrations.CreateModel(
            name='ReplicaSource',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.BigIntegerField(db_default=controlplane.models.fleet.NextVersion(), editable=False)),
                ('name', models.CharField(max_length=30, unique=True)),
                ('kind', models.CharField(max_length=16)),
                ('settings', models.JSONField()),
                ('encrypted', models.BinaryField(blank=True, null=True)),
                ('adoption', models.CharField(choices=[('propose', 'Propose: a user adopts each engine'), ('adopt', 'Follow: each engine becomes a replica automatically')], default='propose', max_length=8)),
                ('enabled', models.BooleanField(default=True)),
                ('interval_s', models.FloatField(default=30.0)),
                ('deadline_s', models.FloatField(default=10.0)),
                ('drain_after_s', models.FloatField(default=60.0)),
                ('remove_after_s', models.FloatField(default=600.0)),
                ('max_vanished_ratio', models.FloatField(default=0.5)),
                ('max_targets', models.PositiveIntegerField(default=256)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('settings_changed_at', models.DateTimeField(blank=True, null=True)),
                ('next_poll_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('poll_number', models.PositiveBigIntegerField(default=0)),
                ('last_poll_at', models.DateTimeField(blank=True, null=True)),
                ('succeeded_at', models.DateTimeField(blank=True, null=True)),
                ('failing_since', models.DateTimeField(blank=True, null=True)),
                ('error', models.CharField(blank=True, max_length=500)),
                ('hold_reason', models.CharField(blank=True, max_length=500)),
                ('rejected', models.JSONField(default=list)),
                ('found', models.PositiveIntegerField(blank=True, null=True)),
                ('new', models.PositiveIntegerField(blank=True, null=True)),
                ('vanished', models.PositiveIntegerField(blank=True, null=True)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='sources', to='controlplane.pool')),
            ],
            options={
                'ordering': ('name',),
            },
        ),
        migrations.CreateModel(
            name='DiscoveredReplica',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('key', models.CharField(max_length=253)),
                ('name', models.CharField(max_length=63)),
                ('url', models.CharField(max_length=2048)),
                ('condition', models.CharField(choices=[('ready', 'Ready'), ('not_ready', 'Not ready'), ('terminating', 'Terminating')], default='ready', max_length=12)),
                ('labels', models.JSONField(default=dict)),
                ('state', models.CharField(choices=[('proposed', 'Proposed'), ('adopted', 'Adopted'), ('dismissed', 'Dismissed')], default='proposed', max_length=9)),
                ('first_seen_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('last_seen_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('missing_since', models.DateTimeField(blank=True, null=True)),
                ('drained_at', models.DateTimeField(blank=True, null=True)),
                ('drained_here', models.BooleanField(default=False)),
                ('problem', models.CharField(blank=True, max_length=500)),
                ('replica', models.OneToOneField(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='discovered', to='controlplane.replica')),
                ('source', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='discovered', to='controlplane.replicasource')),
            ],
            options={
                'ordering': ('key',),
            },
        ),
        migrations.CreateModel(
            name='RoleAssignment',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('role', models.CharField(choices=[('viewer', 'Viewer'), ('operator', 'Operator'), ('editor', 'Editor'), ('approver', 'Approver'), ('admin', 'Admin')], max_length=8)),
                ('from_groups', models.BooleanField(db_default=False, default=False)),
                ('project', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='roles', to='controlplane.project')),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='roles', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('user__username', 'project__name'),
            },
        ),
        migrations.CreateModel(
            name='Rollout',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.BigIntegerField(db_default=controlplane.models.fleet.NextVersion(), editable=False)),
                ('plan', models.CharField(db_default='all_at_once', default='all_at_once', max_length=12)),
                ('state', models.CharField(choices=[('awaiting_approval', 'Awaiting approval'), ('pending', 'Pending'), ('progressing', 'Progressing'), ('paused', 'Paused'), ('holding', 'On hold'), ('complete', 'Complete'), ('aborted', 'Aborted'), ('rolled_back', 'Rolled back'), ('superseded', 'Superseded')], default='pending', max_length=17)),
                ('held_by', models.CharField(blank=True, choices=[('rejection', 'A router rejects the configuration'), ('analysis', 'Analysis inconclusive')], db_default='', default='', max_length=9)),
                ('why', models.CharField(blank=True, db_default='', default='', max_length=500)),
                ('stages', models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list)),
                ('stage', models.PositiveSmallIntegerField(db_default=0, default=0)),
                ('stage_since', models.DateTimeField(blank=True, null=True)),
                ('stage_converged_at', models.DateTimeField(blank=True, null=True)),
                ('paused_at', models.DateTimeField(blank=True, null=True)),
                ('stage_paused_s', models.FloatField(db_default=0.0, default=0.0)),
                ('guard', models.JSONField(blank=True, null=True)),
                ('readings', models.JSONField(blank=True, db_default=models.Value([], models.JSONField()), default=list)),
                ('readings_at', models.DateTimeField(blank=True, null=True)),
                ('started_at', models.DateTimeField(auto_now_add=True)),
                ('finished_at', models.DateTimeField(blank=True, null=True)),
                ('approved_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('revision', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='rollouts', to='controlplane.policyrevision')),
                ('snapshot', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='rollouts', to='controlplane.configsnapshot')),
                ('started_by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('-started_at', '-pk'),
            },
        ),
        migrations.CreateModel(
            name='RolloutHistoryEntry',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(default=django.utils.timezone.now)),
                ('transition', models.CharField(max_length=12)),
                ('before', models.CharField(blank=True, choices=[('awaiting_approval', 'Awaiting approval'), ('pending', 'Pending'), ('progressing', 'Progressing'), ('paused', 'Paused'), ('holding', 'On hold'), ('complete', 'Complete'), ('aborted', 'Aborted'), ('rolled_back', 'Rolled back'), ('superseded', 'Superseded')], max_length=17)),
                ('after', models.CharField(choices=[('awaiting_approval', 'Awaiting approval'), ('pending', 'Pending'), ('progressing', 'Progressing'), ('paused', 'Paused'), ('holding', 'On hold'), ('complete', 'Complete'), ('aborted', 'Aborted'), ('rolled_back', 'Rolled back'), ('superseded', 'Superseded')], max_length=17)),
                ('stage', models.PositiveSmallIntegerField(default=0)),
                ('reason', models.CharField(blank=True, max_length=500)),
                ('evidence', models.JSONField(blank=True, null=True)),
                ('by', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to=settings.AUTH_USER_MODEL)),
                ('rollout', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='history', to='controlplane.rollout')),
            ],
            options={
                'ordering': ('pk',),
            },
        ),
        migrations.CreateModel(
            name='Router',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, unique=True)),
                ('admin_url', models.CharField(max_length=2048)),
                ('data_url', models.CharField(blank=True, max_length=2048)),
                ('boot', models.CharField(max_length=64)),
                ('version', models.CharField(blank=True, max_length=64)),
                ('first_seen_at', models.DateTimeField(auto_now_add=True)),
                ('last_seen_at', models.DateTimeField()),
                ('lost_at', models.DateTimeField(blank=True, null=True)),
                ('warming', models.JSONField(blank=True, default=dict)),
                ('running_number', models.PositiveBigIntegerField(blank=True, null=True)),
                ('running_sha256', models.CharField(blank=True, max_length=64)),
                ('signature_state', models.CharField(blank=True, db_default='', default='', max_length=20)),
                ('signature_key', models.CharField(blank=True, db_default='', default='', max_length=16)),
                ('signature_expires_at', models.DateTimeField(blank=True, null=True)),
                ('last_ack_at', models.DateTimeField(blank=True, null=True)),
                ('last_nack', models.JSONField(blank=True, null=True)),
                ('last_error', models.CharField(blank=True, max_length=500)),
                ('pushed_number', models.PositiveBigIntegerField(blank=True, null=True)),
                ('push_after', models.DateTimeField(blank=True, null=True)),
                ('push_failures', models.PositiveIntegerField(default=0)),
            ],
            options={
                'ordering': ('name',),
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$')), name='router_name_form', violation_error_message='Expected lower-case letters, digits and -, with a letter or digit at both ends.')],
            },
        ),
        migrations.CreateModel(
            name='Event',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('at', models.DateTimeField(default=django.utils.timezone.now)),
                ('kind', models.CharField(choices=controlplane.models.audit.event_kinds, max_length=32)),
                ('summary', models.CharField(max_length=500)),
                ('xact', models.BigIntegerField(db_default=django.db.models.functions.comparison.Cast(django.db.models.functions.comparison.Cast(models.Func(function='pg_current_xact_id'), models.TextField()), models.BigIntegerField()), editable=False)),
                ('detail', models.JSONField(default=dict)),
                ('actor', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.PROTECT, related_name='events', to=settings.AUTH_USER_MODEL)),
                ('pool', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='events', to='controlplane.pool')),
                ('replica', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='events', to='controlplane.replica')),
                ('router', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='events', to='controlplane.router')),
            ],
            options={
                'ordering': ('-at', '-pk'),
            },
        ),
        migrations.CreateModel(
            name='RouterReport',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('boot', models.CharField(max_length=64)),
                ('seq', models.PositiveBigIntegerField()),
                ('taken_at', models.DateTimeField(auto_now_add=True)),
                ('router', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='reports', to='controlplane.router')),
            ],
            options={
                'ordering': ('pk',),
            },
        ),
        migrations.CreateModel(
            name='RoutingPolicy',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=63, unique=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='policies', to='controlplane.pool')),
            ],
            options={
                'verbose_name_plural': 'routing policies',
                'ordering': ('name',),
            },
        ),
        migrations.AddField(
            model_name='policyrevision',
            name='policy',
            field=models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='revisions', to='controlplane.routingpolicy'),
        ),
        migrations.CreateModel(
            name='SignInLock',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('address', models.CharField(blank=True, max_length=45)),
                ('until', models.DateTimeField()),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='sign_in_locks', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('-until',),
            },
        ),
        migrations.CreateModel(
            name='TaskGroup',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('version', models.BigIntegerField(db_default=controlplane.models.fleet.NextVersion(), editable=False)),
                ('name', models.CharField(max_length=30)),
                ('owner', models.CharField(blank=True, max_length=200)),
                ('description', models.TextField(blank=True, max_length=1000)),
                ('match', models.JSONField(blank=True, null=True)),
                ('tier1', models.JSONField(blank=True, null=True)),
                ('priority', models.PositiveSmallIntegerField(default=0)),
                ('concurrency', models.JSONField(blank=True, null=True)),
                ('caps', models.JSONField(blank=True, null=True)),
                ('response_cache', models.JSONField(blank=True, null=True)),
                ('semantic_cache', models.JSONField(blank=True, null=True)),
                ('expected_tier1', models.CharField(blank=True, max_length=16)),
                ('hit_rate_objective', models.FloatField(blank=True, null=True)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('pool', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='groups', to='controlplane.pool')),
                ('replicas', models.ManyToManyField(blank=True, related_name='groups', to='controlplane.replica')),
            ],
            options={
                'ordering': ('pool__name', 'name'),
            },
        ),
        migrations.AddField(
            model_name='routingpolicy',
            name='group',
            field=models.OneToOneField(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='policy', to='controlplane.taskgroup'),
        ),
        migrations.CreateModel(
            name='UserSession',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('key', models.CharField(editable=False, max_length=40, unique=True)),
                ('address', models.CharField(blank=True, max_length=45)),
                ('agent', models.CharField(blank=True, max_length=200)),
                ('started_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('seen_at', models.DateTimeField(default=django.utils.timezone.now)),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='browser_sessions', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('-seen_at', '-pk'),
            },
        ),
        migrations.CreateModel(
            name='ApiToken',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=100)),
                ('key_id', models.CharField(max_length=16, unique=True)),
                ('digest', models.CharField(max_length=64)),
                ('scopes', django.contrib.postgres.fields.ArrayField(base_field=models.CharField(choices=[('read', 'Read'), ('write', 'Read and change'), ('admin', 'Read, change and manage tokens')], max_length=8), size=None)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
                ('expires_at', models.DateTimeField(blank=True, null=True)),
                ('last_used_at', models.DateTimeField(blank=True, null=True)),
                ('revoked_at', models.DateTimeField(blank=True, null=True)),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='tokens', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('-created_at', '-pk'),
                'constraints': [models.CheckConstraint(condition=models.Q(('scopes__contained_by', ['read', 'write', 'admin']), ('scopes__len__gt', 0)), name='token_scopes_known')],
            },
        ),
        migrations.AddConstraint(
            model_name='configsnapshot',
            constraint=models.CheckConstraint(condition=models.Q(('number__gt', 0)), name='snapshot_number_positive'),
        ),
        migrations.AddConstraint(
            model_name='pool',
            constraint=models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9]([a-z0-9_-]{0,28}[a-z0-9])?$')), name='pool_name_form', violation_error_message='Expected lower-case letters, digits and -, with a letter or digit at both ends.'),
        ),
        migrations.AddConstraint(
            model_name='pool',
            constraint=models.CheckConstraint(condition=models.Q(('adapter_replicas', None), ('adapter_replicas__range', (1, 10000)), _connector='OR'), name='pool_adapter_replicas_range'),
        ),
        migrations.AddConstraint(
            model_name='clientkey',
            constraint=models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9]([a-z0-9_-]{0,28}[a-z0-9])?$')), name='client_key_name_form', violation_error_message='Expected lower-case letters, digits and -, with a letter or digit at both ends.'),
        ),
        migrations.AddConstraint(
            model_name='clientkey',
            constraint=models.UniqueConstraint(condition=models.Q(('revoked_at', None)), fields=('project', 'name'), name='client_key_name_unique'),
        ),
        migrations.AddConstraint(
            model_name='clientkey',
            constraint=models.CheckConstraint(condition=models.Q(('burst', None), ('requests_per_s__isnull', False), _connector='OR'), name='client_key_burst_of_a_rate'),
        ),
        migrations.AddConstraint(
            model_name='replica',
            constraint=models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$')), name='replica_name_form', violation_error_message='Expected lower-case letters, digits and -, with a letter or digit at both ends.'),
        ),
        migrations.AddConstraint(
            model_name='replica',
            constraint=models.UniqueConstraint(deferrable=django.db.models.constraints.Deferrable['IMMEDIATE'], fields=('url',), name='replica_url_unique'),
        ),
        migrations.AddConstraint(
            model_name='replica',
            constraint=models.CheckConstraint(condition=models.Q(('state__in', ['active', 'draining', 'disabled'])), name='replica_state_known'),
        ),
        migrations.AddConstraint(
            model_name='replica',
            constraint=models.CheckConstraint(condition=models.Q(('role__in', ['both', 'prefill', 'decode'])), name='replica_role_known'),
        ),
        migrations.AddConstraint(
            model_name='replica',
            constraint=models.CheckConstraint(condition=models.Q(('weight__gt', 0), ('weight__lte', 1000)), name='replica_weight_range'),
        ),
        migrations.AddConstraint(
            model_name='replica',
            constraint=models.CheckConstraint(condition=models.Q(('data_parallel_size__range', (1, 1024))), name='replica_data_parallel_size_range'),
        ),
        migrations.AddConstraint(
            model_name='replica',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('api_key_encrypted__isnull', True), ('api_key_set_at__isnull', True)), models.Q(('api_key_encrypted__isnull', False), ('api_key_set_at__isnull', False)), _connector='OR'), name='replica_api_key_dated'),
        ),
        migrations.AddConstraint(
            model_name='replica',
            constraint=models.CheckConstraint(condition=models.Q(('block_tokens', None), ('block_tokens__gt', 0), _connector='OR'), name='replica_block_tokens_positive'),
        ),
        migrations.AddConstraint(
            model_name='replica',
            constraint=models.CheckConstraint(condition=models.Q(('capacity_blocks', None), ('capacity_blocks__gt', 0), _connector='OR'), name='replica_capacity_positive'),
        ),
        migrations.AddIndex(
            model_name='replicasource',
            index=models.Index(fields=['next_poll_at'], name='source_due'),
        ),
        migrations.AddConstraint(
            model_name='replicasource',
            constraint=models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9]([a-z0-9_-]{0,28}[a-z0-9])?$')), name='source_name_form', violation_error_message='Expected lower-case letters, digits and -, with a letter or digit at both ends.'),
        ),
        migrations.AddConstraint(
            model_name='replicasource',
            constraint=models.CheckConstraint(condition=models.Q(('adoption__in', ['propose', 'adopt'])), name='source_adoption_known'),
        ),
        migrations.AddConstraint(
            model_name='replicasource',
            constraint=models.CheckConstraint(condition=models.Q(('interval_s__gte', 5), ('interval_s__lte', 86400)), name='source_interval_range'),
        ),
        migrations.AddConstraint(
            model_name='replicasource',
            constraint=models.CheckConstraint(condition=models.Q(('deadline_s__gte', 1), ('deadline_s__lte', 60)), name='source_deadline_range'),
        ),
        migrations.AddConstraint(
            model_name='replicasource',
            constraint=models.CheckConstraint(condition=models.Q(('drain_after_s__gte', 0)), name='source_drain_range'),
        ),
        migrations.AddConstraint(
            model_name='replicasource',
            constraint=models.CheckConstraint(condition=models.Q(('remove_after_s__gte', models.F('drain_after_s'))), name='source_drains_before_it_removes'),
        ),
        migrations.AddConstraint(
            model_name='replicasource',
            constraint=models.CheckConstraint(condition=models.Q(('max_vanished_ratio__gt', 0), ('max_vanished_ratio__lte', 1)), name='source_vanished_range'),
        ),
        migrations.AddConstraint(
            model_name='replicasource',
            constraint=models.CheckConstraint(condition=models.Q(('max_targets__gte', 1), ('max_targets__lte', 1000)), name='source_targets_range'),
        ),
        migrations.AddConstraint(
            model_name='discoveredreplica',
            constraint=models.UniqueConstraint(fields=('source', 'key'), name='discovered_once'),
        ),
        migrations.AddConstraint(
            model_name='discoveredreplica',
            constraint=models.CheckConstraint(condition=models.Q(('state__in', ['proposed', 'adopted', 'dismissed'])), name='discovered_state_known'),
        ),
        migrations.AddConstraint(
            model_name='discoveredreplica',
            constraint=models.CheckConstraint(condition=models.Q(('replica', None), ('state', 'adopted'), _connector='OR'), name='discovered_replica_is_adopted'),
        ),
        migrations.AddConstraint(
            model_name='roleassignment',
            constraint=models.UniqueConstraint(fields=('user', 'project', 'from_groups'), name='one_role_per_project', nulls_distinct=False),
        ),
        migrations.AddConstraint(
            model_name='roleassignment',
            constraint=models.CheckConstraint(condition=models.Q(('role__in', ['viewer', 'operator', 'editor', 'approver', 'admin'])), name='role_known'),
        ),
        migrations.AddConstraint(
            model_name='rollout',
            constraint=models.UniqueConstraint(condition=models.Q(('state__in', ('awaiting_approval', 'pending', 'progressing', 'paused', 'holding'))), fields=('revision',), name='one_open_rollout_per_revision'),
        ),
        migrations.AddConstraint(
            model_name='rollout',
            constraint=models.CheckConstraint(condition=models.Q(('state__in', ['awaiting_approval', 'pending', 'progressing', 'paused', 'holding', 'complete', 'aborted', 'rolled_back', 'superseded'])), name='rollout_state_known'),
        ),
        migrations.AddConstraint(
            model_name='rollout',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('finished_at', None), ('state__in', ('awaiting_approval', 'pending', 'progressing', 'paused', 'holding'))), models.Q(models.Q(('state__in', ('awaiting_approval', 'pending', 'progressing', 'paused', 'holding')), _negated=True), ('finished_at__isnull', False)), _connector='OR'), name='rollout_finished_unless_open'),
        ),
        migrations.AddConstraint(
            model_name='rollout',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('held_by__in', ['rejection', 'analysis']), ('state', 'holding')), models.Q(models.Q(('state', 'holding'), _negated=True), ('held_by', '')), _connector='OR'), name='rollout_held_by_something'),
        ),
        migrations.AddConstraint(
            model_name='rollout',
            constraint=models.CheckConstraint(condition=models.Q(('approved_by', None), ('started_by', None), models.Q(('approved_by', models.F('started_by')), _negated=True), _connector='OR'), name='rollout_approved_by_another'),
        ),
        migrations.AddIndex(
            model_name='event',
            index=models.Index(fields=['-at', '-id'], name='event_at'),
        ),
        migrations.AddIndex(
            model_name='event',
            index=models.Index(fields=['pool', '-at'], name='event_pool_at'),
        ),
        migrations.AddIndex(
            model_name='event',
            index=models.Index(fields=['xact', 'id'], name='event_xact'),
        ),
        migrations.AddIndex(
            model_name='event',
            index=models.Index(fields=['kind', '-at'], name='event_kind_at'),
        ),
        migrations.AddIndex(
            model_name='event',
            index=models.Index(fields=['replica', '-at'], name='event_replica_at'),
        ),
        migrations.AddIndex(
            model_name='event',
            index=models.Index(fields=['router', '-at'], name='event_router_at'),
        ),
        migrations.AddIndex(
            model_name='event',
            index=models.Index(fields=['actor', '-at'], name='event_actor_at'),
        ),
        migrations.AddConstraint(
            model_name='routerreport',
            constraint=models.UniqueConstraint(fields=('router', 'boot', 'seq'), name='router_report_once'),
        ),
        migrations.AddConstraint(
            model_name='policyrevision',
            constraint=models.UniqueConstraint(fields=('policy', 'number'), name='revision_number_unique'),
        ),
        migrations.AddConstraint(
            model_name='policyrevision',
            constraint=models.UniqueConstraint(condition=models.Q(('state', 'live')), fields=('policy',), name='one_live_revision'),
        ),
        migrations.AddConstraint(
            model_name='policyrevision',
            constraint=models.UniqueConstraint(condition=models.Q(('state', 'draft')), fields=('policy',), name='one_draft'),
        ),
        migrations.AddConstraint(
            model_name='policyrevision',
            constraint=models.UniqueConstraint(condition=models.Q(('state', 'canary')), fields=('policy',), name='one_canary'),
        ),
        migrations.AddConstraint(
            model_name='policyrevision',
            constraint=models.CheckConstraint(condition=models.Q(('number__gt', 0)), name='revision_number_positive'),
        ),
        migrations.AddConstraint(
            model_name='policyrevision',
            constraint=models.CheckConstraint(condition=models.Q(('state__in', ['draft', 'canary', 'live', 'retired', 'rolled_back'])), name='revision_state_known'),
        ),
        migrations.AddConstraint(
            model_name='policyrevision',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('fault', 'alert'), ('fault_alert__isnull', False)), models.Q(models.Q(('fault', 'alert'), _negated=True), ('fault__in', ('', 'alert', 'analysis')), ('fault_alert', None)), _connector='OR'), name='revision_fault_known'),
        ),
        migrations.AddConstraint(
            model_name='policyrevision',
            constraint=models.CheckConstraint(condition=models.Q(models.Q(('published_at', None), ('state', 'draft')), models.Q(models.Q(('state', 'draft'), _negated=True), ('published_at__isnull', False)), _connector='OR'), name='revision_published_unless_draft'),
        ),
        migrations.AddConstraint(
            model_name='signinlock',
            constraint=models.UniqueConstraint(fields=('user', 'address'), name='one_lock_per_address'),
        ),
        migrations.AddConstraint(
            model_name='taskgroup',
            constraint=models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9]([a-z0-9_-]{0,28}[a-z0-9])?$')), name='group_name_form', violation_error_message='Expected lower-case letters, digits and -, with a letter or digit at both ends.'),
        ),
        migrations.AddConstraint(
            model_name='taskgroup',
            constraint=models.UniqueConstraint(fields=('pool', 'name'), name='group_name_unique'),
        ),
        migrations.AddConstraint(
            model_name='taskgroup',
            constraint=models.CheckConstraint(condition=models.Q(('priority__lte', 9)), name='group_priority_range'),
        ),
        migrations.AddConstraint(
            model_name='taskgroup',
            constraint=models.CheckConstraint(condition=models.Q(('expected_tier1__regex', '^([0-9a-f]{16})?$')), name='group_expected_tier1_form'),
        ),
        migrations.AddConstraint(
            model_name='taskgroup',
            constraint=models.CheckConstraint(condition=models.Q(('hit_rate_objective', None), models.Q(('hit_rate_objective__gt', 0), ('hit_rate_objective__lte', 1)), _connector='OR'), name='group_hit_rate_objective_range'),
        ),
        migrations.AddConstraint(
            model_name='routingpolicy',
            constraint=models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$')), name='policy_name_form', violation_error_message='Expected lower-case letters, digits and -, with a letter or digit at both ends.'),
        ),
        migrations.AddConstraint(
            model_name='routingpolicy',
            constraint=models.UniqueConstraint(condition=models.Q(('group', None)), fields=('pool',), name='one_policy_per_pool'),
        ),
    ]
