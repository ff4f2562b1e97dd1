"""What Django's models cannot express: rows that never change, a policy's group in its own pool, an unlogged cache."""

from django.db import migrations

FROZEN = """
create function controlplane_refuse_change() returns trigger language plpgsql as $$
begin
    raise exception '% never changes', tg_argv[0] using errcode = 'restrict_violation';
end $$;
create trigger audit_append_only before update or delete on controlplane_auditentry
    for each row execute function controlplane_refuse_change('an entry of the audit log');
create trigger rollout_history_frozen before update on controlplane_rollouthistoryentry
    for each row execute function controlplane_refuse_change('a step of a rollout');

create function controlplane_guard_snapshot() returns trigger language plpgsql as $$
begin
    if tg_op = 'UPDATE' and to_jsonb(new) - 'encrypted' = to_jsonb(old) - 'encrypted' then
        return new;
    end if;
    raise exception 'a configuration snapshot never changes' using errcode = 'restrict_violation';
end $$;
create trigger snapshot_frozen before update or delete on controlplane_configsnapshot
    for each row execute function controlplane_guard_snapshot();

create function controlplane_guard_revision() returns trigger language plpgsql as $$
begin
    if old.state = 'draft' then
        return new;
    end if;
    if row(new.policy_id, new.number, new.settings, new.digest, new.author_id, new.reason, new.created_at, new.published_at)
        is distinct from
       row(old.policy_id, old.number, old.settings, old.digest, old.author_id, old.reason, old.created_at, old.published_at)
        or not (new.state = old.state
                or (old.state = 'canary' and new.state in ('live', 'rolled_back'))
                or (old.state = 'live' and new.state = 'retired')) then
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

CACHE = """
create unlogged table controlplane_cache (
    cache_key varchar(255) primary key,
    value text not null,
    expires timestamptz not null
);
create index controlplane_cache_expires on controlplane_cache (expires);
"""  # emptied after a crash, and writes no write-ahead log


class Migration(migrations.Migration):
    dependencies = [("controlplane", "0001_initial")]

    operations = [migrations.RunSQL(sql) for sql in (FROZEN, GROUP_OF_POOL, CACHE)]
