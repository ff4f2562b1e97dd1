"""One question to a Prometheus-compatible server, by prometheus-api-client, with an end in seconds and in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import requests
from prometheus_api_client.exceptions import PrometheusApiClientException
from prometheus_api_client.prometheus_connect import PrometheusConnect

from controlplane.egress import fleet_rules, guarded_session

MAX_BYTES = 32 << 20  # of one answer: some 50 replicas with all their buckets are 3 MiB
SHOWN_CHARS = 120  # of a server's own words in an error


class PrometheusError(Exception):
    """The server gave no usable answer. The text is for people and names neither its URL nor a secret."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask, and as whom. ``Server`` has no state: every question is a connection of its own."""

    url: str  # up to what /api/v1/query follows
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)  # Authorization, X-Scope-OrgID

    def query(self, promql: str, *, at_s: float, deadline_s: float) -> list[dict[str, Any]]:
        """The result of an instant query as the server gives it; PrometheusError within ``deadline_s``."""
        try:
            with self._connect(deadline_s) as connection:
                result = connection.custom_query(promql, params={"time": f"{at_s:.3f}"}, timeout=deadline_s)
        except (ValueError, KeyError, TypeError):
            raise PrometheusError("what it answers is no answer of Prometheus' API") from None
        except requests.RequestException as error:
            raise PrometheusError(f"it gave no answer ({_reason(error)})") from None
        except PrometheusApiClientException as error:
            raise PrometheusError(_refusal(str(error))) from None
        if not isinstance(result, list):
            raise PrometheusError("what it answers is no answer of Prometheus' API")
        return result

    def _connect(self, deadline_s: float) -> PrometheusConnect:
        """A client that goes out under the fleet's rules. It mounts an unguarded adapter of its own, which goes."""
        session = guarded_session(fleet_rules(), deadline_s=deadline_s, max_bytes=MAX_BYTES)
        guarded = dict(session.adapters)
        client = PrometheusConnect(url=self.url.rstrip("/"), headers=dict(self.headers), session=session)
        session.adapters.clear()
        session.adapters.update(guarded)
        return client


def _reason(error: requests.RequestException) -> str:
    """Why, without the URL that most of these errors quote."""
    words = str(error)
    return "it cannot be reached" if "://" in words or not words else words[:SHOWN_CHARS]


def _refusal(words: str) -> str:
    """What a status other than 200 comes to, in words: the client's text is ``HTTP Status Code N (body)``."""
    status = next((word for word in words.split() if word.isdecimal()), "")
    return {
        "401": "it refuses the credentials (401)",
        "403": "it refuses the credentials (403)",
        "404": "there is no query API under its address (404)",
        "422": "it refuses the query (422): look at the matchers",
        "400": "it refuses the query (400): look at the matchers",
    }.get(status, f"it answers with status {status or 'unknown'}")
