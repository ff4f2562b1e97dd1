"""Projects, roles, and an audit log that is only added to.

Pools that exist go to the project ``default``. People who exist keep what they could do: staff become admins of
everything, all others approvers.
"""

from typing import Any

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models

APPEND_ONLY = """
create trigger audit_append_only before update or delete on controlplane_auditentry
    for each row execute function controlplane_refuse_change('an entry of the audit log');
"""


def keep_what_was_allowed(apps: Any, _: Any) -> None:
    Pool, Project = apps.get_model("controlplane", "Pool"), apps.get_model("controlplane", "Project")
    RoleAssignment, User = apps.get_model("controlplane", "RoleAssignment"), apps.get_model("auth", "User")
    if Pool.objects.exists():
        Pool.objects.update(project=Project.objects.create(name="default"))
    for person in User.objects.filter(is_superuser=False):
        RoleAssignment.objects.create(user=person, project=None, role="admin" if person.is_staff else "approver")


class Migration(migrations.Migration):

    dependencies = [
        ('controlplane', '0002_guards'),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations = [
        migrations.AlterField(
            model_name='event',
            name='kind',
            field=models.CharField(choices=[('pool_created', 'Pool created'), ('pool_changed', 'Pool changed'), ('pool_removed', 'Pool removed'), ('replica_added', 'Replica added'), ('replica_removed', 'Replica removed'), ('replica_changed', 'Replica changed'), ('replica_state_changed', 'Replica state changed'), ('group_created', 'Task group created'), ('group_changed', 'Task group changed'), ('group_removed', 'Task group removed'), ('policy_published', 'Policy published'), ('policy_removed', 'Policy removed'), ('config_applied', 'Configuration applied'), ('config_refused', 'Configuration refused'), ('project_created', 'Project created'), ('project_removed', 'Project removed'), ('user_added', 'Person added'), ('user_changed', 'Person changed'), ('role_changed', 'Role changed'), ('token_created', 'Token created'), ('token_revoked', 'Token revoked'), ('rule_created', 'Alert rule created'), ('rule_changed', 'Alert rule changed'), ('rule_removed', 'Alert rule removed'), ('channel_created', 'Channel created'), ('channel_changed', 'Channel changed'), ('channel_removed', 'Channel removed'), ('router_joined', 'Router joined'), ('router_lost', 'Router lost'), ('replica_down', 'Replica down'), ('replica_up', 'Replica up'), ('replica_restarted', 'Replica restarted'), ('alert_firing', 'Alert firing'), ('alert_resolved', 'Alert resolved')], max_length=32),
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
            name='Project',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('name', models.CharField(max_length=30, unique=True)),
                ('description', models.TextField(blank=True, max_length=1000)),
                ('created_at', models.DateTimeField(auto_now_add=True)),
            ],
            options={
                'ordering': ('name',),
                'constraints': [models.CheckConstraint(condition=models.Q(('name__regex', '^[a-z0-9]([a-z0-9_-]{0,28}[a-z0-9])?$')), name='project_name_form', violation_error_message='Expected lower-case letters, digits and -, a letter or digit at either end.')],
            },
        ),
        migrations.AddField(
            model_name='pool',
            name='project',
            field=models.ForeignKey(null=True, on_delete=django.db.models.deletion.PROTECT, related_name='pools', to='controlplane.project'),
        ),
        migrations.CreateModel(
            name='RoleAssignment',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('role', models.CharField(choices=[('viewer', 'Viewer'), ('operator', 'Operator'), ('editor', 'Editor'), ('approver', 'Approver'), ('admin', 'Admin')], max_length=8)),
                ('project', models.ForeignKey(blank=True, null=True, on_delete=django.db.models.deletion.CASCADE, related_name='roles', to='controlplane.project')),
                ('user', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='roles', to=settings.AUTH_USER_MODEL)),
            ],
            options={
                'ordering': ('user__username', 'project__name'),
                'constraints': [models.UniqueConstraint(fields=('user', 'project'), name='one_role_per_project', nulls_distinct=False), models.CheckConstraint(condition=models.Q(('role__in', ['viewer', 'operator', 'editor', 'approver', 'admin'])), name='role_known')],
            },
        ),
        migrations.RunPython(keep_what_was_allowed, migrations.RunPython.noop),
        migrations.RunSQL("set constraints all immediate", migrations.RunSQL.noop),  # before the table is altered
        migrations.AlterField(
            model_name="pool",
            name="project",
            field=models.ForeignKey(
                on_delete=django.db.models.deletion.PROTECT, related_name="pools", to="controlplane.project"
            ),
        ),
        migrations.RunSQL(APPEND_ONLY, "drop trigger audit_append_only on controlplane_auditentry;"),
    ]
