"""Readings, partitioned by day: Django knows the models, PostgreSQL gets its own words for them.

The partitions themselves are made and dropped by telemetry.storage.partitions.
"""

import django.contrib.postgres.fields
import django.db.models.deletion
from django.db import migrations, models

TABLES = """
create table telemetry_reading (
    at timestamptz not null,
    replica_id bigint not null,
    model text not null,
    engine text not null,
    state text not null,
    interval_s double precision,
    queries bigint,
    hits bigint,
    external_queries bigint,
    external_hits bigint,
    device_tokens bigint,
    host_tokens bigint,
    p2p_tokens bigint,
    disk_tokens bigint,
    other_tokens bigint,
    prompt_tokens bigint,
    generation_tokens bigint,
    preemptions bigint,
    finished bigint,
    running double precision,
    waiting double precision,
    kv_usage_ratio double precision,
    ttft_layout_id bigint,
    ttft_at smallint[],
    ttft_counts bigint[],
    ttft_sum_s double precision,
    itl_layout_id bigint,
    itl_at smallint[],
    itl_counts bigint[],
    itl_sum_s double precision,
    primary key (at, replica_id, model, engine)
) partition by range (at);

create table telemetry_routerreading (
    at timestamptz not null,
    router_id bigint not null,
    pool text not null,
    "group" text not null,
    replica text not null,
    policy text not null,
    revision integer not null,
    state text not null,
    interval_s double precision,
    requests bigint,
    ok_requests bigint,
    client_error_requests bigint,
    replica_error_requests bigint,
    router_error_requests bigint,
    cancelled_requests bigint,
    usage_reported bigint,
    prompt_tokens bigint,
    cached_tokens bigint,
    cacheable_tokens bigint,
    ttft_layout_id bigint,
    ttft_at smallint[],
    ttft_counts bigint[],
    ttft_sum_s double precision,
    primary key (at, router_id, pool, "group", replica, policy, revision)
) partition by range (at);
"""


class Migration(migrations.Migration):

    dependencies = [
        ('telemetry', '0001_initial'),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[
                migrations.RunSQL(TABLES, "drop table telemetry_routerreading; drop table telemetry_reading;"),
            ],
            state_operations=[
                migrations.CreateModel(
                    name='Reading',
                    fields=[
                        ('pk', models.CompositePrimaryKey('at', 'replica_id', 'model', 'engine', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('at', models.DateTimeField()),
                        ('model', models.TextField()),
                        ('engine', models.TextField()),
                        ('state', models.TextField(choices=[('ok', 'Ok'), ('first', 'First'), ('reset', 'Reset'), ('gap', 'Gap'), ('stale', 'Stale')])),
                        ('interval_s', models.FloatField(null=True)),
                        ('queries', models.BigIntegerField(null=True)),
                        ('hits', models.BigIntegerField(null=True)),
                        ('external_queries', models.BigIntegerField(null=True)),
                        ('external_hits', models.BigIntegerField(null=True)),
                        ('device_tokens', models.BigIntegerField(null=True)),
                        ('host_tokens', models.BigIntegerField(null=True)),
                        ('p2p_tokens', models.BigIntegerField(null=True)),
                        ('disk_tokens', models.BigIntegerField(null=True)),
                        ('other_tokens', models.BigIntegerField(null=True)),
                        ('prompt_tokens', models.BigIntegerField(null=True)),
                        ('generation_tokens', models.BigIntegerField(null=True)),
                        ('preemptions', models.BigIntegerField(null=True)),
                        ('finished', models.BigIntegerField(null=True)),
                        ('running', models.FloatField(null=True)),
                        ('waiting', models.FloatField(null=True)),
                        ('kv_usage_ratio', models.FloatField(null=True)),
                        ('ttft_at', django.contrib.postgres.fields.ArrayField(base_field=models.SmallIntegerField(), null=True, size=None)),
                        ('ttft_counts', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), null=True, size=None)),
                        ('ttft_sum_s', models.FloatField(null=True)),
                        ('itl_at', django.contrib.postgres.fields.ArrayField(base_field=models.SmallIntegerField(), null=True, size=None)),
                        ('itl_counts', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), null=True, size=None)),
                        ('itl_sum_s', models.FloatField(null=True)),
                        ('itl_layout', models.ForeignKey(db_constraint=False, db_index=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='telemetry.bucketlayout')),
                        ('replica', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='controlplane.replica')),
                        ('ttft_layout', models.ForeignKey(db_constraint=False, db_index=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='telemetry.bucketlayout')),
                    ],
                ),
                migrations.CreateModel(
                    name='RouterReading',
                    fields=[
                        ('pk', models.CompositePrimaryKey('at', 'router_id', 'pool', 'group', 'replica', 'policy', 'revision', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('at', models.DateTimeField()),
                        ('pool', models.TextField()),
                        ('group', models.TextField()),
                        ('replica', models.TextField()),
                        ('policy', models.TextField()),
                        ('revision', models.IntegerField()),
                        ('state', models.TextField(choices=[('ok', 'Ok'), ('first', 'First'), ('reset', 'Reset'), ('gap', 'Gap'), ('stale', 'Stale')])),
                        ('interval_s', models.FloatField(null=True)),
                        ('requests', models.BigIntegerField(null=True)),
                        ('ok_requests', models.BigIntegerField(null=True)),
                        ('client_error_requests', models.BigIntegerField(null=True)),
                        ('replica_error_requests', models.BigIntegerField(null=True)),
                        ('router_error_requests', models.BigIntegerField(null=True)),
                        ('cancelled_requests', models.BigIntegerField(null=True)),
                        ('usage_reported', models.BigIntegerField(null=True)),
                        ('prompt_tokens', models.BigIntegerField(null=True)),
                        ('cached_tokens', models.BigIntegerField(null=True)),
                        ('cacheable_tokens', models.BigIntegerField(null=True)),
                        ('ttft_at', django.contrib.postgres.fields.ArrayField(base_field=models.SmallIntegerField(), null=True, size=None)),
                        ('ttft_counts', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), null=True, size=None)),
                        ('ttft_sum_s', models.FloatField(null=True)),
                        ('router', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='controlplane.router')),
                        ('ttft_layout', models.ForeignKey(db_constraint=False, db_index=False, null=True, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='telemetry.bucketlayout')),
                    ],
                ),
            ],
        ),
    ]
