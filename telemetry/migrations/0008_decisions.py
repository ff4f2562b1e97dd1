"""Decisions, partitioned by day, and how far each router's have been collected."""

import django.contrib.postgres.fields
import django.db.models.deletion
from django.db import migrations, models

TABLE = """
create table telemetry_decision (
    at timestamptz not null,
    router_id bigint not null,
    boot text not null,
    seq bigint not null,
    pool text not null,
    "group" text not null,
    matched_by text not null,
    policy text not null,
    revision integer not null,
    arm text not null,
    strategy text not null,
    replica text not null,
    rank smallint,
    reason text not null,
    status smallint,
    ttft_s double precision,
    prompt_tokens_estimate bigint not null,
    prompt_tokens bigint,
    cached_tokens bigint,
    hit_tokens bigint,
    block_tokens integer,
    hash_tokens integer not null,
    prefix bigint,
    blocks bigint[] not null,
    positions smallint[],
    block_count integer not null,
    sample_ratio double precision not null,
    request_id text not null,
    retries smallint not null,
    candidates jsonb,
    opening jsonb,
    primary key (at, router_id, boot, seq)
) partition by range (at);
"""


class Migration(migrations.Migration):

    dependencies = [
        ('controlplane', '0017_pool_warm_up'),
        ("telemetry", "0007_predictions_and_reuse"),
    ]

    operations = [
        migrations.SeparateDatabaseAndState(
            database_operations=[migrations.RunSQL(TABLE, "drop table telemetry_decision;")],
            state_operations=[
                migrations.CreateModel(
                    name='Decision',
                    fields=[
                        ('pk', models.CompositePrimaryKey('at', 'router_id', 'boot', 'seq', blank=True, editable=False, primary_key=True, serialize=False)),
                        ('at', models.DateTimeField()),
                        ('boot', models.TextField()),
                        ('seq', models.BigIntegerField()),
                        ('pool', models.TextField()),
                        ('group', models.TextField()),
                        ('matched_by', models.TextField()),
                        ('policy', models.TextField()),
                        ('revision', models.IntegerField()),
                        ('arm', models.TextField()),
                        ('strategy', models.TextField()),
                        ('replica', models.TextField()),
                        ('rank', models.SmallIntegerField(null=True)),
                        ('reason', models.TextField()),
                        ('status', models.SmallIntegerField(null=True)),
                        ('ttft_s', models.FloatField(null=True)),
                        ('prompt_tokens_estimate', models.BigIntegerField()),
                        ('prompt_tokens', models.BigIntegerField(null=True)),
                        ('cached_tokens', models.BigIntegerField(null=True)),
                        ('hit_tokens', models.BigIntegerField(null=True)),
                        ('block_tokens', models.IntegerField(null=True)),
                        ('hash_tokens', models.IntegerField()),
                        ('prefix', models.BigIntegerField(null=True)),
                        ('blocks', django.contrib.postgres.fields.ArrayField(base_field=models.BigIntegerField(), size=None)),
                        ('positions', django.contrib.postgres.fields.ArrayField(base_field=models.SmallIntegerField(), null=True, size=None)),
                        ('block_count', models.IntegerField()),
                        ('sample_ratio', models.FloatField()),
                        ('request_id', models.TextField()),
                        ('retries', models.SmallIntegerField()),
                        ('candidates', models.JSONField(null=True)),
                        ('opening', models.JSONField(null=True)),
                        ('router', models.ForeignKey(db_constraint=False, db_index=False, on_delete=django.db.models.deletion.DO_NOTHING, related_name='+', to='controlplane.router')),
                    ],
                ),
            ],
        ),
        migrations.CreateModel(
            name='DecisionCursor',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('boot', models.TextField(blank=True)),
                ('seq', models.BigIntegerField(default=0)),
                ('at', models.DateTimeField(null=True)),
                ('collected', models.BigIntegerField(default=0)),
                ('dropped', models.BigIntegerField(default=0)),
                ('reason', models.CharField(blank=True, max_length=200)),
                ('sample_ratio', models.FloatField(default=0.0625)),
                ('blocks_per_s', models.FloatField(default=0.0)),
                ('router', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, related_name='decision_cursor', to='controlplane.router')),
            ],
            options={
                'constraints': [models.CheckConstraint(condition=models.Q(('sample_ratio__gt', 0), ('sample_ratio__lte', 1)), name='decision_cursor_ratio_range')],
            },
        ),
    ]
