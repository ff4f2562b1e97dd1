"""Readings added up to minutes, 5 minutes and hours.

Their tables are PostgreSQL's alone: what they hold is listed in telemetry.storage.rollup_columns.
"""

from django.db import migrations, models

TABLES = """
create table telemetry_reading_{suffix} (
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
    primary key (at, replica_id, model, engine)
) partition by range (at);

create table telemetry_routerreading_{suffix} (
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
    ceiling_prompt_tokens bigint,
    cacheable_tokens bigint,
    spilled_requests bigint,
    predicted_answers bigint,
    predicted_prompt_tokens bigint,
    predicted_tokens bigint,
    predicted_cached_tokens bigint,
    primary key (at, router_id, pool, "group", policy, revision)
) partition by range (at);

create table telemetry_histogram_{suffix} (
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
SUFFIXES = ("1m", "5m", "1h")
NAMES = ("telemetry_reading", "telemetry_routerreading", "telemetry_histogram")


class Migration(migrations.Migration):

    dependencies = [
        ("telemetry", "0011_engine_facts"),
    ]

    operations = [
        migrations.CreateModel(
            name='RollupState',
            fields=[
                ('resolution_s', models.PositiveIntegerField(primary_key=True, serialize=False)),
                ('closed_through', models.DateTimeField(null=True)),
                ('rolled_through', models.DateTimeField(null=True)),
            ],
        ),
        migrations.CreateModel(
            name='RollupRepair',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('resolution_s', models.PositiveIntegerField()),
                ('at', models.DateTimeField()),
            ],
            options={
                'constraints': [models.UniqueConstraint(fields=('resolution_s', 'at'), name='rollup_repair_once')],
            },
        ),
        migrations.RunSQL(
            "".join(TABLES.format(suffix=suffix) for suffix in SUFFIXES),
            "".join(f"drop table {name}_{suffix};" for name in NAMES for suffix in SUFFIXES),
            hints={"brief": "new tables, which nobody uses yet"},
        ),
    ]
