"""What nightly looks at the audit log found; and snapshots, which never change, may be sealed under another key."""

from django.db import migrations, models

RESEALED = """
create function controlplane_guard_snapshot() returns trigger language plpgsql as $$
begin
    if tg_op = 'UPDATE' and to_jsonb(new) - 'sealed' = to_jsonb(old) - 'sealed' then
        return new;
    end if;
    raise exception 'a configuration snapshot never changes' using errcode = 'restrict_violation';
end $$;
drop trigger snapshot_frozen on controlplane_configsnapshot;
create trigger snapshot_frozen before update or delete on controlplane_configsnapshot
    for each row execute function controlplane_guard_snapshot();
"""
FROZEN = """
drop trigger snapshot_frozen on controlplane_configsnapshot;
drop function controlplane_guard_snapshot();
create trigger snapshot_frozen before update or delete on controlplane_configsnapshot
    for each row execute function controlplane_refuse_change('a configuration snapshot');
"""


class Migration(migrations.Migration):

    dependencies = [
        ('controlplane', '0011_group_roles'),
    ]

    operations = [
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
        migrations.RunSQL(RESEALED, FROZEN),
    ]
