"""The rule table: which role each address needs, by method. What is not in it is refused to everybody.

A role counts in the project of the object that an address names; where it names none, holding the role in any
project opens the door, and the view shows and takes only what lies in projects where the role suffices. An object of
a project in which one has no role does not exist (404); one that may be seen but not touched is refused (403).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from controlplane.access.actor import Actor
from controlplane.models import Role

VIEWER, OPERATOR, EDITOR, APPROVER, ADMIN = Role

SEE = MappingProxyType({"GET": VIEWER})


def _form(role: Role) -> Mapping[str, Role]:
    """A page with a form: whoever may not send it need not see it."""
    return {"GET": role, "POST": role}


def _resource(
    *, create: Role | None = None, change: Role | None = None, remove: Role | None = None
) -> tuple[Mapping[str, Role], Mapping[str, Role]]:
    """The methods of a list and of one of its objects."""
    several = {"GET": VIEWER, "POST": create}
    one = {"GET": VIEWER, "PATCH": change, "DELETE": remove}
    return _allowed(several), _allowed(one)


def _allowed(methods: Mapping[str, Role | None]) -> Mapping[str, Role]:
    return {method: role for method, role in methods.items() if role is not None}


def _named(noun: str, rules: tuple[Mapping[str, Role], Mapping[str, Role]]) -> dict[str, Mapping[str, Role]]:
    return {f"{noun}-list": rules[0], f"{noun}-detail": rules[1]}


# By the name of the route.
RULES: Mapping[str, Mapping[str, Role]] = {
    # --- pages: see ---
    "telemetry:overview": SEE,
    "telemetry:overview-live": SEE,
    "telemetry:pool": SEE,
    "telemetry:pool-live": SEE,
    "telemetry:group": SEE,
    "telemetry:group-live": SEE,
    "telemetry:prompts": SEE,
    "telemetry:replica": SEE,
    "telemetry:replica-live": SEE,
    "telemetry:search": SEE,
    "telemetry:chart-table": SEE,
    "telemetry:chart-figure": SEE,
    "telemetry:chart-csv": SEE,
    "telemetry:chart-json": SEE,
    "telemetry:ladder": SEE,
    "telemetry:ladder-figure": SEE,
    "telemetry:links": {"POST": VIEWER},
    "telemetry:link": SEE,
    "telemetry:link-follow": SEE,
    "telemetry:prefixes": SEE,
    "telemetry:requests": SEE,
    "telemetry:request": SEE,
    "telemetry:events": SEE,
    "telemetry:events-csv": SEE,
    "telemetry:alerts": SEE,
    "telemetry:alert": SEE,
    "telemetry:alert-acknowledge": {"POST": OPERATOR},
    "telemetry:alert-release": {"POST": OPERATOR},
    "telemetry:silences": SEE,
    "telemetry:silence-new": _form(OPERATOR),
    "telemetry:silence-end": {"POST": OPERATOR},
    "telemetry:rule-new": _form(EDITOR),
    "telemetry:rule": _form(EDITOR),
    "telemetry:rule-remove": _form(EDITOR),
    # --- pages: change ---
    "controlplane:policies": SEE,
    "controlplane:policy": SEE,
    "controlplane:policy-rollout": SEE,
    "controlplane:policy-edit": _form(EDITOR),
    "controlplane:policy-check": {"POST": EDITOR},
    "controlplane:policy-discard": {"POST": EDITOR},
    "controlplane:policy-revisions": SEE,
    "controlplane:policy-compare": SEE,
    "controlplane:policy-revert": _form(APPROVER),
    "controlplane:policy-create": {"POST": EDITOR},
    "controlplane:policy-publish": {"POST": APPROVER},
    "controlplane:policy-remove": _form(APPROVER),
    "controlplane:rollouts": SEE,
    "controlplane:rollout": SEE,
    "controlplane:rollout-pause": _form(OPERATOR),  # what makes things safe, operators may
    "controlplane:rollout-abort": _form(OPERATOR),
    "controlplane:rollout-resume": _form(APPROVER),  # what goes on, approvers may
    "controlplane:rollout-promote": _form(APPROVER),
    "controlplane:rollout-approve": _form(APPROVER),
    "controlplane:fleet": SEE,
    "controlplane:warming": SEE,
    "controlplane:pool-new": _form(ADMIN),
    "controlplane:pool": _form(EDITOR),
    "controlplane:pool-remove": _form(ADMIN),
    "controlplane:replica-new": _form(EDITOR),
    "controlplane:replica": _form(EDITOR),
    "controlplane:replica-state": _form(OPERATOR),
    "controlplane:replica-remove": _form(EDITOR),
    "controlplane:pool-sources": SEE,
    "controlplane:source-new": _form(EDITOR),
    "controlplane:source": _form(EDITOR),
    "controlplane:source-remove": _form(EDITOR),
    "controlplane:source-look": {"POST": OPERATOR},
    "controlplane:discovered-adopt": {"POST": EDITOR},
    "controlplane:discovered-dismiss": {"POST": EDITOR},
    "controlplane:task-groups": SEE,
    "controlplane:task-group-new": _form(EDITOR),
    "controlplane:task-group": _form(EDITOR),
    "controlplane:task-group-remove": _form(EDITOR),
    "controlplane:limits": _form(ADMIN),
    # --- pages: deliver ---
    "controlplane:routers": SEE,
    "controlplane:router": SEE,
    "controlplane:router-remove": _form(EDITOR),
    "controlplane:configurations": SEE,
    "controlplane:configuration": SEE,
    "controlplane:configuration-compare": SEE,
    "telemetry:channels": SEE,
    "telemetry:channel-new": _form(EDITOR),
    "telemetry:channel": _form(EDITOR),
    "telemetry:heartbeat": _form(EDITOR),
    "telemetry:heartbeat-remove": _form(EDITOR),
    "telemetry:channel-rotate": {"POST": EDITOR},
    "telemetry:channel-test": {"POST": OPERATOR},
    "telemetry:channel-switch": {"POST": OPERATOR},
    "telemetry:channel-remove": _form(EDITOR),
    "telemetry:metrics-servers": SEE,
    "telemetry:metrics-server-new": _form(ADMIN),
    "telemetry:metrics-server": _form(ADMIN),
    "telemetry:metrics-server-try": {"POST": OPERATOR},
    "telemetry:metrics-server-remove": _form(ADMIN),
    "telemetry:deliveries": SEE,
    "telemetry:delivery": SEE,
    "telemetry:delivery-replay": {"POST": OPERATOR},
    # --- pages: who may ---
    "controlplane:people": {"GET": ADMIN},
    "controlplane:person-new": _form(ADMIN),
    "controlplane:person": {"GET": ADMIN},
    "controlplane:person-role": {"POST": ADMIN},
    "controlplane:person-active": {"POST": ADMIN},
    "controlplane:person-password": {"POST": ADMIN},
    "controlplane:person-unlock": {"POST": ADMIN},
    "controlplane:person-second-factor": {"POST": ADMIN},
    "controlplane:project-new": _form(ADMIN),
    "controlplane:project-approval": {"POST": ADMIN},
    "controlplane:project-remove": _form(ADMIN),
    "controlplane:person-sessions-end": {"POST": ADMIN},
    "controlplane:sessions": {"GET": VIEWER},  # one's own
    "controlplane:session-end": {"POST": VIEWER},
    "controlplane:sessions-end-others": {"POST": VIEWER},
    "controlplane:tokens": _form(VIEWER),  # one's own, and everybody's for admins
    "controlplane:token-revoke": {"POST": VIEWER},
    "controlplane:client-keys": {"GET": VIEWER, "POST": ADMIN},
    "controlplane:client-key": _form(ADMIN),
    "controlplane:client-key-revoke": _form(ADMIN),
    "controlplane:admission": _form(ADMIN),
    "controlplane:audit": {"GET": ADMIN},
    "controlplane:audit-csv": {"GET": ADMIN},
    # --- REST ---
    "api:openapi": SEE,
    "api:strategies": SEE,
    "api:config": {"GET": VIEWER, "PUT": EDITOR},  # and for each action what its own address needs
    **_named("api:project", _resource(create=ADMIN, change=ADMIN, remove=ADMIN)),
    **_named("api:pool", _resource(create=ADMIN, change=EDITOR, remove=ADMIN)),
    **_named("api:replica", _resource(create=EDITOR, change=EDITOR, remove=EDITOR)),
    "api:replica-state": {"POST": OPERATOR},
    **_named("api:replica-source", _resource(create=EDITOR, change=EDITOR, remove=EDITOR)),
    "api:replica-source-look": {"POST": OPERATOR},
    **_named("api:discovered-replica", _resource()),
    "api:discovered-replica-adopt": {"POST": EDITOR},
    "api:discovered-replica-dismiss": {"POST": EDITOR},
    **_named("api:task-group", _resource(create=EDITOR, change=EDITOR, remove=EDITOR)),
    **_named("api:policy", _resource(create=EDITOR, remove=APPROVER)),
    "api:policy-draft": {"PUT": EDITOR, "DELETE": EDITOR},
    "api:policy-diff": SEE,
    "api:policy-publish": {"POST": APPROVER},
    "api:policy-revert": {"POST": APPROVER},
    **_named("api:revision", _resource()),
    "api:revision-compare": SEE,
    **_named("api:rollout", _resource()),
    "api:rollout-pause": {"POST": OPERATOR},
    "api:rollout-abort": {"POST": OPERATOR},
    "api:rollout-resume": {"POST": APPROVER},
    "api:rollout-promote": {"POST": APPROVER},
    "api:rollout-approve": {"POST": APPROVER},
    "api:router-explain": {"POST": OPERATOR},
    **_named("api:configuration", _resource()),
    "api:configuration-compare": SEE,
    **_named("api:router", _resource(remove=EDITOR)),
    **_named("api:event", _resource()),
    "api:event-stream": SEE,
    **_named("api:client-key", _resource(create=ADMIN, change=ADMIN, remove=ADMIN)),
    "api:fleet-settings": {"GET": VIEWER, "PATCH": ADMIN},
    "api:token-list": {"GET": ADMIN, "POST": ADMIN},
    "api:token-detail": {"GET": ADMIN, "DELETE": ADMIN},
    "api:audit-list": {"GET": ADMIN},
    "telemetry-api:prompts": SEE,
    "api:audit-detail": {"GET": ADMIN},
    "telemetry-api:series": SEE,
    "telemetry-api:reconciliation": SEE,
    "telemetry-api:ladder": SEE,
    **_named("telemetry-api:alert-rule", _resource(create=EDITOR, change=EDITOR, remove=EDITOR)),
    "telemetry-api:alert-rule-preview": {"POST": OPERATOR},  # changes nothing, and costs something
    **_named("telemetry-api:alert", _resource()),
    "telemetry-api:alert-acknowledge": {"POST": OPERATOR},
    "telemetry-api:alert-release": {"POST": OPERATOR},
    **_named("telemetry-api:silence", _resource(create=OPERATOR, change=OPERATOR, remove=OPERATOR)),
    "telemetry-api:silence-preview": {"POST": OPERATOR},
    **_named("telemetry-api:channel", _resource(create=EDITOR, change=EDITOR, remove=EDITOR)),
    "telemetry-api:channel-kinds": SEE,
    "telemetry-api:channel-test": {"POST": OPERATOR},
    **_named("telemetry-api:metrics-server", _resource(create=ADMIN, change=ADMIN, remove=ADMIN)),
    "telemetry-api:metrics-server-test": {"POST": OPERATOR},
    "telemetry-api:channel-rotate": {"POST": EDITOR},
    "telemetry-api:heartbeat": {"GET": VIEWER, "POST": EDITOR, "PATCH": EDITOR, "DELETE": EDITOR},
    **_named("telemetry-api:delivery", _resource()),
    "telemetry-api:delivery-replay": {"POST": OPERATOR},
}

# Who is asked in another way, or not at all. Django and allauth ask for sign-in where it is needed.
OPEN = frozenset(
    {
        "healthz",
        "readyz",
        "telemetry:metrics",  # by a token of its own, or from networks of its own
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
        "api:announce",  # by the routers' token
    }
)

# What cannot be undone, gives or takes away access, or shows a secret: asks for a fresh proof of who is asking. Scripts
# prove themselves with each request.
_ASKED_AGAIN = {
    "controlplane:pool-remove": ("GET", "POST"),
    "controlplane:project-approval": ("POST",),
    "controlplane:project-remove": ("GET", "POST"),
    "controlplane:person-new": ("GET", "POST"),
    "controlplane:person-role": ("POST",),
    "controlplane:person-active": ("POST",),
    "controlplane:person-password": ("POST",),
    "controlplane:person-unlock": ("POST",),
    "controlplane:person-second-factor": ("POST",),
    "controlplane:person-sessions-end": ("POST",),
    "controlplane:session-end": ("POST",),
    "controlplane:sessions-end-others": ("POST",),
    "controlplane:tokens": ("POST",),
    "controlplane:token-revoke": ("POST",),
    "controlplane:client-keys": ("POST",),
    "controlplane:client-key": ("POST",),
    "controlplane:client-key-revoke": ("GET", "POST"),
    "controlplane:admission": ("GET", "POST"),
    "telemetry:channel-new": ("GET", "POST"),
    "telemetry:metrics-server-new": ("GET", "POST"),
    "telemetry:metrics-server": ("GET", "POST"),
    "telemetry:channel": ("POST",),
    "telemetry:channel-remove": ("GET", "POST"),  # with it goes what only it knew
    "telemetry:metrics-server-remove": ("GET", "POST"),
    "telemetry:heartbeat": ("POST",),
    "telemetry:heartbeat-remove": ("GET", "POST"),
    "telemetry:channel-rotate": ("POST",),
    "api:config": ("PUT",),  # which may remove pools
    "api:client-key-list": ("POST",),
    "api:client-key-detail": ("PATCH", "DELETE"),
    "api:fleet-settings": ("PATCH",),
    "telemetry-api:channel-list": ("POST",),
    "telemetry-api:channel-detail": ("PATCH", "DELETE"),
    "telemetry-api:heartbeat": ("POST", "PATCH", "DELETE"),
    "telemetry-api:metrics-server-list": ("POST",),
    "telemetry-api:metrics-server-detail": ("PATCH", "DELETE"),
    "telemetry-api:channel-rotate": ("POST",),
    "api:project-detail": ("PATCH", "DELETE"),
    "api:pool-detail": ("DELETE",),
    "api:token-list": ("POST",),
    "api:token-detail": ("DELETE",),
}
ASKS_AGAIN = frozenset((route, method) for route, methods in _ASKED_AGAIN.items() for method in methods)

# The objects that addresses name: the parameter, the model, and the field that the parameter holds.
NAMED_BY: Mapping[str, tuple[str, str]] = {
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
    "person_id": ("auth.User", "pk"),
    "rule_id": ("telemetry.AlertRule", "pk"),
    "alert_id": ("telemetry.Alert", "pk"),
    "silence_id": ("telemetry.Silence", "pk"),
    "channel_id": ("telemetry.Channel", "pk"),
    "server_id": ("telemetry.MetricsServer", "pk"),
    "notification_id": ("telemetry.Notification", "pk"),
}


# What concerns no project alone: a role counts there only if it is held in all of them.
FLEET_WIDE = frozenset(
    {
        "telemetry:channels",
        "telemetry:channel-new",
        "telemetry:heartbeat",
        "telemetry:heartbeat-remove",
        "telemetry:metrics-servers",
        "telemetry:metrics-server-new",
        "controlplane:routers",
        "controlplane:configurations",
        "controlplane:configuration",
        "controlplane:configuration-compare",
        "controlplane:people",
        "controlplane:person-new",
        "controlplane:project-new",
        "controlplane:limits",
        "controlplane:admission",
        "controlplane:audit",
        "controlplane:audit-csv",
        "api:project-list",
        "api:router-list",
        "api:configuration-list",
        "api:configuration-compare",
        "api:token-list",
        "api:fleet-settings",
        "api:audit-list",
        "telemetry-api:channel-list",
        "telemetry-api:heartbeat",
        "telemetry-api:metrics-server-list",
    }
)


def opens(actor: Actor, route: str, needed: Role) -> bool:
    """Whether an address that names no object opens to somebody."""
    return actor.may(needed, None) if route in FLEET_WIDE else actor.may_somewhere(needed)


def needed_role(route: str, method: str) -> Role | None:
    """The role that a method of a route needs; None where nobody may."""
    methods = RULES.get(route, {})
    return methods.get("GET" if method in {"HEAD", "OPTIONS"} else method)
