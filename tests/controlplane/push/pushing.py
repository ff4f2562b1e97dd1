"""What tests of pushes do, and what they ask afterwards."""

from controlplane.models import ConfigSnapshot, Rollout, Router, RoutingPolicy
from controlplane.services.policies.lifecycle import publish_revision, save_draft
from tests.fakes.fake_router import FakeRouter


def newest() -> int:
    """The number of the configuration that routers ought to run."""
    return ConfigSnapshot.objects.first().number


def publish(policy: RoutingPolicy, load_factor: float = 2.0) -> Rollout:
    """Publish another revision."""
    return publish_revision(save_draft(policy, {"strategy": "prefix_hash", "load_factor": load_factor}).pk)


def row(router: FakeRouter) -> Router:
    """What the control plane knows of it."""
    return Router.objects.get(name=router.name)


def later() -> None:
    """Let every pause between tries be over."""
    Router.objects.update(push_after=None)
