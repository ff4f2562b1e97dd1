"""Policies: a policy's revision in force, and the next one that is tried beside it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

from msgspec import Meta

from routing.schema.base import ConfigError, Frozen, Name
from routing.schema.strategies import Settings

Revision = Annotated[int, Meta(ge=1)]  # 1, 2, 3 ... within the policy


class Trial(Frozen, frozen=True):
    """A policy's next revision, tried on some of its requests before it replaces the revision in force.

    A request's place in the prefix space decides, so that one prefix's requests stay together; a request without a
    prompt is never tried. Who is in stays in when ``share`` grows.
    """

    revision: Revision
    settings: Settings
    share: Annotated[
        float,
        Meta(gt=0, le=1, description="Part of the prefix space that is tried.", extra={"unit": "ratio"}),
    ] = 1.0
    routers: tuple[Name, ...] | None = None  # on these routers only; None: on all
    groups: tuple[Name, ...] | None = None  # for these task groups only; None: for all that the policy places


class PolicyConfig(Frozen, frozen=True, omit_defaults=True):
    """A policy's revision in force. ``name`` and ``revision`` label every figure that it produces.

    A trial that there is not is left out of what is written, so that routers which know no trials read it all the same.
    """

    name: Name
    revision: Revision
    settings: Settings
    trial: Trial | None = None


def check_trial(policy: PolicyConfig, path: str, groups: Collection[str] | None) -> None:
    """A trial of another revision, for somebody; ConfigError otherwise.

    ``groups`` are the task groups that a pool's policy places; None: the policy is a task group's own.
    """
    trial = policy.trial
    if trial is None:
        return
    if trial.revision == policy.revision:
        raise ConfigError(f"{path}.trial.revision", f"revision {trial.revision} is in force; only another can be tried")
    if trial.routers == ():
        raise ConfigError(f"{path}.trial.routers", "a trial on no router tries nothing; use null for all")
    if trial.groups is None:
        return
    if groups is None:
        reason = "only a pool's policy places several task groups; leave groups out of a task group's own"
        raise ConfigError(f"{path}.trial.groups", reason)
    if trial.groups == ():
        raise ConfigError(f"{path}.trial.groups", "a trial for no task group tries nothing; use null for all")
    for at, name in enumerate(trial.groups):
        if name not in groups:
            reason = f"the pool's policy places no task group {name!r}: the pool has none, or it has its own policy"
            raise ConfigError(f"{path}.trial.groups[{at}]", reason)
