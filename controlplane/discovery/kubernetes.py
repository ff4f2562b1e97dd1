"""Replicas by the EndpointSlices of a Kubernetes service.

A pod's name is the identity, so a replica keeps its name when its pod gets another address. What Kubernetes leaves
unsaid is read as its documents say: an unknown ``ready`` counts as ready, an unknown ``terminating`` as not. During a
change an endpoint may stand in two slices; ``gather`` takes the one that is most ready.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode, urlsplit

import httpx
import msgspec
from msgspec import Meta, Struct, field

from controlplane.discovery.targets import (
    Bounds,
    Found,
    PollError,
    Scheme,
    SchemeChoice,
    SourceSettings,
    Target,
    base_url,
    gather,
    shown,
)
from controlplane.egress import FetchedResponse, fetch, guarded_client
from controlplane.models import TargetCondition

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE = 250  # slices asked for at once; each holds at most 100 endpoints unless somebody set more
MOST_PAGES = 40
LONGEST_PAGE = 16 << 20  # bytes
DnsLabel = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")]


class KubernetesSettings(SourceSettings, frozen=True):
    """A service, and the API server that knows its pods."""

    service: Annotated[DnsLabel, Meta(description="The service whose pods are the replicas.")]
    namespace: Annotated[DnsLabel, Meta(description="The namespace that the service is in.")] = "default"
    port: Annotated[
        str,
        Meta(
            pattern=r"^([1-9][0-9]{0,4}|[a-z]([a-z0-9-]{0,13}[a-z0-9])?)?\Z",
            description="The port's number, or its name in the service; empty: the only one that there is.",
        ),
    ] = ""
    scheme: SchemeChoice = Scheme.HTTP
    api_url: Annotated[
        str,
        Meta(
            max_length=500,
            description="The API server, such as https://10.0.0.1:6443; empty: that of the cluster that this runs in, "
            "with the pod's own service account.",
        ),
    ] = ""
    ca: Annotated[
        str,
        Meta(
            max_length=20_000,
            description="The authority that signed the API server's certificate, as PEM; empty: the system's.",
        ),
    ] = ""


class KubernetesKind:
    """The pods of a Kubernetes service."""

    name = "kubernetes"
    label = "Kubernetes"
    help = "The pods of a service, with their readiness: replicas keep their pod's name, and drain as it terminates."
    settings: type[SourceSettings] = KubernetesSettings
    secret = "token"  # noqa: S105 - what it is called

    def look(self, settings: Any, secret: str, bounds: Bounds) -> Found:
        """List the service's slices, page by page."""
        access = _access(settings, secret)
        return gather(targets(_slices(access, settings, bounds), settings), bounds)


# --- what the API server answers ------------------------------------------------------------------------


class Conditions(Struct):
    """None where the server does not say."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Reference(Struct):
    """What an endpoint belongs to."""

    kind: str = ""
    name: str = ""


class Endpoint(Struct, rename="camel"):
    """One pod's addresses; they stand for each other, and the first is to be used."""

    addresses: list[str]
    conditions: Conditions | None = None
    hostname: str | None = None
    target_ref: Reference | None = None
    node_name: str | None = None
    zone: str | None = None


class SlicePort(Struct):
    """A port that every endpoint of a slice has."""

    name: str | None = None
    port: int | None = None


class Slice(Struct, rename="camel"):
    """Endpoints of one kind of address."""

    address_type: str
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
    """The endpoints of one kind of address, IPv4 where there is any: a pod with both is one replica."""
    filled = [one for one in slices if one.endpoints]
    family = "IPv4" if any(one.address_type == "IPv4" for one in filled) else "IPv6"
    for one in filled:
        if one.address_type == family:
            port = _port(one.ports or [], settings)
            for endpoint in one.endpoints or []:
                yield _target(endpoint, port, settings)


def _target(endpoint: Endpoint, port: int, settings: KubernetesSettings) -> Target:
    address = endpoint.addresses[0] if endpoint.addresses else ""
    pod = endpoint.target_ref
    name = (pod.name if pod and pod.kind == "Pod" else "") or endpoint.hostname
    labels = {"node": endpoint.node_name, "zone": endpoint.zone}
    return Target(
        key=name or f"{address}:{port}",
        url=base_url(settings.scheme, address, port),
        condition=_condition(endpoint.conditions or Conditions()),
        labels={label: value for label, value in labels.items() if value},
    )


def _condition(said: Conditions) -> TargetCondition:
    if said.terminating:
        return TargetCondition.TERMINATING
    return TargetCondition.NOT_READY if said.ready is False else TargetCondition.READY


def _port(ports: Sequence[SlicePort], settings: KubernetesSettings) -> int:
    """The port that is set, or the only one; PollError where that cannot be said."""
    if settings.port.isdigit():
        return int(settings.port)
    numbered = {one.name or "": one.port for one in ports if one.port}
    if settings.port:
        found = numbered.get(settings.port)
    else:
        found = next(iter(numbered.values())) if len(numbered) == 1 else None
    if found is None:
        names = ", ".join(shown(name or number, 20) for name, number in sorted(numbered.items())) or "none"
        wanted = f"no port named {settings.port}" if settings.port else "not exactly one port"
        raise PollError(f"The service has {wanted}; it has {shown(names, 200)}. Set the port.")
    return found


# --- asking the API server --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Access:
    url: str
    token: str
    tls: ssl.SSLContext | None


def _access(settings: KubernetesSettings, token: str) -> _Access:
    """The API server that is set, or the cluster's own; a service account's token goes to its own server alone."""
    if not token.isascii() or not token.isprintable() or " " in token:  # no error may ever quote it
        raise PollError("The token holds blanks or characters that no token has.")
    if settings.api_url:
        return _Access(_checked(settings.api_url, token), token, _authority(settings.ca))
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise PollError("This runs in no Kubernetes cluster: name the API server and give a token.")
    try:
        own = (ACCOUNT / "token").read_text(encoding="ascii").strip()  # anew each time: the cluster changes it
        authority = (ACCOUNT / "ca.crt").read_text(encoding="ascii")
    except (OSError, UnicodeError) as error:
        raise PollError(f"The pod's service account cannot be read: {type(error).__name__}.") from None
    return _Access(base_url("https", host, int(port)), own, _authority(authority))


def _checked(url: str, token: str) -> str:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        host = None
    if not host or parts.scheme not in {"http", "https"} or parts.query or parts.fragment or parts.username:
        raise PollError("The API server's address is no URL such as https://10.0.0.1:6443.")
    if token and parts.scheme == "http" and host not in {"127.0.0.1", "::1", "localhost"}:
        raise PollError("A token is sent over https only.")
    return url.rstrip("/")


def _authority(pem: str) -> ssl.SSLContext | None:
    if not pem.strip():
        return None
    try:
        return ssl.create_default_context(cadata=pem)
    except (ssl.SSLError, ValueError):
        raise PollError("The authority is no certificate in PEM form.") from None


def _slices(access: _Access, settings: KubernetesSettings, bounds: Bounds) -> list[Slice]:
    """Every slice; a list that expired between two pages (410) is asked for once more from its beginning."""
    ends = time.monotonic() + bounds.deadline_s
    with guarded_client(bounds.rules, tls=access.tls) as http:
        for attempt in (1, 2):
            try:
                return list(_pages(http, access, settings, ends, bounds))
            except _ExpiredError:
                if attempt == 2:
                    raise PollError("The API server's list expired twice while it was read.") from None
    raise AssertionError("the loop returns or raises")


class _ExpiredError(Exception):
    """The server forgot the list that a page continues."""


def _pages(
    http: httpx.Client, access: _Access, settings: KubernetesSettings, ends: float, bounds: Bounds
) -> Iterator[Slice]:
    onward, endpoints = "", 0
    for _ in range(MOST_PAGES):
        page = _read(_get(http, access, settings, onward, ends - time.monotonic()), settings)
        endpoints += sum(len(one.endpoints or ()) for one in page.items)
        if endpoints > 4 * bounds.max_targets:
            raise PollError(f"The service has {endpoints} endpoints or more; this source takes {bounds.max_targets}.")
        yield from page.items
        onward = page.metadata.next or ""
        if not onward:
            return
    raise PollError(f"The API server's list has more than {MOST_PAGES} pages.")


def _get(
    http: httpx.Client, access: _Access, settings: KubernetesSettings, onward: str, left_s: float
) -> FetchedResponse:
    query = {"labelSelector": f"kubernetes.io/service-name={settings.service}", "limit": str(PAGE)}
    path = f"/apis/discovery.k8s.io/v1/namespaces/{settings.namespace}/endpointslices"
    url = f"{access.url}{path}?{urlencode(query | ({'continue': onward} if onward else {}))}"
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {access.token}"} if access.token else {})
    if left_s <= 0:
        raise PollError("The API server took too long.")
    try:
        return fetch(http, "GET", url, deadline_s=left_s, max_bytes=LONGEST_PAGE, headers=headers)
    except httpx.TimeoutException:
        raise PollError("The API server took too long.") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise PollError(f"The API server cannot be reached: {shown(error, 200)}") from None


def _read(answer: FetchedResponse, settings: KubernetesSettings) -> _SliceList:
    if answer.status == 410:
        raise _ExpiredError
    if answer.status != 200:
        raise PollError(_refusal(answer, settings))
    try:
        return msgspec.json.decode(answer.body, type=_SliceList)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise PollError(f"The API server's answer is no list of EndpointSlices: {shown(error, 200)}") from None


def _refusal(answer: FetchedResponse, settings: KubernetesSettings) -> str:
    if answer.status == 401:
        return "The API server does not know this token (401)."
    if answer.status == 403:
        return f"The token may not list endpointslices in namespace {settings.namespace} (403)."
    try:
        said = msgspec.json.decode(answer.body, type=_Status).message
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        said = ""
    return f"The API server answered {answer.status}{': ' + shown(said, 200) if said else ''}."
