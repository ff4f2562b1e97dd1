"""Kubernetes discovery: the EndpointSlices of one service, or the pods of one InferencePool.

A target is identified by its pod's name, so a replica keeps its name when its pod gets another address. Missing
conditions have Kubernetes' documented meaning: unknown ``ready`` counts as ready, unknown ``terminating`` as not
terminating; a pod without the condition ``Ready`` is not ready. An endpoint can be in two slices during an update;
``collect`` keeps the most ready one.

An InferencePool (Gateway API Inference Extension) selects pods by labels, and each of its target ports is an engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta, Struct, field

from controlplane.discovery.kubernetes_api import (
    ApiServer,
    AuthorityPem,
    DnsLabel,
    Namespace,
    ObjectList,
    Resource,
    ServerUrl,
    api_server,
    checked_api_url,
)
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
from controlplane.egress import Rules
from controlplane.models import TargetCondition


class KubernetesSettings(SourceSettings, frozen=True):
    """Service and API server."""

    service: Annotated[DnsLabel, Meta(description="Service whose pods are the replicas.")]
    namespace: Namespace = "default"
    port: Annotated[
        str,
        Meta(
            pattern=r"^([1-9][0-9]{0,4}|[a-z]([a-z0-9-]{0,13}[a-z0-9])?)?\Z",
            description="Number or name of the service's port; may be empty if the service has one port.",
        ),
    ] = ""
    scheme: SchemeChoice = Scheme.HTTP
    api_url: ServerUrl = ""
    ca: AuthorityPem = ""

    def checked(self, rules: Rules) -> Self:
        return msgspec.structs.replace(self, api_url=checked_api_url(self.api_url, rules))


class KubernetesKind:
    name = "kubernetes"
    label = "Kubernetes"
    help = "The pods of a service. A replica keeps its pod's name and drains when the pod terminates."
    settings: type[SourceSettings] = KubernetesSettings
    secret = "token"  # noqa: S105 - its name

    def poll(self, settings: Any, secret: str, limits: PollLimits) -> PollResult:
        """List the service's slices, page by page."""
        resource = Resource("apis/discovery.k8s.io/v1", settings.namespace, "endpointslices", "EndpointSlices")
        selector = f"kubernetes.io/service-name={settings.service}"
        with api_server(settings, secret, limits) as server:
            slices = server.list_objects(resource, selector, ObjectList[Slice], limits.max_targets, _endpoints_of)
        return collect(targets(slices, settings), limits)


class InferencePoolSettings(SourceSettings, frozen=True):
    """InferencePool and API server."""

    inference_pool: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\Z",
            description="InferencePool whose pods are the replicas, each target port of a pod one replica.",
        ),
    ]
    namespace: Namespace = "default"
    scheme: SchemeChoice = Scheme.HTTP
    api_url: ServerUrl = ""
    ca: AuthorityPem = ""

    def checked(self, rules: Rules) -> Self:
        return msgspec.structs.replace(self, api_url=checked_api_url(self.api_url, rules))


class InferencePoolKind:
    name = "inference_pool"
    label = "InferencePool"
    help = "The pods that an InferencePool of the Gateway API Inference Extension selects, with their labels' roles."
    settings: type[SourceSettings] = InferencePoolSettings
    secret = "token"  # noqa: S105 - its name

    def poll(self, settings: Any, secret: str, limits: PollLimits) -> PollResult:
        """Read the InferencePool, then list the pods that it selects, within one deadline."""
        with api_server(settings, secret, limits) as server:
            pool, pods = _pool_and_pods(server, settings, limits)
        return collect(pool_targets(pool, pods, settings), limits)


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


class PodMetadata(Struct, rename="camel"):
    """Identity of a pod; a deletion timestamp means that it terminates."""

    name: str = ""
    labels: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class PodSpec(Struct, rename="camel"):
    node_name: str | None = None


class PodCondition(Struct):
    type: str
    status: str


class PodStatus(Struct):
    """Where a pod runs, if it does; without an address it has not started."""

    phase: str = ""
    address: str | None = field(default=None, name="podIP")
    conditions: list[PodCondition] | None = None


class Pod(Struct):
    metadata: PodMetadata
    spec: PodSpec = field(default_factory=PodSpec)
    status: PodStatus = field(default_factory=PodStatus)


class PoolSelector(Struct, rename="camel"):
    match_labels: dict[str, str] = field(default_factory=dict)


class PoolPort(Struct):
    number: int


class InferencePoolSpec(Struct, rename="camel"):
    """Which pods serve, and at which ports; HTTP/1.1 if no protocol is named."""

    selector: PoolSelector
    target_ports: list[PoolPort]
    app_protocol: str | None = None


class InferencePool(Struct):
    spec: InferencePoolSpec


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


def _endpoints_of(entry: Slice) -> int:
    return len(entry.endpoints or ())


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


# --- pods of an InferencePool ---------------------------------------------------------------------------------

_LABEL_NAME = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


def _pool_and_pods(
    server: ApiServer, settings: InferencePoolSettings, limits: PollLimits
) -> tuple[InferencePool, list[Pod]]:
    group, namespace = "apis/inference.networking.k8s.io/v1", settings.namespace
    resource = Resource(group, namespace, "inferencepools", "InferencePool")
    pool = server.get_object(resource, settings.inference_pool, InferencePool)
    selector = _selector(pool)
    pods = Resource("api/v1", namespace, "pods", "pods")
    engines = len(pool.spec.target_ports)
    return pool, server.list_objects(pods, selector, ObjectList[Pod], limits.max_targets, lambda _: engines)


def _selector(pool: InferencePool) -> str:
    """The pool's labels as a query; PollError without labels, which would select every pod of the namespace."""
    labels, protocol = pool.spec.selector.match_labels, pool.spec.app_protocol or "http"
    if protocol != "http":
        raise PollError(
            f"The InferencePool's appProtocol {printable(protocol)} is not supported: engines get HTTP/1.1."
        )
    if not labels or not pool.spec.target_ports:
        raise PollError("The InferencePool has no label in its selector, or no target port.")
    for name, value in labels.items():
        if not _LABEL_NAME.fullmatch(name) or not _LABEL_VALUE.fullmatch(value):
            raise PollError(f"The InferencePool's selector has an invalid label: {printable(name)}.")
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))


def pool_targets(pool: InferencePool, pods: Iterable[Pod], settings: InferencePoolSettings) -> Iterator[Target]:
    """Each port of each pod that has an address. The first port has the pod's name, others ``name:port``."""
    ports = list(dict.fromkeys(port.number for port in pool.spec.target_ports))
    for pod in pods:
        address = pod.status.address
        if address and pod.status.phase not in {"Succeeded", "Failed"}:
            labels = {name: value for name, value in (pod.metadata.labels or {}).items() if name in ROLE_LABELS}
            labels |= {"node": pod.spec.node_name} if pod.spec.node_name else {}
            for index, port in enumerate(ports):
                yield Target(
                    key=f"{pod.metadata.name}:{port}" if index else pod.metadata.name,
                    url=base_url(settings.scheme, address, port),
                    condition=_pod_condition(pod),
                    labels=labels,
                )


def _pod_condition(pod: Pod) -> TargetCondition:
    if pod.metadata.deletion_timestamp:
        return TargetCondition.TERMINATING
    conditions = {condition.type: condition.status for condition in pod.status.conditions or ()}
    return TargetCondition.READY if conditions.get("Ready") == "True" else TargetCondition.NOT_READY
