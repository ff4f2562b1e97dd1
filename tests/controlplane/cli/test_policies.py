"""Drafts, publications and rollouts from the command line."""

import pytest

from controlplane.services.fleet.pools import update_pool

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_draft_replaces_some_active_settings(warmpath, policy):
    assert warmpath("draft", "default", "-s", "strategy=prefix_hash", "-s", "slack_s=1.5").status == 0
    assert policy.draft().settings["slack_s"] == 1.5
    assert "slack_s" in warmpath("diff", "default").out
    published = warmpath("--json", "publish", "default", "--reason", "shared prompts", "--no-wait").json
    assert (published["revision"], policy.live().reason) == (2, "shared prompts")

    warmpath("draft", "default", "-s", "boundary_bytes=256")
    assert (policy.draft().settings["slack_s"], policy.draft().settings["boundary_bytes"]) == (1.5, 256)


def test_an_invalid_setting_is_named(warmpath, policy):
    result = warmpath("draft", "default", "-s", "strategy=prefix_hash", "-s", "slack_s=-1")
    assert result.status == 1
    assert "#/settings/slack_s" in result.err
    assert warmpath("draft", "default", "-s", "slack_s").status == 2


def test_reverting_asks_for_the_policy_name(warmpath, policy):
    warmpath("draft", "default", "-s", "strategy=random")
    warmpath("publish", "default", "--reason", "a try", "--no-wait")
    assert warmpath("revert", "default", "1", "--no-wait", stdin="wrong\n").status == 1
    assert policy.live().strategy == "random"
    assert warmpath("revert", "default", "1", "--no-wait", stdin="default\n").status == 0
    assert (policy.live().number, policy.live().strategy, policy.live().reason) == (
        3,
        "round_robin",
        "Back to revision 1.",
    )
    assert warmpath("revert", "default", "9", "--yes").status == 1


def test_settings_that_an_alert_named_need_a_flag(warmpath, policy):
    warmpath("draft", "default", "-s", "strategy=random")
    warmpath("publish", "default", "--reason", "a try", "--no-wait")
    policy.revisions.filter(number=1).update(fault="alert", fault_alert=7)
    refused = warmpath("revert", "default", "1", "--yes", "--no-wait")
    assert (refused.status, "was named by alert 7" in refused.err) == (1, True)
    assert warmpath("revert", "default", "1", "--yes", "--no-wait", "--confirm-faulted").status == 0
    assert policy.live().number == 3


def test_a_capacity_sweep_is_queued_for_the_pools_size(warmpath, replica):
    queued = warmpath("--json", "what-if", "default", "--sweep", "--no-wait")
    assert (queued.status, queued.json["state"]) == (0, "queued")
    missing = warmpath("what-if", "default", "--no-wait")
    assert missing.status == 2
    assert "--sweep" in missing.err


def test_a_required_prediction_is_asked_for_or_overridden_with_a_reason(warmpath, policy):
    update_pool(policy.pool, what_if={"mode": "require"})
    assert warmpath("what-if", "default", "--draft").status == 1
    warmpath("draft", "default", "-s", "strategy=random")
    assert "No what-if of exactly these settings" in warmpath("diff", "default").err
    refused = warmpath("publish", "default", "--reason", "a try", "--no-wait")
    assert refused.status == 1
    assert "requires a prediction" in refused.err

    created = warmpath("--json", "what-if", "default", "--draft", "--no-wait")
    assert created.status == 0, created.err
    assert "is queued" in warmpath("publish", "default", "--reason", "a try", "--no-wait").err
    options = ("--override-reason", "no traffic yet", "--no-wait")
    assert warmpath("publish", "default", "--reason", "a try", *options).status == 0
    assert policy.live().strategy == "random"
