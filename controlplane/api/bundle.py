"""The fleet as one document: exporting a bundle, and applying one in a single transaction.

Equal fleets export equal bytes: everything is ordered by name. A bundle's objects have the fields of their own URLs,
and each action needs the role that its own URL needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Model, Prefetch
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from controlplane.access.actor import Actor, project_id_of, visible
from controlplane.access.rules import needed_role
from controlplane.api.auth import actor, signed_in_user
from controlplane.api.exceptions import PreconditionRequiredError, VersionChangedError
from controlplane.api.fields import check_unknown_fields
from controlplane.api.serializers.bundle import (
    Action,
    Applied,
    AppliedSerializer,
    BundleSerializer,
    Change,
    Path,
    check_shape,
    nested_error,
)
from controlplane.api.views import TransactionalView, has_if_match, if_match_holds, query_flag
from controlplane.api.viewsets import fleet
from controlplane.api.viewsets.base import CrudViewSet
from controlplane.database.transactions import repeatable_read
from controlplane.errors import ConflictError, InvalidError
from controlplane.models import (
    PolicyRevision,
    Pool,
    Replica,
    ReplicaSource,
    ReplicaState,
    RevisionState,
    RoutingPolicy,
    TaskGroup,
)
from controlplane.services.fleet.replicas import set_replica_state
from controlplane.services.policies.lifecycle import create_policy, publish_revision, remove_policy, save_draft
from controlplane.services.policies.settings import are_equal_settings, canonical_settings, diff_settings
from controlplane.services.snapshots import single_snapshot

FORMAT = 1
SECRET_PLACEHOLDER = "(a secret)"  # noqa: S105 - shown instead of a secret


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object. Its serializers and services are those of its viewset, so bundles get new fields too."""

    name: str
    route: str  # prefix of its route names in the rule table
    viewset: type[CrudViewSet[Any]]
    immutable: tuple[str, ...] = ()  # set on creation, never changed
    nesting: tuple[str, ...] = ("pool",)  # fields that follow from the position in the bundle

    def export(self, row: Model) -> dict[str, Any]:
        """The row's fields that a bundle may set, except secrets."""
        serializer_class: Any = self.viewset.serializer_class
        representation = serializer_class(row).data
        names = (name for name in self.viewset.create_input().get_fields() if name not in self.nesting)
        return {name: _plain(representation[name]) for name in names if name in representation}


def _plain(value: Any) -> Any:
    """DRF's ordered types as plain dicts and lists."""
    if isinstance(value, Mapping):
        return {name: _plain(member) for name, member in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


POOL = Kind("pool", "api:pool", fleet.PoolViewSet, immutable=("project",), nesting=())
REPLICA = Kind("replica", "api:replica", fleet.ReplicaViewSet)
GROUP = Kind("task group", "api:task-group", fleet.TaskGroupViewSet)
SOURCE = Kind("replica source", "api:replica-source", fleet.SourceViewSet, immutable=("kind",))

# The members of a pool by the bundle's key: their kind and rows. Dependencies come first.
MEMBERS: dict[str, tuple[Kind, Callable[[Pool], Mapping[str, Replica | TaskGroup | ReplicaSource]]]] = {
    "replicas": (REPLICA, lambda pool: {row.name: row for row in pool.replicas.select_related("pool")}),
    "groups": (GROUP, lambda pool: {row.name: row for row in pool.groups.select_related("pool")}),
    "sources": (SOURCE, lambda pool: {row.name: row for row in pool.sources.select_related("pool")}),
}


# --- export -----------------------------------------------------------------------------------------------


def read_pools(actor: Actor) -> list[Pool]:
    """The pools that the actor may see with all their members, in one snapshot. A fixed number of queries."""
    live = PolicyRevision.objects.filter(state=RevisionState.LIVE)
    policies = RoutingPolicy.objects.prefetch_related(Prefetch("revisions", live, to_attr="active"))
    groups = TaskGroup.objects.order_by("name").select_related("pool")
    static_replicas = Replica.objects.filter(discovered=None)  # the others are discovered again by their source
    rows = visible(actor, Pool.objects.order_by("name").select_related("project")).prefetch_related(
        Prefetch("replicas", static_replicas.order_by("name").select_related("pool")),
        Prefetch("sources", ReplicaSource.objects.order_by("name").select_related("pool")),
        Prefetch("groups", groups.prefetch_related("replicas", Prefetch("policy", policies))),
        Prefetch("policies", policies.filter(group=None), to_attr="pool_policy"),
    )
    with repeatable_read():
        return list(rows)


def export_bundle(pools: Iterable[Pool]) -> dict[str, Any]:
    """The document of pools that ``read_pools`` returned."""
    return {"format": FORMAT, "pools": [_export_pool(pool) for pool in pools]}


def tag_of(pools: Iterable[Pool]) -> str:
    """The entity tag of a bundle: a digest of the versions of its rows, which secrets belong to."""
    versions: list[tuple[int, ...]] = []
    for pool in pools:
        groups = pool.groups.all()
        policies = [*pool.pool_policy, *(group.policy for group in groups if hasattr(group, "policy"))]  # type: ignore[attr-defined]  # prefetched above
        active = [revision for policy in policies for revision in policy.active]
        rows = (pool, *pool.replicas.all(), *pool.sources.all(), *groups, *active)
        versions.append(tuple(row.version for row in rows))
    return f'"{hashlib.sha256(repr(versions).encode()).hexdigest()[:24]}"'


def _export_pool(pool: Pool) -> dict[str, Any]:
    return {
        **POOL.export(pool),
        "policy": _active_settings(pool.pool_policy[0]),  # type: ignore[attr-defined]  # prefetched above
        "replicas": [REPLICA.export(replica) | {"state": replica.state} for replica in pool.replicas.all()],
        "groups": [
            {**GROUP.export(group), "policy": _active_settings(getattr(group, "policy", None))}
            for group in pool.groups.all()
        ],
        "sources": [SOURCE.export(source) for source in pool.sources.all()],
    }


def _active_settings(policy: RoutingPolicy | None) -> dict[str, Any] | None:
    """The active revision's settings; None without a policy, or for one that was never published."""
    active: list[PolicyRevision] = policy.active if policy else []  # type: ignore[attr-defined]  # prefetched above
    return active[0].settings if active else None


# --- apply ------------------------------------------------------------------------------------------------


@transaction.atomic
def apply_bundle(
    bundle: Mapping[str, Any],
    request: Request,
    *,
    prune: bool = False,
    draft: bool = False,
    reason: str = "",
    override_reason: str = "",
    confirm_faulted: bool = False,
) -> Applied:
    """Change the fleet to match a bundle: all of it, or nothing.

    ``prune`` removes what the bundle's lists do not name. ``draft`` drafts policies instead of publishing them.
    ``override_reason`` publishes policies that lack the prediction that their pool requires,
    ``confirm_faulted`` those with settings that an alert or an analysis named.
    ValidationError and InvalidError point into the bundle; PermissionDenied names the first forbidden action.
    """
    application = _Application(request, signed_in_user(request), reason or "applied from a bundle", draft=draft)
    application.override_reason, application.confirm_faulted = override_reason, confirm_faulted
    with single_snapshot(reason=application.reason, by=application.by):
        existing = {pool.name: pool for pool in visible(actor(request), Pool.objects.select_related("project"))}
        entries = bundle["pools"]
        pools = [
            application.apply_pool(entry, existing.get(entry.get("name")), ("pools", position))
            for position, entry in enumerate(entries)
        ]
        for key in MEMBERS:
            for position, (pool, entry) in enumerate(zip(pools, entries, strict=True)):
                application.apply_members(key, pool, entry.get(key), ("pools", position, key))
        if prune:
            application.prune(pools, entries, existing)
    for position, (pool, entry) in enumerate(zip(pools, entries, strict=True)):
        application.apply_policies(pool, entry, ("pools", position))
    return application.applied


class _Application:
    """Applies one bundle: holds its author and options, and collects the actions."""

    def __init__(self, request: Request, by: User, reason: str, *, draft: bool = False) -> None:
        self.request, self.by, self.reason, self.draft = request, by, reason, draft
        self.override_reason, self.confirm_faulted = "", False
        self.applied = Applied()

    def apply_pool(self, entry: Mapping[str, Any], existing: Pool | None, path: Path) -> Any:
        """Create or change a pool, without its members."""
        fields = {name: value for name, value in entry.items() if name not in {*MEMBERS, "policy"}}
        return self._apply_object(POOL, fields, existing, path)

    def apply_members(self, key: str, pool: Pool, entries: list[Mapping[str, Any]] | None, path: Path) -> None:
        """Create or change a pool's members of one kind; a missing list changes nothing."""
        kind, rows_of = MEMBERS[key]
        existing = rows_of(pool)
        for position, entry in enumerate(entries or []):
            fields = {name: value for name, value in entry.items() if name not in {"policy", "state"}}
            row = self._apply_object(kind, fields, existing.get(entry.get("name", "")), (*path, position), pool=pool)
            if isinstance(row, Replica) and "state" in entry:
                self._apply_state(row, entry["state"], (*path, position, "state"))

    def apply_policies(self, pool: Pool, entry: Mapping[str, Any], path: Path) -> None:
        """Publish or draft the settings of a pool and of its groups."""
        if entry.get("policy") is not None:
            self._apply_settings(pool.policies.get(group=None), entry["policy"], (*path, "policy"))
        groups = {group.name: group for group in pool.groups.select_related("pool")}
        for position, group in enumerate(entry.get("groups") or []):
            if "policy" in group:
                self._apply_group_policy(groups[group["name"]], group["policy"], (*path, "groups", position, "policy"))

    def prune(self, pools: list[Pool], entries: list[Mapping[str, Any]], existing: Mapping[str, Pool]) -> None:
        """Remove what the bundle's lists do not name: groups before the replicas that they use, pools last. Replicas
        that a source manages stay with it.
        """
        named = {entry["name"] for entry in entries}
        unnamed_pools = [pool for name, pool in existing.items() if name not in named]
        for key, (kind, rows_of) in reversed(MEMBERS.items()):
            for pool, entry in zip(pools, entries, strict=True):
                if entry.get(key) is not None:
                    retained = {member["name"] for member in entry[key]}
                    if key == "replicas":
                        retained |= set(pool.replicas.exclude(discovered=None).values_list("name", flat=True))
                    self._remove(kind, [row for name, row in rows_of(pool).items() if name not in retained], pool.name)
            for pool in unnamed_pools:
                self._remove(kind, list(rows_of(pool).values()), pool.name)
        self._remove(POOL, unnamed_pools)

    def _apply_object(
        self, kind: Kind, fields: Mapping[str, Any], existing: Model | None, path: Path, *, pool: Pool | None = None
    ) -> Model:
        with _errors_at(path):
            if existing is not None:
                return self._update(kind, fields, existing)
            placement = {"pool": pool.name} if pool else {}
            row: Model = kind.viewset.create_row(
                **self._validated(kind.viewset.create_input, {**fields, **placement}), by=self.by
            )
            values = {name: value for name, value in kind.export(row).items() if value not in (None, "", [], {})}
            changes = tuple(Change(name, None, value) for name, value in values.items() if name != "name")
            self._record("create", kind, row, changes)
            return row

    def _update(self, kind: Kind, fields: Mapping[str, Any], existing: Model) -> Model:
        before = kind.export(existing)
        for name in kind.immutable:
            if name in fields and fields[name] != before[name]:
                raise InvalidError(f"$.{name}", f"is {before[name]} and cannot be changed")
        changeable = {name: value for name, value in fields.items() if name not in {"name", *kind.immutable}}
        validated = self._validated(kind.viewset.change_input, changeable, partial=True)
        row: Model = kind.viewset.update_row(existing, **validated, by=self.by)
        after = kind.export(row)
        changes = [Change(name, before[name], after[name]) for name in after if after[name] != before[name]]
        changes += [Change(name, SECRET_PLACEHOLDER, SECRET_PLACEHOLDER) for name in changeable if name not in after]
        if changes:
            self._record("change", kind, row, tuple(changes))
        return row

    def _apply_state(self, replica: Replica, state: Any, path: Path) -> None:
        with _errors_at(path):
            if state not in ReplicaState.values:
                raise InvalidError("$", f"expected one of {', '.join(ReplicaState.values)}")
        if state != replica.state:
            change = Change("state", str(replica.state), state)
            set_replica_state(replica, ReplicaState(state), by=self.by)
            self._check_permission("api:replica-state", "POST", replica)
            self.applied.actions.append(Action("change", "replica", replica.name, replica.pool.name, (change,)))

    def _apply_group_policy(self, group: TaskGroup, settings: Any, path: Path) -> None:
        policy = RoutingPolicy.objects.select_related("pool").filter(group=group).first()
        if settings is not None:
            if policy is None:
                self._check_permission("api:policy-list", "POST", group)
                policy = create_policy(group.pool, group, by=self.by)
            self._apply_settings(policy, settings, path)
        elif policy is not None:
            self._check_permission("api:policy-detail", "DELETE", policy)
            remove_policy(policy, by=self.by)
            self.applied.actions.append(Action("remove", "policy", policy.name, group.pool.name))

    def _apply_settings(self, policy: RoutingPolicy, value: Any, path: Path) -> None:
        """Publish or draft settings, unless they are active, being rolled out, or drafted already."""
        with _errors_at(path, instead_of="$.settings"):
            settings = canonical_settings(value)
        live, canary, draft = policy.live(), policy.canary(), policy.draft()
        if any(revision is not None and are_equal_settings(revision.settings, settings) for revision in (live, canary)):
            return
        if draft is not None and not are_equal_settings(draft.settings, settings):
            raise ConflictError(f"Policy {policy.name} has a different draft; publish or discard it first.")
        if self.draft and draft is not None:
            return
        self._check_permission(*(("api:policy-draft", "PUT") if self.draft else ("api:policy-publish", "POST")), policy)
        draft = save_draft(policy, settings, by=self.by, reason=self.reason)
        if not self.draft:
            self.applied.rollouts.append(
                publish_revision(
                    draft.pk,
                    by=self.by,
                    reason=self.reason,
                    override_reason=self.override_reason,
                    confirm_faulted=self.confirm_faulted,
                )
            )
        differences = diff_settings(live.settings if live else None, settings)
        changes = tuple(Change(diff.field, diff.before, diff.after) for diff in differences)
        kind = "draft" if self.draft else "policy"
        op = "change" if live else "create"
        self.applied.actions.append(Action(op, kind, policy.name, policy.pool.name, changes))

    def _remove(self, kind: Kind, rows: list[Any], pool: str = "") -> None:
        for row in rows:
            self._check_permission(f"{kind.route}-detail", "DELETE", row)
            kind.viewset.remove_row(row, by=self.by)
            self.applied.actions.append(Action("remove", kind.name, row.name, pool or row.name))

    def _record(self, op: str, kind: Kind, row: Any, changes: tuple[Change, ...]) -> None:
        """Record an action. PermissionDenied, which rolls everything back, where its own URL would forbid it."""
        route, method = (f"{kind.route}-list", "POST") if op == "create" else (f"{kind.route}-detail", "PATCH")
        self._check_permission(route, method, row)
        pool = row.name if isinstance(row, Pool) else row.pool.name
        self.applied.actions.append(Action(op, kind.name, row.name, pool, changes))

    def _check_permission(self, route: str, method: str, row: Model) -> None:
        needed = needed_role(route, method)
        if needed is None or not actor(self.request).may(needed, project_id_of(row)):
            kind = row._meta.verbose_name  # noqa: SLF001 - Django's name
            raise PermissionDenied(f"The bundle changes {kind} {row}, which needs the role {needed}.")

    def _validated(self, serializer_class: Any, fields: Mapping[str, Any], *, partial: bool = False) -> dict[str, Any]:
        """An entry's fields as a service's arguments."""
        serializer = serializer_class(data=fields, partial=partial, context={"request": self.request})
        check_unknown_fields(fields, serializer.fields)
        serializer.is_valid(raise_exception=True)
        return dict(serializer.validated_data)


@contextmanager
def _errors_at(path: Path, *, instead_of: str = "$") -> Iterator[None]:
    """Rewrites the paths of an object's errors to its position in the bundle."""
    try:
        yield
    except ValidationError as error:
        raise nested_error(path, error.detail) from None
    except InvalidError as error:
        location = "$" + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
        raise error.within(location, instead_of=instead_of) from None


class ConfigView(TransactionalView):
    """The fleet as one document: export it, edit it, plan with a dry run, apply it."""

    max_body_bytes = 16 * 1_048_576
    # Attributes of a viewset that the OpenAPI document reads: one object with a version.
    detail, action, conditional_actions, has_versions = True, "config", (), True

    def perform(self, request: Request) -> Response:
        """Call the method, unless the fleet changed since the version in If-Match."""
        if request.method == "PUT":
            self._check_version(request)
            response = super().perform(request)
            response["ETag"] = tag_of(read_pools(actor(request)))
            return response
        return super().perform(request)

    def _check_version(self, request: Request) -> None:
        if not has_if_match(request):
            raise PreconditionRequiredError
        pools = read_pools(actor(request))
        if not if_match_holds(request, tag := tag_of(pools)):
            raise VersionChangedError(etag=tag, current=export_bundle(pools))

    @extend_schema(responses=BundleSerializer)
    def get(self, request: Request) -> Response:
        """The pools that you may see, in a stable order, without secrets."""
        pools = read_pools(actor(request))
        return Response(export_bundle(pools), headers={"ETag": tag_of(pools)})

    @extend_schema(
        request=BundleSerializer,
        responses=AppliedSerializer,
        parameters=[
            OpenApiParameter("prune", bool, description="Remove what the bundle's lists do not name."),
            OpenApiParameter("draft", bool, description="Draft policies instead of publishing them."),
        ],
    )
    def put(self, request: Request) -> Response:
        """Change the fleet to match the bundle: all of it, or nothing."""
        bundle = check_shape(request.data)
        applied = apply_bundle(
            bundle,
            request,
            prune=query_flag(request, "prune"),
            draft=query_flag(request, "draft"),
            reason=str(bundle.get("reason", ""))[:500],
            override_reason=str(bundle.get("override_reason", ""))[:500],
            confirm_faulted=bundle.get("confirm_faulted") is True,
        )
        return Response(AppliedSerializer(applied).data)
