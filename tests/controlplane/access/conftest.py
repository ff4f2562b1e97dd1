"""Two projects with one object of every kind, and users with each role."""

import copy
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.contrib.auth.models import User
from django.utils import timezone

from controlplane.models import DiscoveredReplica, Role
from controlplane.services.access.users import set_role
from controlplane.services.discovery.sources import create_source
from controlplane.services.fleet.client_keys import create_client_key
from controlplane.services.fleet.pools import create_pool, create_project
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.services.policies.lifecycle import create_policy, save_draft
from controlplane.services.routers import announce
from telemetry.models import Alert, AlertRule, Notification
from telemetry.services.alerts.alerts import create_silence
from telemetry.services.lab.what_ifs import create_what_if
from telemetry.services.metrics_servers import create_server
from telemetry.services.navigation import create_shared_link
from telemetry.services.notifications.channels import create_channel
from telemetry.services.notifications.channels import test_send as send_test_notification
from telemetry.services.notifications.heartbeats import set_heartbeat
from tests.controlplane.rollouts import publish_stages


def create_project_with_objects(name, number):
    """A project with one object of every kind; their names start with the project's."""
    project = create_project(name)
    pool = create_pool(f"{name}-pool", project=project, models=[name], strategy="round_robin")
    replica = add_replica(pool, name=f"{name}-replica", url=f"http://10.0.{number}.1:8000")
    source = create_source(pool, name=f"{name}-source", kind="dns", settings={"host": f"{name}.test"})
    discovered = DiscoveredReplica.objects.create(source=source, key=f"{name}-pod", name="x", url="http://10.0.3.1:80")
    rollout = publish_stages(pool.policies.get())
    group = create_task_group(pool, f"{name}-group")
    policy = create_policy(pool, group)
    draft = save_draft(policy, {"strategy": "random"})
    rule = AlertRule.objects.filter(pool=pool).first()
    alert = Alert.objects.create(
        rule=rule, pool=pool, state="firing", started_at=pool.created_at, last_breach_at=pool.created_at
    )
    silence = create_silence(
        matchers=[{"label": "pool", "op": "=", "value": pool.name}],
        ends_at=timezone.now() + timedelta(hours=1),
        comment="work",
        project=project,
    )
    channel = create_channel(f"{name}-channel", config={"url": "https://hooks.example/x"})
    notification = Notification.objects.create(
        alert=alert,
        channel=channel,
        kind="firing",
        state="failed",
        payload={"data": {}},
        next_at=pool.created_at,
        created_at=pool.created_at,
    )
    set_heartbeat(url="https://watch.example/secret", every_s=60)
    server = create_server(name=f"{name}-server", url="http://127.0.0.1:1", pools=[pool])
    router = announce(name=f"router-{number}", boot="b", admin_url=f"http://10.0.{number}.9:8081")
    what_if = create_what_if(pool, [{"name": "a", "replicas": 2}])
    maker = User.objects.create(username=f"{name}-maker")
    shared, _ = create_shared_link(pool, "range=1h", valid=timedelta(days=1), by=maker, now=timezone.now())
    key, _ = create_client_key(project, f"{name}-key", groups=[f"{name}-group"])
    return SimpleNamespace(
        router=router,
        key=key,
        shared=shared,
        project=project,
        pool=pool,
        replica=replica,
        source=source,
        discovered=discovered,
        group=group,
        policy=policy,
        rollout=rollout,
        draft=draft,
        rule=rule,
        alert=alert,
        silence=silence,
        channel=channel,
        server=server,
        notification=notification,
        what_if=what_if,
    )


@pytest.fixture(scope="module")
def stored_projects(once_for_module):
    """The objects of both projects, stored once for a module."""
    return once_for_module(store_two_projects)


def store_two_projects():
    here, there = create_project_with_objects("here", 1), create_project_with_objects("there", 2)
    send_test_notification(there.channel)
    return here, there


@pytest.fixture
def here(stored_projects, db):
    """The project in which users have roles."""
    return copy.deepcopy(stored_projects[0])


@pytest.fixture
def there(stored_projects, db):
    """A project in which users have no role."""
    return copy.deepcopy(stored_projects[1])


@pytest.fixture
def user_with(django_user_model, here):
    """Creates a user with a role in ``here``, or with ``everywhere`` in all projects."""

    def make(role, *, everywhere=False):
        user = django_user_model.objects.create_user(f"{role}-{everywhere}".lower(), password="a long enough password")
        if role is not None:
            set_role(user, Role(role), None if everywhere else here.project)
        return user

    return make
