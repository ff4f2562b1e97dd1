"""What Django's models cannot express: rows that never change, a policy's group in its own pool, an unlogged cache, and
the version of each row that users edit, which the database increases.
"""

from django.db import migrations

FROZEN = """
create function controlplane_refuse_change() returns trigger language plpgsql as $$
begin
    raise exception '% never changes', tg_argv[0] using errcode = 'restrict_violation';
end $$;
create trigger rollout_history_frozen before update on controlplane_rollouthistoryentry
    for each row execute function controlplane_refuse_change('a step of a rollout');

create function controlplane_guard_snapshot() returns trigger language plpgsql as $$
begin
    if tg_op = 'UPDATE' and to_jsonb(new) - 'encrypted' = to_jsonb(old) - 'encrypted' then
        return new;
    end if;
    raise exception 'a configuration snapshot never changes' using errcode = 'restrict_violation';
end $$;
create trigger snapshot_frozen before update on controlplane_configsnapshot
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

# An entry of the audit log never changes; one that is older than any retention may be deleted. The application's role
# may not delete: it calls the function, which runs as the owner of the tables.
AUDIT = """
create function controlplane_guard_audit() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' and old.at < now() - interval '90 days' then
        return old;
    end if;
    raise exception 'an entry of the audit log never changes' using errcode = 'restrict_violation';
end $$;
create trigger audit_append_only before update or delete on controlplane_auditentry
    for each row execute function controlplane_guard_audit();

create function controlplane_expire_audit(through bigint) returns void language sql
    security definer set search_path = public, pg_temp as $$
    delete from controlplane_auditentry where number <= through;
$$;
revoke execute on function controlplane_expire_audit(bigint) from public;
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

VERSION = """
create function controlplane_set_version() returns trigger language plpgsql as $$
declare
    unversioned text[] = array_append(tg_argv, 'version');  -- tg_argv is null without arguments
begin
    new.version = greatest(old.version, new.version);
    if to_jsonb(new) - unversioned is distinct from to_jsonb(old) - unversioned then
        new.version = nextval('controlplane_version');
    end if;
    return new;
end $$;
"""
TRIGGER = """
create trigger {table}_version before update on {table} for each row execute function controlplane_set_version({unversioned});
"""

# By model, the columns that workers write: a change of them is no new version.
UNVERSIONED = {
    "clientkey": (),
    "fleetsettings": (),
    "policyrevision": ("fault", "fault_alert"),
    "pool": (),
    "project": (),
    "replica": ("block_tokens", "capacity_blocks", "reported_kv_events"),
    "replicasource": (
        *("next_poll_at", "poll_number", "last_poll_at", "succeeded_at", "failing_since", "error"),
        *("hold_reason", "rejected", "found", "new", "vanished"),
    ),
    "rollout": ("snapshot_id", "stage_converged_at", "readings", "readings_at"),
    "taskgroup": (),
}


def version_triggers(app: str, unversioned: dict[str, tuple[str, ...]]) -> migrations.RunSQL:
    """The trigger of the column ``version``, by model."""
    triggers = [
        TRIGGER.format(table=f"{app}_{model}", unversioned=", ".join(f"'{column}'" for column in columns))
        for model, columns in unversioned.items()
    ]
    return migrations.RunSQL("".join(triggers))


class Migration(migrations.Migration):
    replaces = [("controlplane", "0002_guards")]
    dependencies = [("controlplane", "0001_schema")]

    operations = [
        *(migrations.RunSQL(sql) for sql in (FROZEN, AUDIT, GROUP_OF_POOL, CACHE, VERSION)),
        version_triggers("controlplane", UNVERSIONED),
    ]
