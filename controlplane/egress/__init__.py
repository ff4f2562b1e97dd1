"""Outgoing HTTP and mail connections of the control plane and telemetry, protected against server-side request forgery.

A URL may come from a user or a router. The host is resolved once, every address is checked, and the connection goes
to a checked address, with the host name kept for ``Host`` and TLS. Redirects are not followed, proxies from the
environment are ignored, and response sizes are limited.
"""

from controlplane.egress.addresses import Rules, fleet_rules, mail_rules, provider_rules, webhook_rules
from controlplane.egress.client import (
    FetchedResponse,
    ResponseTooLargeError,
    fetch,
    fetch_async,
    guarded_async_client,
    guarded_client,
    guarded_session,
)
from controlplane.egress.transport import EgressDeniedError, guarded_socket, literal_denial, resolve, system_tls

__all__ = [
    "EgressDeniedError",
    "FetchedResponse",
    "ResponseTooLargeError",
    "Rules",
    "fetch",
    "fetch_async",
    "fleet_rules",
    "guarded_async_client",
    "guarded_client",
    "guarded_session",
    "guarded_socket",
    "literal_denial",
    "mail_rules",
    "provider_rules",
    "resolve",
    "system_tls",
    "webhook_rules",
]
