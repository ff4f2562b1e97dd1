"""Every route outside the API is in ``every_page``, so that no page is left untested."""

from __future__ import annotations

import uuid
from collections import defaultdict
from urllib.parse import urlsplit

from django.urls import Resolver404, URLPattern, get_resolver, resolve

from controlplane.access.rules import PUBLIC_ROUTES, RULES
from tests.end_to_end.every_page import ANYWHERE, ON_THE_WAY, of_rows

# GET routes that are no pages: page fragments, downloads and redirects.
NOT_PAGES = {
    "telemetry:status", "telemetry:overview-live", "telemetry:pool", "telemetry:group-live", "telemetry:replica-live",
    "telemetry:chart-figure", "telemetry:chart-csv", "telemetry:chart-json", "telemetry:breakdown-figure",
    "telemetry:events-csv", "telemetry:value-csv",
    "telemetry:capacity-figure", "telemetry:what-if-draft",
    "controlplane:policy-rollout", "controlplane:warming", "controlplane:pool-sources",
    "controlplane:audit-csv", "telemetry:link-follow",
    "telemetry:shared", "telemetry:shared-live", "telemetry:shared-figure",
    "healthz", "readyz", "telemetry:metrics",
    "account_inactive", "account_set_password", "openid_connect_callback", "single_sign_on_disconnect",
}  # fmt: skip


def routes_with_a_test() -> set[str]:
    rows = defaultdict(lambda: "1", delivered=str(uuid.UUID(int=1)), waiting=str(uuid.UUID(int=2)))
    names = set()
    for path in [*ANYWHERE, *of_rows(rows), *ON_THE_WAY]:
        try:
            names.add(resolve(urlsplit(path).path).view_name)
        except Resolver404:
            assert path == "/no-such-page/", f"{path} is not a route"
    return names


def routes() -> set[str]:
    """Names of all routes outside the API."""
    names, pending = set(), [("", pattern) for pattern in get_resolver().url_patterns]
    while pending:
        namespace, pattern = pending.pop()
        if isinstance(pattern, URLPattern):
            names.add(f"{namespace}{pattern.name}" if pattern.name else "")
        else:
            inner = f"{namespace}{pattern.namespace}:" if pattern.namespace else namespace
            pending += [(inner, child) for child in pattern.url_patterns]
    return {name for name in names if name and not name.startswith(("api:", "telemetry-api:"))}


def test_every_page_is_tested():
    shown = {name for name, rule in RULES.items() if "GET" in rule.roles and ":" in name} | PUBLIC_ROUTES
    pages = {
        name for name in shown & (routes() | {"healthz", "readyz"}) if not name.startswith(("api:", "telemetry-api:"))
    }

    assert pages - NOT_PAGES - routes_with_a_test() == set()
    assert NOT_PAGES - pages == set(), "routes that no longer exist"
