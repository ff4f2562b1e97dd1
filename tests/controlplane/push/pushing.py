"""Helpers of push tests: publish, read rows, and end pauses."""

from controlplane.models import ConfigSnapshot, Rollout, Router, RoutingPolicy
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from tests.fakes.fake_router import FakeRouter


def newest() -> int:
    """The number of the newest configuration."""
    return ConfigSnapshot.objects.first().number


def publish(policy: RoutingPolicy, slack_s: float = 2.0) -> Rollout:
    """Publish another revision."""
    return publish_revision(save_draft(policy, {"strategy": "prefix_hash", "slack_s": slack_s}).pk)


def row(router: FakeRouter) -> Router:
    """The router's row in the database."""
    return Router.objects.get(name=router.name)


def end_pauses() -> None:
    """End every pause between push attempts."""
    Router.objects.update(push_after=None)
