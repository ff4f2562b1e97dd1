"""From a bundle to rows: one walk, noting what it changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Model
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.request import Request

from controlplane.access.actor import project_id_of, visible
from controlplane.access.rules import needed_role
from controlplane.api.bundle import MEMBERS, POOL, SECRET, Kind, followers
from controlplane.api.fields import check_allowed
from controlplane.api.permissions import actor, signed_in_user
from controlplane.errors import ConflictError, InvalidError
from controlplane.models import Pool, Replica, ReplicaState, Rollout, RoutingPolicy, TaskGroup
from controlplane.services.fleet.pools import default_project
from controlplane.services.fleet.replicas import set_replica_state
from controlplane.services.policies.lifecycle import create_policy, publish_revision, remove_policy, save_draft
from controlplane.services.policies.settings import canonical_settings, diff_settings
from controlplane.services.snapshots import single_snapshot


@dataclass(frozen=True, slots=True)
class Change:
    """One field of one object."""

    field: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Action:
    """What applying did to one object, or would do."""

    op: str  # create, change or remove
    kind: str
    name: str
    pool: str
    changes: tuple[Change, ...] = ()


@dataclass(slots=True)
class Applied:
    """What came of a bundle."""

    actions: list[Action] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)


@transaction.atomic
def apply_bundle(
    bundle: Mapping[str, Any], request: Request, *, prune: bool = False, draft: bool = False, reason: str = ""
) -> Applied:
    """Make the fleet what a bundle says; with ``prune`` what it does not name in a list that it gives is removed, and
    with ``draft`` policies are drafted for somebody to publish.

    ValidationError and InvalidError point into the bundle; PermissionDenied for the first action that the sender may
    not do. Either all of it is done or nothing.
    """
    walk = _Walk(request, signed_in_user(request), reason or "applied from a bundle", draft=draft)
    with single_snapshot(reason=walk.reason, by=walk.by):
        found = {pool.name: pool for pool in visible(actor(request), Pool.objects.select_related("project"))}
        wanted = bundle["pools"]
        pools = [walk.pool(wish, found.get(wish.get("name")), ("pools", at)) for at, wish in enumerate(wanted)]
        for key in MEMBERS:
            for at, (pool, wish) in enumerate(zip(pools, wanted, strict=True)):
                walk.members(key, pool, wish.get(key), ("pools", at, key))
        if prune:
            walk.prune(pools, wanted, found)
    for at, (pool, wish) in enumerate(zip(pools, wanted, strict=True)):
        walk.policies(pool, wish, ("pools", at))
    return walk.applied


Path = tuple[str | int, ...]


class _Walk:
    """One application: who asks, and what was done so far."""

    def __init__(self, request: Request, by: User, reason: str, *, draft: bool = False) -> None:
        self.request, self.by, self.reason, self.draft = request, by, reason, draft
        self.applied = Applied()

    def pool(self, wish: Mapping[str, Any], found: Pool | None, path: Path) -> Pool:
        """The pool of that name as it is wished for."""
        own = {name: value for name, value in wish.items() if name not in {*MEMBERS, "policy"}}
        if found is None and "project" not in own:
            check_allowed(self.request, default_project())
        row = self._object(POOL, own, found, path)
        if not isinstance(row, Pool):
            raise TypeError("pools are made of pools")
        return row

    def members(self, key: str, pool: Pool, wishes: list[Mapping[str, Any]] | None, path: Path) -> None:
        """A pool's replicas or groups; none wished for, none touched."""
        kind, rows = MEMBERS[key]
        found = rows(pool)
        for at, wish in enumerate(wishes or []):
            own = {name: value for name, value in wish.items() if name not in {"policy", "state"}}
            row = self._object(kind, own, found.get(wish.get("name", "")), (*path, at), pool=pool)
            if isinstance(row, Replica) and "state" in wish:
                self._state(row, wish["state"], (*path, at, "state"))

    def policies(self, pool: Pool, wish: Mapping[str, Any], path: Path) -> None:
        """The settings in force of a pool and of its groups."""
        if wish.get("policy") is not None:
            self._settings(pool.policies.get(group=None), wish["policy"], (*path, "policy"))
        groups = {group.name: group for group in pool.groups.select_related("pool")}
        for at, one in enumerate(wish.get("groups") or []):
            if "policy" in one:
                self._group_policy(groups[one["name"]], one["policy"], (*path, "groups", at, "policy"))

    def prune(self, pools: list[Pool], wanted: list[Mapping[str, Any]], found: Mapping[str, Pool]) -> None:
        """Remove what the bundle's lists do not name: groups before the replicas that they use, pools last. What
        follows a source stays with it.
        """
        for key in reversed(MEMBERS):
            kind, rows = MEMBERS[key]
            for pool, wish in zip(pools, wanted, strict=True):
                if wish.get(key) is not None:
                    kept = {one["name"] for one in wish[key]} | (followers(pool) if key == "replicas" else set())
                    self._remove(kind, [row for name, row in rows(pool).items() if name not in kept], pool.name)
        gone = [pool for name, pool in found.items() if name not in {wish["name"] for wish in wanted}]
        for pool in gone:
            for key in reversed(MEMBERS):
                kind, rows = MEMBERS[key]
                self._remove(kind, list(rows(pool).values()), pool.name)
        self._remove(POOL, gone)

    def _object(
        self, kind: Kind, wish: Mapping[str, Any], found: Model | None, path: Path, *, pool: Pool | None = None
    ) -> Model:
        placed = {"pool": pool} if pool else {}
        with _within(path):
            if found is None:
                given = self._checked(kind.made, {**wish, **{name: row.name for name, row in placed.items()}})
                row = kind.create(**given, by=self.by)
                self._note("create", kind, row, tuple(Change(name, None, value) for name, value in _told(kind, row)))
                return row
            return self._changed(kind, wish, found)

    def _changed(self, kind: Kind, wish: Mapping[str, Any], found: Model) -> Model:
        before = kind.export(found)
        for name in kind.fixed:
            if name in wish and wish[name] != before[name]:
                raise InvalidError(f"$.{name}", f"is {before[name]} for good")
        said = {name: value for name, value in wish.items() if name not in {"name", *kind.fixed}}
        row = kind.update(found, **self._checked(kind.changed, said, partial=True), by=self.by)
        after = kind.export(row)
        changes = [Change(name, before[name], after[name]) for name in after if after[name] != before[name]]
        changes += [Change(name, SECRET, SECRET) for name in said if name not in after]
        if changes:
            self._note("change", kind, row, tuple(changes))
        return row

    def _state(self, replica: Replica, wanted: Any, path: Path) -> None:
        with _within(path):
            if wanted not in ReplicaState.values:
                raise InvalidError("$", f"expected one of {', '.join(ReplicaState.values)}")
        if wanted != replica.state:
            change = Change("state", str(replica.state), wanted)
            set_replica_state(replica, ReplicaState(wanted), by=self.by)
            self._allow("api:replica-state", "POST", replica)
            self.applied.actions.append(Action("change", "replica", replica.name, replica.pool.name, (change,)))

    def _group_policy(self, group: TaskGroup, wish: Any, path: Path) -> None:
        policy = RoutingPolicy.objects.select_related("pool").filter(group=group).first()
        if wish is not None:
            if policy is None:
                self._allow("api:policy-list", "POST", group)
                policy = create_policy(group.pool, group)
            self._settings(policy, wish, path)
        elif policy is not None:
            self._allow("api:policy-detail", "DELETE", policy)
            remove_policy(policy, by=self.by)
            self.applied.actions.append(Action("remove", "policy", policy.name, group.pool.name))

    def _settings(self, policy: RoutingPolicy, wish: Any, path: Path) -> None:
        """Publish or draft what is wished for, unless it was before."""
        with _within(path, instead_of="$.settings"):
            settings = canonical_settings(wish)
        live, trial, draft = policy.live(), policy.canary(), policy.draft()
        if any(one is not None and one.settings == settings for one in (live, trial)):
            return  # it is in force, or on its way there
        if draft is not None and draft.settings != settings:
            raise ConflictError(
                f"Policy {policy.name} has a draft that says something else; publish or discard it first."
            )
        if self.draft and draft is not None:
            return
        self._allow(*(("api:policy-draft", "PUT") if self.draft else ("api:policy-publish", "POST")), policy)
        draft = save_draft(policy, settings, by=self.by, reason=self.reason)
        if not self.draft:
            self.applied.rollouts.append(publish_revision(draft.pk, by=self.by, reason=self.reason))
        changes = diff_settings(live.settings if live else None, settings)
        told = tuple(Change(one.field, one.before, one.after) for one in changes)
        op, noun = "change" if live else "create", "draft" if self.draft else "policy"
        self.applied.actions.append(Action(op, noun, policy.name, policy.pool.name, told))

    def _remove(self, kind: Kind, rows: list[Any], pool: str = "") -> None:
        for row in rows:
            self._allow(f"{kind.route}-detail", "DELETE", row)
            kind.remove(row, by=self.by)
            self.applied.actions.append(Action("remove", kind.noun, row.name, pool or row.name))

    def _note(self, op: str, kind: Kind, row: Any, changes: tuple[Change, ...]) -> None:
        """An action that was done, unless its sender may not do it: then all of it is undone."""
        route, method = (f"{kind.route}-list", "POST") if op == "create" else (f"{kind.route}-detail", "PATCH")
        self._allow(route, method, row)
        pool = row.name if isinstance(row, Pool) else row.pool.name
        self.applied.actions.append(Action(op, kind.noun, row.name, pool, changes))

    def _allow(self, route: str, method: str, row: Model) -> None:
        needed = needed_role(route, method)
        if needed is None or not actor(self.request).may(needed, project_id_of(row)):
            raise PermissionDenied(f"The bundle changes {row._meta.verbose_name} {row}, which takes the role {needed}.")  # noqa: SLF001 - Django's name

    def _checked(self, kind: Any, said: Mapping[str, Any], *, partial: bool = False) -> dict[str, Any]:
        """What a bundle says of an object as a service's arguments."""
        serializer = kind(data=said, partial=partial, context={"request": self.request})
        if unknown := sorted(set(said) - set(serializer.fields)):
            raise ValidationError({name: ["There is no such field."] for name in unknown})
        serializer.is_valid(raise_exception=True)
        return dict(serializer.validated_data)


def _told(kind: Kind, row: Model) -> Iterator[tuple[str, Any]]:
    """What is worth saying of something new."""
    return (
        (name, value) for name, value in kind.export(row).items() if value not in (None, "", [], {}) and name != "name"
    )


@contextmanager
def _within(path: Path, *, instead_of: str = "$") -> Iterator[None]:
    """Faults of an object, told where in the bundle they are."""
    try:
        yield
    except ValidationError as error:
        detail: Any = error.detail
        for step in reversed(path):
            detail = {step: detail}
        raise ValidationError(detail) from None
    except InvalidError as error:
        place = "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
        raise error.within(place, instead_of=instead_of) from None
