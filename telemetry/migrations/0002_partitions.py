"""Tables partitioned by time, which Django's models cannot express: readings, decisions, and the rollups of readings;
and the triggers of versions.

``telemetry.storage.partitions`` creates and drops the partitions; ``telemetry.storage.rollup_tables`` lists the
columns of rollups.
"""

from importlib import import_module

from django.db import migrations

version_triggers = import_module("controlplane.migrations.0002_triggers").version_triggers

PARTITIONED = """
alter table {name} rename to {name}_plain;
alter index {name}_pkey rename to {name}_plain_pkey;
create table {name} (like {name}_plain including all) partition by range (at);
drop table {name}_plain;
"""
READINGS = ("telemetry_reading", "telemetry_routerreading", "telemetry_decision")

ROLLUPS = """
create table telemetry_reading_1m (
    at timestamptz not null,
    replica_id bigint not null,
    model text not null,
    engine text not null,
    scrapes integer,
    stale_scrapes integer,
    covered_s double precision,
    queries bigint,
    hits bigint,
    external_hits bigint,
    not_reported boolean,
    running_sum double precision,
    running_n integer,
    running_min double precision,
    running_max double precision,
    waiting_sum double precision,
    waiting_n integer,
    waiting_min double precision,
    waiting_max double precision,
    kv_usage_ratio_sum double precision,
    kv_usage_ratio_n integer,
    kv_usage_ratio_min double precision,
    kv_usage_ratio_max double precision,
    gap_s double precision,
    admitted_tokens bigint,
    external_queries bigint,
    device_tokens bigint,
    host_tokens bigint,
    p2p_tokens bigint,
    disk_tokens bigint,
    other_tokens bigint,
    prompt_tokens bigint,
    generation_tokens bigint,
    preemptions bigint,
    finished bigint,
    first_tokens bigint,
    computed_prompt_tokens bigint,
    cached_prompt_tokens bigint,
    transferred_prompt_tokens bigint,
    mm_cache_queries bigint,
    mm_cache_hits bigint,
    queue_ms bigint,
    queue_count bigint,
    prefill_ms bigint,
    prefill_count bigint,
    block_lifetime_ms bigint,
    block_lifetime_count bigint,
    block_idle_ms bigint,
    block_idle_count bigint,
    block_reuse_gap_ms bigint,
    block_reuse_gap_count bigint,
    waiting_capacity_sum double precision,
    waiting_capacity_n integer,
    waiting_capacity_min double precision,
    waiting_capacity_max double precision,
    waiting_deferred_sum double precision,
    waiting_deferred_n integer,
    waiting_deferred_min double precision,
    waiting_deferred_max double precision,
    primary key (at, replica_id, model, engine)
) partition by range (at);

create table telemetry_routerreading_1m (
    at timestamptz not null,
    router_id bigint not null,
    pool text not null,
    "group" text not null,
    policy text not null,
    revision integer not null,
    scrapes integer,
    stale_scrapes integer,
    covered_s double precision,
    requests bigint,
    ok_requests bigint,
    client_error_requests bigint,
    replica_error_requests bigint,
    router_error_requests bigint,
    cancelled_requests bigint,
    usage_reported bigint,
    prompt_tokens bigint,
    cached_tokens bigint,
    spilled_requests bigint,
    predicted_responses bigint,
    predicted_prompt_tokens bigint,
    predicted_tokens bigint,
    predicted_cached_tokens bigint,
    cache_hits bigint,
    cache_misses bigint,
    cache_bypasses bigint,
    cache_prompt_tokens bigint,
    cache_generated_tokens bigint,
    primary key (at, router_id, pool, "group", policy, revision)
) partition by range (at);

create table telemetry_histogram_1m (
    at timestamptz not null,
    kind text not null,
    pool text not null,
    part text not null,
    reuse text not null,
    layout_id bigint not null,
    positions smallint[] not null,
    counts bigint[] not null,
    sum_s double precision,
    primary key (kind, at, pool, part, reuse, layout_id)
) partition by range (at);
"""
FINEST = ("telemetry_reading", "telemetry_routerreading", "telemetry_histogram")
COARSER = ("5m", "1h", "6h")
UNVERSIONED = {
    "alertrule": ("evaluated_at", "verdict", "updated_at"),
    "channel": ("delivered_at", "failed_at", "error", "catches_up"),
    "heartbeat": ("due_at", "sent_at", "failed_at", "error", "withheld"),
    "metricsserver": ("asked_at", "error", "found", "missing"),
    "silence": (),
}


class Migration(migrations.Migration):
    replaces = [("telemetry", "0002_readings")]
    dependencies = [("telemetry", "0001_schema")]

    operations = [
        migrations.RunSQL("".join(PARTITIONED.format(name=name) for name in READINGS)),
        migrations.RunSQL(ROLLUPS),
        migrations.RunSQL(
            "".join(
                f"create table {name}_{suffix} (like {name}_1m including all) partition by range (at);"
                for name in FINEST
                for suffix in COARSER
            )
        ),
        version_triggers("telemetry", UNVERSIONED),
    ]
