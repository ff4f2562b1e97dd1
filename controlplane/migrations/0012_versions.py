"""A version of each row that users edit, which the database increases; not for columns that workers write."""

from django.db import migrations, models

import controlplane.models.fleet

FUNCTION = """
create sequence controlplane_version;
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
BRIEF = "adds triggers to tables of the size of the fleet; reads no row"

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


def versions(app: str, unversioned: dict[str, tuple[str, ...]]) -> list[migrations.operations.base.Operation]:
    """The column ``version`` and its trigger, by model; the values name the columns that workers write."""
    columns = [
        migrations.AddField(
            model_name=model,
            name="version",
            field=models.BigIntegerField(db_default=controlplane.models.fleet.NextVersion(), editable=False),
        )
        for model in unversioned
    ]
    triggers = [
        TRIGGER.format(table=f"{app}_{model}", unversioned=", ".join(f"'{column}'" for column in columns))
        for model, columns in unversioned.items()
    ]
    return [*columns, migrations.RunSQL("".join(triggers), hints={"brief": BRIEF})]


class Migration(migrations.Migration):
    dependencies = [("controlplane", "0011_allowed_origins")]

    operations = [
        migrations.RunSQL(FUNCTION, hints={"brief": "touches no table"}),
        *versions("controlplane", UNVERSIONED),
    ]
