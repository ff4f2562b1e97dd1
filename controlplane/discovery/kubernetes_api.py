"""Requests to a Kubernetes API server: one object, or a list page by page, within one deadline.

Inside a cluster each poll reads the pod's service account again, because its token is rotated. Redirects are not
followed, and a token goes only to its own server, over HTTPS.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Generic, Protocol, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import httpx
import msgspec
from msgspec import Meta, Struct, field

from controlplane.discovery.targets import PollError, PollLimits, base_url, printable
from controlplane.egress import FetchedResponse, Rules, fetch, guarded_client, literal_denial
from routing.schema import ConfigError, IpNetwork, check_base_url, is_loopback

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
PAGE_OBJECTS = 250  # a slice has at most 100 endpoints by default; a pod has 10 to 20 kB
MAX_PAGES = 40
MAX_PAGE_BYTES = 16 << 20

DnsLabel = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")]
Namespace = Annotated[DnsLabel, Meta(description="Namespace of the pods.")]
ServerUrl = Annotated[
    str,
    Meta(
        max_length=500,
        description="URL of the API server, such as https://10.0.0.1:6443; empty: the cluster that Warmpath "
        "runs in, with the pod's service account.",
    ),
]
AuthorityPem = Annotated[
    str,
    Meta(
        max_length=20_000,
        description="Certificate authority of the API server, PEM; empty: the system's authorities.",
    ),
]

T = TypeVar("T")


class ServerSettings(Protocol):
    """Settings of every kind that asks an API server."""

    @property
    def api_url(self) -> str: ...
    @property
    def ca(self) -> str: ...


class _Page(Struct):
    next: str | None = field(default=None, name="continue")


class ObjectList(Struct, Generic[T]):
    """One page of a list."""

    items: list[T]
    metadata: _Page = field(default_factory=_Page)


class _Status(Struct):
    message: str = ""


@dataclass(frozen=True, slots=True)
class Resource:
    """Objects of one kind in one namespace."""

    group: str  # "api/v1", or "apis/<group>/<version>"
    namespace: str
    plural: str  # as in URLs and roles
    words: str  # as in messages

    @property
    def path(self) -> str:
        return f"/{self.group}/namespaces/{self.namespace}/{self.plural}"


@dataclass(frozen=True, slots=True)
class _Account:
    url: str
    token: str
    tls: ssl.SSLContext | None
    networks: tuple[IpNetwork, ...] = ()  # allowed besides the poll's: the cluster's own API server


class _ExpiredError(Exception):
    """The server dropped the list that a page continues (410)."""


@contextmanager
def api_server(settings: ServerSettings, token: str, limits: PollLimits) -> Iterator[ApiServer]:
    """The configured API server, or the cluster's own. All its requests share the poll's deadline."""
    account = _account(settings, token)
    rules = replace(limits.rules, networks=limits.rules.networks + account.networks)
    with guarded_client(rules, tls=account.tls) as http:
        yield ApiServer(http, account, time.monotonic() + limits.deadline_s)


class ApiServer:
    """An open connection to an API server."""

    def __init__(self, http: httpx.Client, account: _Account, ends_at: float) -> None:
        self._http = http
        self._account = account
        self._ends_at = ends_at  # of the monotonic clock

    def get_object(self, resource: Resource, name: str, kind: type[T]) -> T:
        """One object by its name."""
        response = self._get(f"{resource.path}/{quote(name, safe='')}")
        if response.status == 404:
            raise PollError(f"There is no {resource.words} {name} in namespace {resource.namespace} (404).")
        return _decoded(response, kind, resource, "get", f"a valid {resource.words}")

    def list_objects(
        self, resource: Resource, selector: str, page: type[ObjectList[T]], limit: int, size: Callable[[T], int]
    ) -> list[T]:
        """All objects that match; a list that expires between two pages is read once more from its beginning.

        PollError for more than four engines per allowed target, as ``size`` counts them in an object.
        """
        for attempt in (1, 2):
            try:
                return list(self._pages(resource, selector, page, limit, size))
            except _ExpiredError:
                if attempt == 2:
                    raise PollError("The API server's list expired twice while it was read.") from None
        raise AssertionError("the loop returns or raises")

    def _pages(
        self, resource: Resource, selector: str, page: type[ObjectList[T]], limit: int, size: Callable[[T], int]
    ) -> Iterator[T]:
        query, engines = {"labelSelector": selector, "limit": str(PAGE_OBJECTS)}, 0
        for _ in range(MAX_PAGES):
            response = self._get(f"{resource.path}?{urlencode(query)}")
            if response.status == 410:
                raise _ExpiredError
            objects = _decoded(response, page, resource, "list", f"a list of {resource.words}")
            engines += sum(map(size, objects.items))
            if engines > 4 * limit:
                raise PollError(f"The source has at least {engines} endpoints; the limit is {limit}.")
            yield from objects.items
            if not objects.metadata.next:
                return
            query["continue"] = objects.metadata.next
        raise PollError(f"The API server's list has more than {MAX_PAGES} pages.")

    def _get(self, path: str) -> FetchedResponse:
        left_s, token = self._ends_at - time.monotonic(), self._account.token
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
        if left_s <= 0:
            raise PollError("The API server did not respond in time.")
        try:
            url = self._account.url + path
            return fetch(self._http, "GET", url, deadline_s=left_s, max_bytes=MAX_PAGE_BYTES, headers=headers)
        except httpx.TimeoutException:
            raise PollError("The API server did not respond in time.") from None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise PollError(f"The API server cannot be reached: {printable(error, 200)}") from None


def _decoded(response: FetchedResponse, kind: type[T], resource: Resource, verb: str, expected: str) -> T:
    if response.status != 200:
        raise PollError(_error_text(response, resource, verb))
    try:
        return msgspec.json.decode(response.body, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise PollError(f"The API server did not return {expected}: {printable(error, 200)}") from None


def _error_text(response: FetchedResponse, resource: Resource, verb: str) -> str:
    if response.status == 401:
        return "The API server rejected the token (401)."
    if response.status == 403:
        return f"The token may not {verb} {resource.plural} in namespace {resource.namespace} (403)."
    try:
        message = msgspec.json.decode(response.body, type=_Status).message
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        message = ""
    return f"The API server returned status {response.status}{': ' + printable(message, 200) if message else ''}."


def _account(settings: ServerSettings, token: str) -> _Account:
    """URL, token and authority; a service account's token goes only to its own server."""
    if not token.isascii() or not token.isprintable() or " " in token:  # checked here, so that no later error quotes it
        raise PollError("The token has spaces or invalid characters.")
    if settings.api_url:
        return _Account(_checked_url(settings.api_url, token), token, _authority(settings.ca))
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise PollError("Warmpath does not run in a Kubernetes cluster: set the API server and its token.")
    try:
        account_token = (ACCOUNT / "token").read_text(encoding="ascii").strip()  # read each time: it is rotated
        authority = (ACCOUNT / "ca.crt").read_text(encoding="ascii")
    except (OSError, UnicodeError) as error:
        raise PollError(f"The pod's service account cannot be read: {type(error).__name__}.") from None
    url = base_url("https", host, int(port))
    return _Account(url, account_token, _authority(authority), _network_of(host))


def _network_of(host: str) -> tuple[IpNetwork, ...]:
    """The address of the cluster's own API server as a network: some clusters give services public addresses."""
    try:
        return (ipaddress.ip_network(host),)
    except ValueError:
        return ()  # a name


def checked_api_url(url: str, rules: Rules) -> str:
    """The normal form of the URL of an API server; "" for the cluster's own. ConfigError."""
    if not url:
        return url
    url = check_base_url(url, "api_url")
    if reason := literal_denial(url, rules):
        raise ConfigError("api_url", f"{reason}; WARMPATH_FLEET_NETWORKS lists the allowed networks")
    return url


def _checked_url(url: str, token: str) -> str:
    try:
        url = check_base_url(url)
    except ConfigError as error:
        raise PollError(f"Invalid API server: {error.reason}.") from None
    if token and url.startswith("http:") and not is_loopback(urlsplit(url).hostname or ""):
        raise PollError("A token is sent over HTTPS only.")
    return url


def _authority(pem: str) -> ssl.SSLContext | None:
    if not pem.strip():
        return None
    try:
        return ssl.create_default_context(cadata=pem)
    except (ssl.SSLError, ValueError):
        raise PollError("Invalid certificate authority: expected a certificate in PEM format.") from None
