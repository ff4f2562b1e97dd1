"""Kubernetes discovery: the EndpointSlices of one service.

A target is identified by its pod's name, so a replica keeps its name when its pod gets another address. Missing
conditions have Kubernetes' documented meaning: unknown ``ready`` counts as ready, unknown ``terminating`` as not
terminating. An endpoint can be in two slices during an update; ``collect`` keeps the most ready one.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

import httpx
import msgspec
from msgspec import Meta, Struct, field

from controlplane.discovery.targets import (
    ROLE_LABELS,
    PollError,
    PollLimits,
    PollResult,
    Scheme,
    SchemeChoice,
    SourceSettings,
    Target,
    base_url,
    collect,
    printable,
)
from controlplane.egress import FetchedResponse, fetch, guarded_client
from controlplane.models import TargetCondition

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE_SLICES = 250  # a slice has at most 100 endpoints by default
MAX_PAGES = 40
MAX_PAGE_BYTES = 16 << 20
DnsLabel = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")]


class KubernetesSettings(SourceSettings, frozen=True):
    """Service and API server."""

    service: Annotated[DnsLabel, Meta(description="Service whose pods are the replicas.")]
    namespace: Annotated[DnsLabel, Meta(description="Namespace of the service.")] = "default"
    port: Annotated[
        str,
        Meta(
            pattern=r"^([1-9][0-9]{0,4}|[a-z]([a-z0-9-]{0,13}[a-z0-9])?)?\Z",
            description="Number or name of the service's port; may be empty if the service has one port.",
        ),
    ] = ""
    scheme: SchemeChoice = Scheme.HTTP
    api_url: Annotated[
        str,
        Meta(
            max_length=500,
            description="URL of the API server, such as https://10.0.0.1:6443; empty: the cluster that Warmpath "
            "runs in, with the pod's service account.",
        ),
    ] = ""
    ca: Annotated[
        str,
        Meta(
            max_length=20_000,
            description="Certificate authority of the API server, PEM; empty: the system's authorities.",
        ),
    ] = ""


class KubernetesKind:
    name = "kubernetes"
    label = "Kubernetes"
    help = "The pods of a service. A replica keeps its pod's name and drains when the pod terminates."
    settings: type[SourceSettings] = KubernetesSettings
    secret = "token"  # noqa: S105 - its name

    def poll(self, settings: Any, secret: str, limits: PollLimits) -> PollResult:
        """List the service's slices, page by page."""
        return collect(targets(_slices(_api_server(settings, secret), settings, limits), settings), limits)


# --- responses of the API server -----------------------------------------------------------------------


class Conditions(Struct):
    """State of an endpoint; None: not reported."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Reference(Struct):
    """The object, most often a pod, behind an endpoint."""

    kind: str = ""
    name: str = ""


class Endpoint(Struct, rename="camel"):
    """Equivalent addresses of one pod; the first is used."""

    addresses: list[str]
    conditions: Conditions | None = None
    hostname: str | None = None
    target_ref: Reference | None = None
    node_name: str | None = None
    zone: str | None = None


class SlicePort(Struct):
    name: str | None = None
    port: int | None = None


class SliceMetadata(Struct):
    """Kubernetes copies the labels of the service to its slices."""

    labels: dict[str, str] | None = None


class Slice(Struct, rename="camel"):
    """Endpoints of one address family."""

    address_type: str
    metadata: SliceMetadata | None = None
    endpoints: list[Endpoint] | None = None
    ports: list[SlicePort] | None = None


class _Page(Struct):
    next: str | None = field(default=None, name="continue")


class _SliceList(Struct):
    items: list[Slice]
    metadata: _Page = field(default_factory=_Page)


class _Status(Struct):
    message: str = ""


# --- slices to targets: pure ------------------------------------------------------------------------------


def targets(slices: Sequence[Slice], settings: KubernetesSettings) -> Iterator[Target]:
    """The endpoints of one address family, IPv4 if there are any: a dual-stack pod is one replica."""
    filled = [entry for entry in slices if entry.endpoints]
    family = "IPv4" if any(entry.address_type == "IPv4" for entry in filled) else "IPv6"
    for entry in filled:
        if entry.address_type == family:
            port = _port(entry.ports or [], settings)
            for endpoint in entry.endpoints or []:
                yield _target(endpoint, port, settings, (entry.metadata and entry.metadata.labels) or {})


def _target(endpoint: Endpoint, port: int, settings: KubernetesSettings, service_labels: Mapping[str, str]) -> Target:
    address = endpoint.addresses[0] if endpoint.addresses else ""
    pod = endpoint.target_ref
    name = (pod.name if pod and pod.kind == "Pod" else "") or endpoint.hostname
    labels = {"node": endpoint.node_name, "zone": endpoint.zone}
    labels |= {name: service_labels[name] for name in ROLE_LABELS if name in service_labels}
    return Target(
        key=name or f"{address}:{port}",
        url=base_url(settings.scheme, address, port),
        condition=_condition(endpoint.conditions or Conditions()),
        labels={label: value for label, value in labels.items() if value},
    )


def _condition(conditions: Conditions) -> TargetCondition:
    if conditions.terminating:
        return TargetCondition.TERMINATING
    return TargetCondition.NOT_READY if conditions.ready is False else TargetCondition.READY


def _port(ports: Sequence[SlicePort], settings: KubernetesSettings) -> int:
    """The configured port, or the only one; PollError if it is missing or ambiguous."""
    if settings.port.isdigit():
        return int(settings.port)
    numbered = {entry.name or "": entry.port for entry in ports if entry.port}
    if settings.port:
        port = numbered.get(settings.port)
    else:
        port = next(iter(numbered.values())) if len(numbered) == 1 else None
    if port is None:
        names = ", ".join(printable(name or number, 20) for name, number in sorted(numbered.items())) or "none"
        problem = f"no port named {settings.port}" if settings.port else "more or fewer than one port"
        raise PollError(f"The service has {problem} (it has: {printable(names, 200)}). Set the port.")
    return port


# --- requests to the API server --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ApiServer:
    url: str
    token: str
    tls: ssl.SSLContext | None


def _api_server(settings: KubernetesSettings, token: str) -> _ApiServer:
    """The configured API server, or the cluster's own; a service account's token goes only to its own server."""
    if not token.isascii() or not token.isprintable() or " " in token:  # checked here, so that no later error quotes it
        raise PollError("The token has spaces or invalid characters.")
    if settings.api_url:
        return _ApiServer(_checked_url(settings.api_url, token), token, _authority(settings.ca))
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise PollError("Warmpath does not run in a Kubernetes cluster: set the API server and its token.")
    try:
        account_token = (ACCOUNT / "token").read_text(encoding="ascii").strip()  # read each time: it is rotated
        authority = (ACCOUNT / "ca.crt").read_text(encoding="ascii")
    except (OSError, UnicodeError) as error:
        raise PollError(f"The pod's service account cannot be read: {type(error).__name__}.") from None
    return _ApiServer(base_url("https", host, int(port)), account_token, _authority(authority))


def _checked_url(url: str, token: str) -> str:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        host = None
    if not host or parts.scheme not in {"http", "https"} or parts.query or parts.fragment or parts.username:
        raise PollError("Invalid API server: expected a URL such as https://10.0.0.1:6443.")
    if token and parts.scheme == "http" and host not in {"127.0.0.1", "::1", "localhost"}:
        raise PollError("A token is sent over HTTPS only.")
    return url.rstrip("/")


def _authority(pem: str) -> ssl.SSLContext | None:
    if not pem.strip():
        return None
    try:
        return ssl.create_default_context(cadata=pem)
    except (ssl.SSLError, ValueError):
        raise PollError("Invalid certificate authority: expected a certificate in PEM format.") from None


def _slices(server: _ApiServer, settings: KubernetesSettings, limits: PollLimits) -> list[Slice]:
    """All slices; a list that expires between two pages (410) is read once more from its beginning."""
    ends_at = time.monotonic() + limits.deadline_s
    with guarded_client(limits.rules, tls=server.tls) as http:
        for attempt in (1, 2):
            try:
                return list(_pages(http, server, settings, ends_at, limits))
            except _ExpiredError:
                if attempt == 2:
                    raise PollError("The API server's list expired twice while it was read.") from None
    raise AssertionError("the loop returns or raises")


class _ExpiredError(Exception):
    """The server dropped the list that a page continues (410)."""


def _pages(
    http: httpx.Client, server: _ApiServer, settings: KubernetesSettings, ends_at: float, limits: PollLimits
) -> Iterator[Slice]:
    continue_token, endpoints = "", 0
    for _ in range(MAX_PAGES):
        page = _decoded(_get(http, server, settings, continue_token, ends_at - time.monotonic()), settings)
        endpoints += sum(len(entry.endpoints or ()) for entry in page.items)
        if endpoints > 4 * limits.max_targets:
            raise PollError(f"The service has at least {endpoints} endpoints; the limit is {limits.max_targets}.")
        yield from page.items
        continue_token = page.metadata.next or ""
        if not continue_token:
            return
    raise PollError(f"The API server's list has more than {MAX_PAGES} pages.")


def _get(
    http: httpx.Client, server: _ApiServer, settings: KubernetesSettings, continue_token: str, left_s: float
) -> FetchedResponse:
    query = {"labelSelector": f"kubernetes.io/service-name={settings.service}", "limit": str(PAGE_SLICES)}
    path = f"/apis/discovery.k8s.io/v1/namespaces/{settings.namespace}/endpointslices"
    url = f"{server.url}{path}?{urlencode(query | ({'continue': continue_token} if continue_token else {}))}"
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {server.token}"} if server.token else {})
    if left_s <= 0:
        raise PollError("The API server did not respond in time.")
    try:
        return fetch(http, "GET", url, deadline_s=left_s, max_bytes=MAX_PAGE_BYTES, headers=headers)
    except httpx.TimeoutException:
        raise PollError("The API server did not respond in time.") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise PollError(f"The API server cannot be reached: {printable(error, 200)}") from None


def _decoded(response: FetchedResponse, settings: KubernetesSettings) -> _SliceList:
    if response.status == 410:
        raise _ExpiredError
    if response.status != 200:
        raise PollError(_error_text(response, settings))
    try:
        return msgspec.json.decode(response.body, type=_SliceList)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise PollError(f"The API server did not return a list of EndpointSlices: {printable(error, 200)}") from None


def _error_text(response: FetchedResponse, settings: KubernetesSettings) -> str:
    if response.status == 401:
        return "The API server rejected the token (401)."
    if response.status == 403:
        return f"The token may not list endpointslices in namespace {settings.namespace} (403)."
    try:
        message = msgspec.json.decode(response.body, type=_Status).message
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        message = ""
    return f"The API server returned status {response.status}{': ' + printable(message, 200) if message else ''}."
