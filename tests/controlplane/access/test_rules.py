"""The rule table against every route and every role."""

import re

import pytest
from django.test import Client
from django.urls import get_resolver
from django.urls.resolvers import URLResolver
from rest_framework.test import APIClient

from controlplane.access.rules import MODEL_OF_URL_PARAMETER, PUBLIC_ROUTES, RULES, is_fleet_wide, needed_role
from controlplane.models import Project, Role

METHODS = ("get", "post", "put", "patch", "delete")
NOT_OURS = {None}  # the catch-all below /api/


def routes(resolver=None, prefix="", namespace=""):
    """(name, path with its parameters as <name>, view) of every route."""
    for pattern in (resolver or get_resolver()).url_patterns:
        address = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            inner = f"{namespace}{pattern.namespace}:" if pattern.namespace else namespace
            yield from routes(pattern, address, inner)
        else:
            yield (f"{namespace}{pattern.name}" if pattern.name else None), address, pattern.callback


ALL = {name: (address, view) for name, address, view in routes() if name not in NOT_OURS}
PAGES = {name for name, (address, _) in ALL.items() if not address.startswith("api/")}


def test_the_table_has_exactly_the_routes_of_the_site():
    named = set(ALL) - PUBLIC_ROUTES
    assert named - set(RULES) == set(), "these routes have no rule, so nobody may use them"
    assert set(RULES) - named == set(), "these rules have no route"
    assert all(set(rule.confirm) <= set(rule.roles) for rule in RULES.values())


@pytest.mark.parametrize("route", sorted(set(ALL) - PUBLIC_ROUTES))
def test_the_table_has_exactly_the_methods_of_each_route(route):
    view = ALL[route][1]
    actions = getattr(view, "actions", None)
    if actions is not None:  # a viewset: the methods that it maps
        methods = {method.upper() for method in actions} - {"HEAD"}
    elif hasattr(view, "cls"):
        methods = {method.upper() for method in METHODS if hasattr(view.cls, method)}
    else:
        methods = set(RULES[route].roles)  # a page: a test below sends each method
    assert set(RULES[route].roles) == methods


def test_viewers_change_only_their_tokens_sessions_and_links():
    changing = {
        (route, method)
        for route, rule in RULES.items()
        for method, role in rule.roles.items()
        if method != "GET" and role is Role.VIEWER
    }
    own_routes = ("tokens", "token-revoke", "session-end", "sessions-end-others")
    shown = ("links", "view-remove", "start-dismiss")  # the last sets a cookie
    assert changing == {
        *((f"controlplane:{name}", "POST") for name in own_routes),
        *((f"telemetry:{name}", "POST") for name in shown),
    }


def test_routes_and_methods_without_a_rule_are_denied():
    assert needed_role("controlplane:nothing", "GET") is None
    assert needed_role("controlplane:fleet", "POST") is None


def test_each_role_covers_the_lower_ones():
    roles = list(Role)
    for rank, role in enumerate(roles):
        assert [role.covers(other) for other in roles] == [position <= rank for position in range(len(roles))]


# --- every page, for every role, in the user's project and in another ---------------------------------


def path_with_ids(address, project):
    """The path with the ids of the objects in ``project``."""
    values = {
        "pool_id": project.pool.pk,
        "pool_name": project.pool.name,
        "group_name": project.group.name,
        "replica_name": project.replica.name,
        "replica_id": project.replica.pk,
        "source_id": project.source.pk,
        "discovered_id": project.discovered.pk,
        "group_id": project.group.pk,
        "policy_id": project.policy.pk,
        "rollout_id": project.rollout.pk,
        "project_id": project.project.pk,
        "router_id": project.router.pk,
        "rule_id": project.rule.pk,
        "alert_id": project.alert.pk,
        "silence_id": project.silence.pk,
        "channel_id": project.channel.pk,
        "server_id": project.server.pk,
        "notification_id": project.notification.pk,
        "what_if_id": project.what_if.pk,
        "revision_id": project.draft.pk,
        "number": 1,
        "state": "draining",
        "slug": "hit-rate",
        "place": "0-0-0-none",
        "code": "none",
        "user_id": 0,
        "key_id": project.key.pk,
        "token_id": 0,
        "session_id": 0,
        "view_id": 0,
        "shared_id": project.shared.pk,
    }
    return "/" + re.sub(r"<(?:\w+:)?(\w+)>", lambda match: str(values[match[1]]), address)


def names_an_object(address):
    return any(name in MODEL_OF_URL_PARAMETER for name in re.findall(r"<(?:\w+:)?(\w+)>", address))


def walk(user, project, requests):
    """(route, method, status) of these requests by a user, with the ids of the objects in ``project``."""
    client = Client(raise_request_exception=False)
    client.force_login(user)
    for route, method in requests:
        path = path_with_ids(ALL[route][0], project)
        yield route, method, getattr(client, method.lower())(path, {}).status_code


EVERY_REQUEST = [(route, method) for route in sorted(PAGES - PUBLIC_ROUTES) for method in RULES[route].roles]


def refusal(role, route, method):
    """The status of a request by a user with a role in the project alone; None if it is allowed."""
    if any(name in ALL[route][0] for name in ("channel_id", "user_id", "router_id", "server_id")):
        return 404  # for those with a role in all projects
    needed = needed_role(route, method)
    return 403 if is_fleet_wide(route) or not role.covers(needed) else None


@pytest.mark.timeout(600)  # hundreds of requests for each role
@pytest.mark.parametrize("role", list(Role))
def test_pages_are_forbidden_exactly_as_the_table_says(role, here, user_with):
    """Every refusal; what is allowed to the lowest role that the request needs, and to the highest role."""
    requests = [
        (route, method)
        for route, method in EVERY_REQUEST
        if refusal(role, route, method) or role in {needed_role(route, method), Role.ADMIN}
    ]
    for route, method, status in walk(user_with(role), here, requests):
        expected = refusal(role, route, method)
        is_right = status == expected if expected else status not in {403, 500}
        assert is_right, f"{role}: {method} {route} responded {status}"


@pytest.mark.parametrize("role", list(Role))
def test_pages_of_other_projects_are_not_found(role, there, user_with):
    requests = [(route, method) for route, method in EVERY_REQUEST if names_an_object(ALL[route][0])]
    for route, method, status in walk(user_with(role), there, requests):
        assert status == 404, f"{role}: {method} {route}"
    there.replica.refresh_from_db()
    assert there.replica.state == "active"
    assert there.policy.draft() is not None


def test_a_user_without_a_role_sees_no_page(here, user_with):
    for route, method, status in walk(user_with(None), here, EVERY_REQUEST):
        assert status in {403, 404}, f"{method} {route}"


@pytest.mark.parametrize("role", list(Role))
def test_a_role_in_all_projects_covers_every_page(role, here, user_with):
    """Every refusal, and what is allowed to the lowest role that the request needs."""
    allowed = [(route, method) for route, method in EVERY_REQUEST if needed_role(route, method) is role]
    refused = [(route, method) for route, method in EVERY_REQUEST if not role.covers(needed_role(route, method))]
    for route, method, status in walk(user_with(role, everywhere=True), here, refused + allowed):
        if "user_id" in ALL[route][0]:
            continue  # no user has the id 0
        is_refused = (route, method) in refused
        assert (status == 403) == is_refused, f"{role}: {method} {route} responded {status}"


def test_every_form_needs_the_csrf_token(here, user_with):
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(user_with(Role.ADMIN, everywhere=True))
    form_routes = [route for route in sorted(PAGES - PUBLIC_ROUTES) if "POST" in RULES[route].roles]
    for route in form_routes:
        response = strict.post(path_with_ids(ALL[route][0], here))
        assert (response.status_code, "Form expired" in response.text) == (403, True), route
    assert len(form_routes) > 20
    for route in sorted(route for route in PUBLIC_ROUTES & PAGES if route.startswith(("account_", "mfa_"))):
        assert strict.post(path_with_ids(ALL[route][0], here)).status_code == 403, route
    rest = APIClient(enforce_csrf_checks=True)
    rest.force_login(user_with(Role.ADMIN))
    assert rest.post("/api/v1/projects", {"name": "forged"}).status_code == 403
    assert not Project.objects.filter(name="forged").exists()
