"""Publishing by stages and controlling rollouts from the command line."""

import pytest

from controlplane.models import ConfigSnapshot, Rollout
from controlplane.services.policies.rollouts import advance_rollouts
from controlplane.services.routers import announce, record_ack

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def draft(warmpath, policy):
    """A draft of pool ``default``'s policy."""
    assert warmpath("draft", "default", "-s", "strategy=prefix_hash").status == 0
    return policy


@pytest.fixture
def router(draft):
    """A function that acknowledges the newest configuration as a router."""
    registered = announce(name="router-1", boot="b", version="1", admin_url="http://127.0.0.1:9")

    def acknowledge():
        newest = ConfigSnapshot.objects.order_by("-number").first()
        record_ack(registered.pk, number=newest.number, sha256=newest.sha256)
        advance_rollouts()

    return acknowledge


def start_rollout(warmpath):
    """Publish the draft by shares; the rollout's id."""
    arguments = ("publish", "default", "--reason", "a try", "--plan", "by_share", "--no-wait")
    return str(warmpath("--json", *arguments).json["id"])


def test_a_canary_is_paused_resumed_promoted_and_watched(warmpath, router, policy):
    number = start_rollout(warmpath)
    router()
    shown = warmpath("rollout", "show", number).out
    assert "default r2: progressing; step 1 of" in shown
    assert "1 of 1 routers run it" in shown
    for move, state in (("pause", "paused"), ("resume", "progressing")):
        assert warmpath("--json", "rollout", move, number, "--reason", "looking").json["state"] == state
    while Rollout.objects.get().is_open:
        assert warmpath("rollout", "promote", number, "--reason", "looks good").status == 0
        router()
    ended = warmpath("rollout", "watch", number)
    assert (ended.status, policy.live().number) == (0, 2)
    assert ended.err == "default r2: complete; step 3 of 3; 1 of 1 routers run it\n"


def test_an_aborted_rollout_exits_with_4(warmpath, router, policy):
    number = start_rollout(warmpath)
    assert warmpath("rollout", "abort", number, "--reason", "it looks bad").status == 0
    assert warmpath("rollout", "watch", number).status == 4
    assert "it looks bad" in warmpath("rollout", "show", number).out
    assert policy.live().number == 1
    assert warmpath("rollout", "abort", number, "--reason", "again").status == 1
    assert [row["state"] for row in warmpath("--json", "rollout", "list", "--policy", "default").json] == ["aborted"]


def test_watching_ends_at_the_deadline(warmpath, router):
    number = start_rollout(warmpath)
    assert warmpath("rollout", "watch", number, "--for", "0").status == 4


def test_stages_and_guard_limits_are_options(warmpath, draft, tmp_path):
    (tmp_path / "stages.yaml").write_text("- {share: 0.1, observe_s: 60}\n")
    stages = ("--stages", str(tmp_path / "stages.yaml"))
    limits = ("--guard", "max_hit_rate_drop=0.1", "--guard", "max_error_ratio=null")
    result = warmpath("--json", "publish", "default", "--reason", "x", *stages, *limits, "--no-wait").json
    assert [stage["share"] for stage in result["stages"]] == [0.1, 1.0]
    assert (result["guard"]["max_hit_rate_drop"], result["guard"]["max_error_ratio"]) == (0.1, None)

    assert warmpath("publish", "default", "--reason", "x", "--no-guard", "--guard", "min_requests=1").status == 2
    (tmp_path / "stages.yaml").write_text("share: 1\n")
    assert warmpath("publish", "default", "--reason", "x", *stages).status == 2
