"""The rule table: the role that each route needs, by method. Any other route is denied.

A role counts in the project of the object that a URL names. A URL that names no object needs the role in any project,
and its view shows and accepts only rows of projects where the role suffices. An object of a project in which the actor
has no role is not found (404); an object that the actor may see but not change is forbidden (403).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.access.actor import Actor
from controlplane.models import Role

VIEWER, OPERATOR, EDITOR, APPROVER, ADMIN = Role


@dataclass(frozen=True, slots=True)
class Rule:
    """Access to one route."""

    roles: Mapping[str, Role]  # by method
    fleet_wide: bool = False  # concerns no single project: the role must be held in all projects
    # Methods that need a recent authentication of the user: they cannot be undone, change access, or show a secret.
    confirm: tuple[str, ...] = ()


def _rule(*, fleet_wide: bool = False, confirm: tuple[str, ...] = (), **roles: Role) -> Rule:
    return Rule(roles, fleet_wide, confirm)


def _form(role: Role, *, fleet_wide: bool = False, confirm: tuple[str, ...] = ()) -> Rule:
    """A page with a form. Those who may not submit it may not see it either."""
    return Rule({"GET": role, "POST": role}, fleet_wide, confirm)


def _resource(
    route: str,
    *,
    create: Role | None = None,
    change: Role | None = None,
    remove: Role | None = None,
    fleet_wide: bool = False,
    confirm: tuple[str, ...] = (),
) -> dict[str, Rule]:
    """The rules of a REST list and of one of its objects."""

    def rule(methods: Mapping[str, Role | None], *, is_fleet_wide: bool) -> Rule:
        roles = {method: role for method, role in methods.items() if role is not None}
        return Rule(roles, is_fleet_wide, tuple(method for method in confirm if method in roles))

    return {
        f"{route}-list": rule({"GET": VIEWER, "POST": create}, is_fleet_wide=fleet_wide),
        f"{route}-detail": rule({"GET": VIEWER, "PATCH": change, "DELETE": remove}, is_fleet_wide=False),
    }


VIEW = _rule(GET=VIEWER)

# By the name of the route.
RULES: Mapping[str, Rule] = {
    # --- pages: metrics, requests and alerts ---
    "telemetry:overview": VIEW,
    "telemetry:overview-live": VIEW,
    "telemetry:pool": VIEW,
    "telemetry:group": VIEW,
    "telemetry:group-live": VIEW,
    "telemetry:prompts": VIEW,
    "telemetry:replica": VIEW,
    "telemetry:replica-live": VIEW,
    "telemetry:search": VIEW,
    "telemetry:start": VIEW,
    "telemetry:start-dismiss": _rule(POST=VIEWER),
    "telemetry:chart-table": VIEW,
    "telemetry:chart-figure": VIEW,
    "telemetry:chart-csv": VIEW,
    "telemetry:chart-json": VIEW,
    "telemetry:breakdown": VIEW,
    "telemetry:breakdown-figure": VIEW,
    "telemetry:capacity": VIEW,
    "telemetry:report": VIEW,
    "telemetry:value": VIEW,
    "telemetry:value-csv": VIEW,
    "telemetry:capacity-sweep": _rule(POST=OPERATOR),
    "telemetry:capacity-figure": VIEW,
    "telemetry:what-ifs": _rule(GET=VIEWER, POST=OPERATOR),
    "telemetry:what-if": VIEW,
    "telemetry:what-if-draft": _rule(GET=VIEWER, POST=OPERATOR),
    "telemetry:what-if-make-draft": _rule(POST=EDITOR),
    "telemetry:what-if-cancel": _rule(POST=OPERATOR),
    "telemetry:links": _rule(POST=VIEWER),
    "telemetry:link": VIEW,
    "telemetry:link-follow": VIEW,
    "telemetry:views": _rule(GET=VIEWER, POST=EDITOR, confirm=("POST",)),  # the form creates read-only links
    "telemetry:view-remove": _rule(POST=VIEWER),  # the user's own
    "telemetry:shared-revoke": _rule(POST=EDITOR),
    "telemetry:prefixes": VIEW,
    "telemetry:requests": VIEW,
    "telemetry:request": VIEW,
    "telemetry:events": VIEW,
    "telemetry:events-csv": VIEW,
    "telemetry:status": VIEW,
    "telemetry:alerts": VIEW,
    "telemetry:alert": VIEW,
    "telemetry:alert-acknowledge": _rule(POST=OPERATOR),
    "telemetry:alert-unacknowledge": _rule(POST=OPERATOR),
    "telemetry:silences": VIEW,
    "telemetry:silence-new": _form(OPERATOR),
    "telemetry:silence-end": _rule(POST=OPERATOR),
    "telemetry:rule-new": _form(EDITOR),
    "telemetry:rule": _form(EDITOR),
    "telemetry:rule-remove": _form(EDITOR),
    # --- pages: policies and the fleet ---
    "controlplane:policies": VIEW,
    "controlplane:policy": VIEW,
    "controlplane:policy-rollout": VIEW,
    "controlplane:policy-edit": _form(EDITOR),
    "controlplane:policy-check": _rule(POST=EDITOR),
    "controlplane:policy-discard": _rule(POST=EDITOR),
    "controlplane:policy-revisions": VIEW,
    "controlplane:policy-compare": VIEW,
    "controlplane:policy-revert": _form(APPROVER),
    "controlplane:policy-create": _rule(POST=EDITOR),
    "controlplane:policy-publish": _rule(POST=APPROVER),
    "controlplane:policy-remove": _form(APPROVER),
    "controlplane:rollouts": VIEW,
    "controlplane:rollout": VIEW,
    "controlplane:rollout-pause": _form(OPERATOR),  # operators may stop a rollout
    "controlplane:rollout-abort": _form(OPERATOR),
    "controlplane:rollout-resume": _form(APPROVER),  # only approvers may continue one
    "controlplane:rollout-promote": _form(APPROVER),
    "controlplane:rollout-approve": _form(APPROVER),
    "controlplane:fleet": VIEW,
    "controlplane:warming": VIEW,
    "controlplane:pool-new": _form(ADMIN),
    "controlplane:pool": _form(EDITOR),
    "controlplane:pool-remove": _form(ADMIN, confirm=("GET", "POST")),
    "controlplane:replica-new": _form(EDITOR),
    "controlplane:replica": _form(EDITOR),
    "controlplane:replica-state": _form(OPERATOR),
    "controlplane:replica-remove": _form(EDITOR),
    "controlplane:pool-sources": VIEW,
    "controlplane:source-new": _form(EDITOR),
    "controlplane:source": _form(EDITOR),
    "controlplane:source-remove": _form(EDITOR),
    "controlplane:source-poll": _rule(POST=OPERATOR),
    "controlplane:discovered-adopt": _rule(POST=EDITOR),
    "controlplane:task-groups": VIEW,
    "controlplane:task-group-new": _form(EDITOR),
    "controlplane:task-group": _form(EDITOR),
    "controlplane:task-group-remove": _form(EDITOR),
    "controlplane:task-group-purge": _form(EDITOR),
    "controlplane:limits": _form(ADMIN, fleet_wide=True),
    # --- pages: routers, channels and deliveries ---
    "controlplane:routers": _rule(GET=VIEWER, fleet_wide=True),
    "controlplane:router": VIEW,
    "controlplane:router-remove": _form(EDITOR),
    "controlplane:configurations": _rule(GET=VIEWER, fleet_wide=True),
    "controlplane:configuration": _rule(GET=VIEWER, fleet_wide=True),
    "controlplane:configuration-compare": _rule(GET=VIEWER, fleet_wide=True),
    "telemetry:channels": _rule(GET=VIEWER, fleet_wide=True),
    "telemetry:channel-new": _form(EDITOR, fleet_wide=True, confirm=("GET", "POST")),
    "telemetry:channel": _form(EDITOR, confirm=("POST",)),
    "telemetry:heartbeat": _form(EDITOR, fleet_wide=True, confirm=("POST",)),
    "telemetry:heartbeat-remove": _form(EDITOR, fleet_wide=True, confirm=("GET", "POST")),
    "telemetry:channel-rotate": _rule(POST=EDITOR, confirm=("POST",)),
    "telemetry:channel-test": _rule(POST=OPERATOR),
    "telemetry:channel-switch": _rule(POST=OPERATOR),
    "telemetry:channel-remove": _form(EDITOR, confirm=("GET", "POST")),
    "telemetry:metrics-servers": _rule(GET=VIEWER, fleet_wide=True),
    "telemetry:metrics-server-new": _form(ADMIN, fleet_wide=True, confirm=("GET", "POST")),
    "telemetry:metrics-server": _form(ADMIN, confirm=("GET", "POST")),
    "telemetry:metrics-server-test": _rule(POST=OPERATOR),
    "telemetry:metrics-server-remove": _form(ADMIN, confirm=("GET", "POST")),
    "telemetry:deliveries": VIEW,
    "telemetry:delivery": VIEW,
    "telemetry:delivery-replay": _rule(POST=OPERATOR),
    # --- pages: users and access ---
    "controlplane:users": _rule(GET=ADMIN, fleet_wide=True),
    "controlplane:user-new": _form(ADMIN, fleet_wide=True, confirm=("GET", "POST")),
    "controlplane:user": _rule(GET=ADMIN),
    "controlplane:user-role": _rule(POST=ADMIN, confirm=("POST",)),
    "controlplane:user-active": _rule(POST=ADMIN, confirm=("POST",)),
    "controlplane:user-password": _rule(POST=ADMIN, confirm=("POST",)),
    "controlplane:user-unlock": _rule(POST=ADMIN, confirm=("POST",)),
    "controlplane:user-second-factor": _rule(POST=ADMIN, confirm=("POST",)),
    "controlplane:project-new": _form(ADMIN, fleet_wide=True),
    "controlplane:project-approval": _rule(POST=ADMIN, confirm=("POST",)),
    "controlplane:project-remove": _form(ADMIN, confirm=("GET", "POST")),
    "controlplane:user-sessions-end": _rule(POST=ADMIN, confirm=("POST",)),
    "controlplane:sessions": _rule(GET=VIEWER),  # the user's own
    "controlplane:session-end": _rule(POST=VIEWER, confirm=("POST",)),
    "controlplane:sessions-end-others": _rule(POST=VIEWER, confirm=("POST",)),
    "controlplane:tokens": _form(VIEWER, confirm=("POST",)),  # the user's own; for admins, all users'
    "controlplane:token-revoke": _rule(POST=VIEWER, confirm=("POST",)),
    "controlplane:client-keys": _rule(GET=VIEWER, POST=ADMIN, confirm=("POST",)),
    "controlplane:client-key": _form(ADMIN, confirm=("POST",)),
    "controlplane:client-key-revoke": _form(ADMIN, confirm=("GET", "POST")),
    "controlplane:admission": _form(ADMIN, fleet_wide=True, confirm=("GET", "POST")),
    "controlplane:audit": _rule(GET=ADMIN, fleet_wide=True),
    "controlplane:audit-csv": _rule(GET=ADMIN, fleet_wide=True),
    # --- REST ---
    "api:openapi": VIEW,
    "api:strategies": VIEW,
    "api:config": _rule(GET=VIEWER, PUT=EDITOR, confirm=("PUT",)),  # and each action needs the role of its own URL
    **_resource("api:project", create=ADMIN, change=ADMIN, remove=ADMIN, fleet_wide=True, confirm=("PATCH", "DELETE")),
    **_resource("api:pool", create=ADMIN, change=EDITOR, remove=ADMIN, confirm=("DELETE",)),
    **_resource("api:replica", create=EDITOR, change=EDITOR, remove=EDITOR),
    "api:replica-state": _rule(POST=OPERATOR),
    **_resource("api:replica-source", create=EDITOR, change=EDITOR, remove=EDITOR),
    "api:replica-source-poll": _rule(POST=OPERATOR),
    **_resource("api:discovered-replica"),
    "api:discovered-replica-adopt": _rule(POST=EDITOR),
    **_resource("api:task-group", create=EDITOR, change=EDITOR, remove=EDITOR),
    "api:task-group-purge-response-cache": _rule(POST=EDITOR),
    **_resource("api:policy", create=EDITOR, remove=APPROVER),
    "api:policy-draft": _rule(PUT=EDITOR, DELETE=EDITOR),
    "api:policy-diff": VIEW,
    "api:policy-publish": _rule(POST=APPROVER),
    "api:policy-revert": _rule(POST=APPROVER),
    **_resource("api:revision"),
    "api:revision-compare": VIEW,
    **_resource("api:rollout"),
    "api:rollout-pause": _rule(POST=OPERATOR),
    "api:rollout-abort": _rule(POST=OPERATOR),
    "api:rollout-resume": _rule(POST=APPROVER),
    "api:rollout-promote": _rule(POST=APPROVER),
    "api:rollout-approve": _rule(POST=APPROVER),
    "api:router-explain": _rule(POST=OPERATOR),
    **_resource("api:configuration", fleet_wide=True),
    "api:configuration-compare": _rule(GET=VIEWER, fleet_wide=True),
    **_resource("api:router", remove=EDITOR, fleet_wide=True),
    **_resource("api:event"),
    **_resource("api:client-key", create=ADMIN, change=ADMIN, remove=ADMIN, confirm=("POST", "PATCH", "DELETE")),
    "api:fleet-settings": _rule(GET=VIEWER, PATCH=ADMIN, fleet_wide=True, confirm=("PATCH",)),
    "api:token-list": _rule(GET=ADMIN, POST=ADMIN, fleet_wide=True, confirm=("POST",)),
    "api:token-detail": _rule(GET=ADMIN, DELETE=ADMIN, confirm=("DELETE",)),
    "api:audit-list": _rule(GET=ADMIN, fleet_wide=True),
    "api:audit-export": _rule(GET=ADMIN, fleet_wide=True),
    "telemetry-api:prompts": VIEW,
    "api:audit-detail": _rule(GET=ADMIN),
    "telemetry-api:series": VIEW,
    "telemetry-api:reconciliation": VIEW,
    "telemetry-api:breakdown": VIEW,
    "telemetry-api:capacity": VIEW,
    "telemetry-api:response-caches": VIEW,
    "telemetry-api:scaling": VIEW,
    "telemetry-api:report": VIEW,
    "telemetry-api:value": VIEW,
    **_resource("telemetry-api:alert-rule", create=EDITOR, change=EDITOR, remove=EDITOR),
    "telemetry-api:alert-rule-preview": _rule(POST=OPERATOR),  # changes nothing, but is expensive
    **_resource("telemetry-api:what-if", create=OPERATOR),
    "telemetry-api:what-if-cancel": _rule(POST=OPERATOR),
    "telemetry-api:what-if-trace": VIEW,
    **_resource("telemetry-api:alert"),
    "telemetry-api:alert-acknowledge": _rule(POST=OPERATOR),
    "telemetry-api:alert-unacknowledge": _rule(POST=OPERATOR),
    **_resource("telemetry-api:silence", create=OPERATOR, change=OPERATOR, remove=OPERATOR),
    "telemetry-api:silence-preview": _rule(POST=OPERATOR),
    **_resource(
        "telemetry-api:channel",
        create=EDITOR,
        change=EDITOR,
        remove=EDITOR,
        fleet_wide=True,
        confirm=("POST", "PATCH", "DELETE"),
    ),
    "telemetry-api:channel-kinds": VIEW,
    "telemetry-api:channel-test": _rule(POST=OPERATOR),
    **_resource(
        "telemetry-api:metrics-server",
        create=ADMIN,
        change=ADMIN,
        remove=ADMIN,
        fleet_wide=True,
        confirm=("POST", "PATCH", "DELETE"),
    ),
    "telemetry-api:metrics-server-test": _rule(POST=OPERATOR),
    "telemetry-api:channel-rotate": _rule(POST=EDITOR, confirm=("POST",)),
    "telemetry-api:heartbeat": _rule(
        GET=VIEWER, POST=EDITOR, PATCH=EDITOR, DELETE=EDITOR, fleet_wide=True, confirm=("POST", "PATCH", "DELETE")
    ),
    **_resource("telemetry-api:delivery"),
    "telemetry-api:delivery-replay": _rule(POST=OPERATOR),
}

# Routes without a role: anonymous, or authenticated in another way. Django and allauth require sign-in where needed.
PUBLIC_ROUTES = frozenset(
    {
        "healthz",
        "readyz",
        "telemetry:shared",  # these three need the token of a read-only link
        "telemetry:shared-live",
        "telemetry:shared-figure",
        "telemetry:metrics",  # needs METRICS_TOKEN, or an address in METRICS_NETWORKS
        "account_login",
        "account_logout",
        "account_inactive",
        "account_change_password",
        "account_set_password",
        "account_reauthenticate",
        "openid_connect_login",
        "openid_connect_callback",
        "socialaccount_login_cancelled",
        "single_sign_on_disconnect",
        "mfa_authenticate",
        "mfa_reauthenticate",
        "mfa_index",
        "mfa_activate_totp",
        "mfa_deactivate_totp",
        "mfa_view_recovery_codes",
        "mfa_generate_recovery_codes",
        "api:announce",  # needs the routers' token
    }
)

# The object that a URL names: the parameter, the model, and the field that the parameter holds.
MODEL_OF_URL_PARAMETER: Mapping[str, tuple[str, str]] = {
    "pool_id": ("controlplane.Pool", "pk"),
    "pool_name": ("controlplane.Pool", "name"),
    "replica_name": ("controlplane.Replica", "name"),
    "replica_id": ("controlplane.Replica", "pk"),
    "source_id": ("controlplane.ReplicaSource", "pk"),
    "discovered_id": ("controlplane.DiscoveredReplica", "pk"),
    "group_id": ("controlplane.TaskGroup", "pk"),
    "policy_id": ("controlplane.RoutingPolicy", "pk"),
    "rollout_id": ("controlplane.Rollout", "pk"),
    "project_id": ("controlplane.Project", "pk"),
    "router_id": ("controlplane.Router", "pk"),
    "key_id": ("controlplane.ClientKey", "pk"),
    "user_id": ("auth.User", "pk"),
    "rule_id": ("telemetry.AlertRule", "pk"),
    "alert_id": ("telemetry.Alert", "pk"),
    "silence_id": ("telemetry.Silence", "pk"),
    "channel_id": ("telemetry.Channel", "pk"),
    "server_id": ("telemetry.MetricsServer", "pk"),
    "notification_id": ("telemetry.Notification", "pk"),
    "what_if_id": ("telemetry.WhatIf", "pk"),
    "shared_id": ("telemetry.SharedLink", "pk"),
}


def needed_role(route: str, method: str) -> Role | None:
    """The role that a method of a route needs; None if it is denied to all."""
    rule = RULES.get(route)
    return rule.roles.get("GET" if method in {"HEAD", "OPTIONS"} else method) if rule else None


def permits(actor: Actor, route: str, needed: Role) -> bool:
    """Whether the actor may use a route whose URL names no object."""
    return actor.may(needed, None) if is_fleet_wide(route) else actor.may_somewhere(needed)


def may_submit(actor: Actor, route: str, project_id: int | None = None) -> bool:
    """Whether the actor may submit a page, or open one without a form: in a project, or without one in any."""
    needed = needed_role(route, "POST") or needed_role(route, "GET")
    if needed is None:
        return False
    in_project = project_id is not None and not is_fleet_wide(route)
    return actor.may(needed, project_id) if in_project else permits(actor, route, needed)


def is_fleet_wide(route: str) -> bool:
    """Whether the route needs its role in all projects."""
    return route in RULES and RULES[route].fleet_wide


def needs_reauthentication(route: str, method: str) -> bool:
    """Whether a user must have authenticated recently. Scripts authenticate with each request."""
    return route in RULES and method in RULES[route].confirm
