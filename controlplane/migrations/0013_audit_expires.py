"""An entry of the audit log still never changes; one that is older than any retention may be deleted.

The application's role may not delete: it calls the function, which runs as the owner of the tables.
"""

from django.db import migrations

EXPIRY = """
create function controlplane_guard_audit() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' and old.at < now() - interval '90 days' then
        return old;
    end if;
    raise exception 'an entry of the audit log never changes' using errcode = 'restrict_violation';
end $$;
drop trigger audit_append_only on controlplane_auditentry;
create trigger audit_append_only before update or delete on controlplane_auditentry
    for each row execute function controlplane_guard_audit();

create function controlplane_expire_audit(through bigint) returns void language sql
    security definer set search_path = public, pg_temp as $$
    delete from controlplane_auditentry where number <= through;
$$;
revoke execute on function controlplane_expire_audit(bigint) from public;
"""


class Migration(migrations.Migration):
    dependencies = [("controlplane", "0012_versions")]

    operations = [
        migrations.RunSQL(EXPIRY, hints={"brief": "replaces a trigger; its lock is held for an instant, no row is read"})
    ]
