"""The one way out: every request that the control plane or telemetry makes goes through here, and every mail.

A URL may come from a person or a router, so each connection is guarded: the host is resolved once, every address it
has is checked, and the connection is made to an address that was checked, with the host kept for ``Host`` and TLS.
No redirect is followed, no proxy is taken from the environment, and no answer is longer than it may be.
"""

from controlplane.egress.addresses import Rules, fleet_rules, mail_rules, provider_rules, webhook_rules
from controlplane.egress.client import (
    Answer,
    AnswerTooLargeError,
    fetch,
    fetch_async,
    guarded_async_client,
    guarded_client,
    guarded_session,
)
from controlplane.egress.transport import EgressRefusedError, guarded_socket, resolve, system_tls, written_addresses

__all__ = [
    "Answer",
    "AnswerTooLargeError",
    "EgressRefusedError",
    "Rules",
    "fetch",
    "fetch_async",
    "fleet_rules",
    "guarded_async_client",
    "guarded_client",
    "guarded_session",
    "guarded_socket",
    "mail_rules",
    "provider_rules",
    "resolve",
    "system_tls",
    "webhook_rules",
    "written_addresses",
]
