"""Twenty users edit one policy at once; no change is lost silently."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connection

from controlplane.errors import ConflictError
from controlplane.services.policies.lifecycle import publish_revision, save_draft

EDITORS = 20
CONNECTIONS = threading.BoundedSemaphore(8)  # each more costs conflicts, whose number grows with its square
pytestmark = pytest.mark.django_db(transaction=True)


def add_one(policy) -> int:
    """Increment a setting with optimistic locking; number of conflicts."""
    for conflicts in range(10_000):
        live = policy.live()
        settings = {"strategy": "prefix_hash", "slack_s": live.settings["slack_s"] + 1}
        try:
            draft = save_draft(policy, settings, based_on=live.number)
            publish_revision(draft.pk, expected_digest=draft.digest)
        except ConflictError:
            continue
        return conflicts
    raise AssertionError("no attempt succeeded")


def test_each_of_twenty_concurrent_changes_is_kept(policy):
    publish_revision(save_draft(policy, {"strategy": "prefix_hash", "slack_s": 1.0}).pk)

    def edit(_: int) -> int:
        with CONNECTIONS:
            try:
                return add_one(policy)
            finally:
                connection.close()

    with ThreadPoolExecutor(EDITORS) as threads:
        conflicts = list(threads.map(edit, range(EDITORS), timeout=200))
    assert policy.live().settings["slack_s"] == 1.0 + EDITORS
    factors = [
        revision.settings["slack_s"]
        for revision in policy.revisions.order_by("number")
        if revision.settings["strategy"] == "prefix_hash"
    ]
    assert factors == [float(number) for number in range(1, EDITORS + 2)]
    assert sum(conflicts) > 0, "no two editors conflicted"
