"""No table grows without end: 400 days of an autoscaled fleet of 1,000 replicas, at a tenth of its rates."""

from datetime import timedelta

import pytest
from django.apps import apps
from django.db import connection
from django.utils import timezone

from controlplane.models import ConfigSnapshot, Event, PolicyRevision, Replica, Rollout, Router, RouterReport
from controlplane.services.fleet.pools import create_pool
from controlplane.services.snapshots import freeze_snapshot, snapshot_document
from controlplane.tasks import clean_up
from telemetry.models import Alert, AlertHistoryEntry, AlertRule, DeliveryAttempt, Notification, Silence
from telemetry.services.notifications.channels import create_channel
from telemetry.tasks import maintain_partitions

pytestmark = pytest.mark.django_db
DAYS = 400
A_DAY = {"events": 120, "removals": 30, "reports": 100, "configurations": 6, "alerts": 4}

# Tables whose rows end by time: by services/retention.py of both packages, with the rows that they describe, or with a
# partition.
END_BY_TIME = {
    "alert", "alerthistoryentry", "auditcheck", "breakdownbin", "configsnapshot", "decision", "deliveryattempt",
    "event", "idempotencyrecord", "itemfailure", "notification", "reading", "replaystate", "rolluprepair",
    "routerreading", "routerreport", "sharedlink", "shortlink", "signinlock", "silence", "usersession", "whatif",
}  # fmt: skip
# Tables with a row for each thing that exists now.
ONE_EACH = {
    "alertrule", "apitoken", "bucketlayout", "capacitycurve", "channel", "clientkey", "decisioncursor",
    "discoveredreplica", "evaluationstate", "fleetsecret", "fleetsettings", "heartbeat", "metricsserver", "outboxstate",
    "pool", "project",
    "readpool", "replica", "replicasource", "roleassignment", "rollupstate", "router", "routingpolicy", "scrapeshard",
    "scrapestate", "taskgroup", "workerliveness",
}  # fmt: skip
BY_USERS = {
    "auditentry",
    "policyrevision",
    "rollout",
    "rollouthistoryentry",
    "savedview",
}  # what users did; docs/scaling.md


def generate(sql, **parameters):
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)


def rows(table, columns, values, per_day, **parameters):
    """Insert rows of equal values, spread over the days; ``at`` is their time, ``n`` their number from 1."""
    generate(
        f"insert into {table} ({columns}) select {values} from generate_series(1, %(count)s) n,"
        " lateral (select %(now)s::timestamptz - (%(count)s - n) * interval '1 day' / %(rate)s as at) times",
        now=timezone.now(), count=per_day * DAYS, rate=per_day, **parameters,
    )  # fmt: skip


@pytest.fixture
def old_fleet(receiver):
    """A fleet with 400 days of history."""
    pool = create_pool("chat", models=["m"])
    rule, channel = AlertRule.objects.filter(pool=pool).first(), create_channel("ops", config={"url": receiver.url})
    rule = rule or AlertRule.objects.create(pool=pool, name="rule", kind="replica_down")
    router = Router.objects.create(
        name="r", admin_url="http://127.0.0.1:1", boot="b", last_seen_at=timezone.now(), running_number=3
    )
    event = "at, kind, summary, detail, pool_id"
    for _ in range(2):  # the second time with statistics of tables that were emptied: "one row"
        for table in ("controlplane_event", "controlplane_routerreport", "controlplane_configsnapshot"):
            generate(f"delete from {table}")
            generate(f"analyze {table}")
        rows("controlplane_event", event, "at, 'replica_up', 'up', '{}', %(pool)s", A_DAY["events"], pool=pool.pk)
    removed = "at, 'replica_removed', 'removed', jsonb_build_object('replica_id', n), %(pool)s"
    rows("controlplane_event", event, removed, A_DAY["removals"], pool=pool.pk)
    report = "router_id, boot, seq, taken_at"
    rows("controlplane_routerreport", report, "%(router)s, 'b', n, at", A_DAY["reports"], router=router.pk)
    frozen = "n + 1000, 'x', '{}', ''::bytea, '', at"
    config = "number, sha256, document, encrypted, reason, created_at"
    rows("controlplane_configsnapshot", config, frozen, A_DAY["configurations"])
    alert = (
        "rule_id, pool_id, subject, state, severity, started_at, last_breach_at, fired_at, resolved_at, summary, detail"
    )
    values = "%(rule)s, %(pool)s, '', 'resolved', 'warning', at, at, at, at, '', '{}'"
    rows("telemetry_alert", alert, values, A_DAY["alerts"], rule=rule.pk, pool=pool.pk)
    generate(
        "insert into telemetry_alerthistoryentry (alert_id, at, transition, note)"
        " select id, started_at, 'fired', '' from telemetry_alert, generate_series(1, 4)"
    )
    generate(
        "insert into telemetry_notification (id, alert_id, alert_ids, channel_id, kind, payload, state, attempts,"
        " next_at, created_at, finished_at) select gen_random_uuid(), id, array[id], %(channel)s, kind, '{}',"
        " 'delivered', 1, started_at, started_at, started_at"
        " from telemetry_alert, unnest(array['firing', 'resolved']) kind",
        channel=channel.pk,
    )
    generate(
        "insert into telemetry_deliveryattempt (notification_id, number, started_at, error)"
        " select id, 1, created_at, '' from telemetry_notification"
    )
    return pool


def test_400_days_of_a_large_fleet_are_bounded(old_fleet, settings):
    """Tables hold what their retention says, and the next run of the tasks deletes nothing more."""
    assert Event.objects.count() > DAYS * A_DAY["events"]

    for _ in range(DAYS * A_DAY["configurations"] // 500 + 1):  # a run deletes a bounded number
        clean_up()
    maintain_partitions()

    events, alerts = settings.EVENTS_RETENTION_DAYS, settings.ALERTS_RETENTION_DAYS
    bounds = {
        Event.objects.filter(kind="replica_up"): events * A_DAY["events"],
        Event.objects.filter(kind="replica_removed"): settings.ROLLUP_RETENTION_DAYS[3600] * A_DAY["removals"],
        RouterReport.objects.all(): 30 * A_DAY["reports"],
        ConfigSnapshot.objects.all(): settings.CONFIGURATIONS_RETENTION_DAYS * A_DAY["configurations"] + 2,
        Alert.objects.all(): alerts * A_DAY["alerts"],
        AlertHistoryEntry.objects.all(): alerts * A_DAY["alerts"] * 4,
        Notification.objects.all(): alerts * A_DAY["alerts"] * 2,
        DeliveryAttempt.objects.all(): alerts * A_DAY["alerts"] * 2,
    }
    counted = {found.query.model.__name__: (found.count(), bound) for found, bound in bounds.items()}
    assert all(0 < count <= bound + 5 for count, bound in counted.values()), counted
    assert all(count >= 0.98 * bound - 5 for count, bound in counted.values()), counted  # and nothing ends too early


def test_configurations_that_routers_run_and_messages_about_open_alerts_stay(old_fleet):
    numbers = ConfigSnapshot.objects.order_by("number").values_list("number", flat=True)
    oldest, sent = numbers[0], numbers[5]
    Router.objects.update(running_number=oldest, pushed_number=sent)
    open_alert = Alert.objects.order_by("started_at").first()
    Alert.objects.filter(pk=open_alert.pk).update(state="firing", resolved_at=None)

    for _ in range(6):
        clean_up()
    maintain_partitions()

    assert set(ConfigSnapshot.objects.order_by("number").values_list("number", flat=True)[:2]) == {oldest, sent}
    assert Notification.objects.filter(alert=open_alert).count() == 2


def test_silences_end_with_the_alerts_that_they_suppressed(settings):
    now, retention = timezone.now(), timedelta(days=settings.ALERTS_RETENTION_DAYS)
    for ended_at in (now - retention - timedelta(hours=1), now - retention + timedelta(hours=1), now + timedelta(1)):
        Silence.objects.create(matchers=[], starts_at=now - 2 * retention, ends_at=ended_at, comment=f"{ended_at:%F}")

    maintain_partitions()

    assert Silence.objects.filter(ends_at__gt=now - retention).count() == Silence.objects.count() == 2


def test_an_ended_rollout_outlives_the_configuration_with_which_it_began(old_fleet):
    revision = PolicyRevision.objects.get(policy__pool=old_fleet)
    configurations = list(ConfigSnapshot.objects.order_by("number")[:2])
    ended, is_open = (
        revision.rollouts.create(state=state, snapshot=snapshot, finished_at=finished_at)
        for (state, finished_at), snapshot in zip(
            (("complete", timezone.now()), ("progressing", None)), configurations, strict=True
        )
    )

    for _ in range(6):
        clean_up()

    assert Rollout.objects.get(pk=ended.pk).snapshot is None
    assert Rollout.objects.get(pk=is_open.pk).snapshot == configurations[1]
    assert not ConfigSnapshot.objects.filter(pk=configurations[0].pk).exists()


def test_a_configuration_of_1000_replicas_takes_little_space():
    pool = create_pool("chat", models=["m"])
    urls = {f"gpu-{number}": f"http://10.0.{number // 250}.{number % 250}:8000" for number in range(1, 1000)}
    Replica.objects.bulk_create(Replica(pool=pool, name=name, url=url) for name, url in urls.items())
    snapshot = freeze_snapshot(reason="a thousand replicas")

    document = snapshot_document(snapshot)
    assert len(document) > 100_000
    assert len(bytes(snapshot.encrypted)) < len(document) / 5


def test_every_table_has_a_bound():
    """A new model is listed in one of the sets above."""
    models = {
        model._meta.model_name
        for app in ("controlplane", "telemetry")
        for model in apps.get_app_config(app).get_models()
    }
    assert models ^ (END_BY_TIME | ONE_EACH | BY_USERS) == set()
