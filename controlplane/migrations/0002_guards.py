"""What Django's constraints cannot say: published revisions and snapshots never change, a policy's group is its pool's."""

from django.db import migrations

FROZEN_SNAPSHOT = """
create function controlplane_refuse_change() returns trigger language plpgsql as $$
begin
    raise exception '% never changes', tg_argv[0] using errcode = 'restrict_violation';
end $$;
create trigger snapshot_frozen before update or delete on controlplane_configsnapshot
    for each row execute function controlplane_refuse_change('a configuration snapshot');
"""

FROZEN_REVISION = """
create function controlplane_guard_revision() returns trigger language plpgsql as $$
begin
    if old.state = 'draft' then
        return new;
    end if;
    if row(new.policy_id, new.number, new.settings, new.digest, new.author_id, new.reason, new.created_at, new.published_at)
        is distinct from
       row(old.policy_id, old.number, old.settings, old.digest, old.author_id, old.reason, old.created_at, old.published_at)
        or new.state = 'draft' or (old.state = 'retired' and new.state <> 'retired') then
        raise exception 'a published policy revision never changes' using errcode = 'restrict_violation';
    end if;
    return new;
end $$;
create trigger revision_frozen before update on controlplane_policyrevision
    for each row execute function controlplane_guard_revision();
"""

GROUP_OF_POOL = """
alter table controlplane_taskgroup add constraint group_and_pool unique (id, pool_id);
alter table controlplane_routingpolicy add constraint policy_group_of_its_pool
    foreign key (group_id, pool_id) references controlplane_taskgroup (id, pool_id) deferrable initially deferred;
"""


class Migration(migrations.Migration):
    dependencies = [("controlplane", "0001_initial")]

    operations = [
        migrations.RunSQL(
            FROZEN_SNAPSHOT,
            "drop trigger snapshot_frozen on controlplane_configsnapshot; drop function controlplane_refuse_change();",
        ),
        migrations.RunSQL(
            FROZEN_REVISION,
            "drop trigger revision_frozen on controlplane_policyrevision; drop function controlplane_guard_revision();",
        ),
        migrations.RunSQL(
            GROUP_OF_POOL,
            "alter table controlplane_routingpolicy drop constraint policy_group_of_its_pool;"
            "alter table controlplane_taskgroup drop constraint group_and_pool;",
        ),
    ]
