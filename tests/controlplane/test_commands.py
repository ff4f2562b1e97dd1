import re
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from controlplane.management.commands.seed_fleet import DEMO_GROUPS
from controlplane.models import ApiToken, ConfigSnapshot, Pool, Replica, TaskGroup
from controlplane.services.access.tokens import find_token

pytestmark = pytest.mark.django_db
URLS = ["http://127.0.0.1:9101", "http://127.0.0.1:9102/"]


@pytest.fixture(autouse=True)
def no_password(monkeypatch):
    monkeypatch.delenv("WARMPATH_ADMIN_PASSWORD", raising=False)


def output_of(command, *arguments):
    out = StringIO()
    call_command(command, *arguments, stdout=out)
    return out.getvalue()


def test_the_demo_has_the_strategy_of_a_new_pool_and_task_groups():
    output_of("seed_fleet", "--demo", "--replica", URLS[0], "--replica", URLS[1])
    assert set(TaskGroup.objects.values_list("name", flat=True)) == set(DEMO_GROUPS)
    assert Pool.objects.get(name="default").policies.get(group=None).live().strategy == "lowest_cost"
    assert set(Replica.objects.values_list("url", flat=True)) == {"http://127.0.0.1:9101", "http://127.0.0.1:9102"}
    assert len(ConfigSnapshot.objects.first().document["pools"][0]["replicas"]) == 2


def test_seeding_is_idempotent():
    output_of("seed_fleet", "--replica", *URLS)
    before = ConfigSnapshot.objects.count()
    assert "Added" not in output_of("seed_fleet", "--replica", URLS[0])
    assert (ConfigSnapshot.objects.count(), Replica.objects.count()) == (before, 2)


def test_the_administrators_password_is_generated_and_printed_once(client, django_user_model):
    password = re.search(r"password (\S+)", output_of("seed_fleet")).group(1)
    assert len(password) >= 16
    assert django_user_model.objects.get(username="admin").check_password(password)
    assert "password" not in output_of("seed_fleet")


def test_a_configured_password_is_used_and_not_printed(monkeypatch, django_user_model):
    monkeypatch.setenv("WARMPATH_ADMIN_PASSWORD", "given by the operator")
    assert output_of("seed_fleet") == ""
    assert django_user_model.objects.get(username="admin").check_password("given by the operator")


@pytest.mark.parametrize("url", ["ftp://x", "http://", "gpu-1:8000", "http://gpu-1:8000/?x=1"])
def test_an_invalid_url_stops_seeding(url):
    with pytest.raises(CommandError, match=re.escape("$.url")):
        call_command("seed_fleet", "--replica", url, stdout=StringIO())
    assert not Pool.objects.exists()


def test_colliding_replica_names_get_a_number():
    output_of("seed_fleet", "--replica", "http://gpu-1:8000", "https://gpu-1:8000", "http://gpu-1:8000/b")
    assert sorted(Replica.objects.values_list("name", flat=True)) == ["gpu-1-8000", "gpu-1-8000-2", "gpu-1-8000-b"]


def test_create_token_prints_a_valid_token(operator):
    text = output_of("create_token", "olga", "--scope", "write", "--days", "1").strip()
    assert find_token(text).user == operator
    assert ApiToken.objects.get().scopes == ["write"]


def test_create_token_rejects_an_unknown_user():
    with pytest.raises(CommandError, match="nobody"):
        call_command("create_token", "nobody")
