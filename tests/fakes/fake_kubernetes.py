"""A Kubernetes API server over HTTP(S) with EndpointSlices, pods and InferencePools: pages, refusals, delays."""

from __future__ import annotations

import json
import ssl
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.fakes.http_server import FakeHandler, FakeServer, running

TOKEN = "a-service-account-token"


def pod(
    name: str,
    address: str,
    *,
    ready: bool | None = True,
    serving: bool | None = True,
    terminating: bool | None = False,
) -> dict[str, Any]:
    """One endpoint in the format of ``kubectl get endpointslices -o json``."""
    conditions = {"ready": ready, "serving": serving, "terminating": terminating}
    return {
        "addresses": [address],
        "conditions": {key: value for key, value in conditions.items() if value is not None},
        "nodeName": "gpu-node-1",
        "targetRef": {
            "kind": "Pod",
            "name": name,
            "namespace": "prod",
            "uid": "6e1bd1a9-4f0c-4c5e-9a0f-0f7b6f1a2c3d",
        },
        "zone": "eu-central-1a",
    }


def endpoint_slice(
    *endpoints: dict[str, Any],
    family: str = "IPv4",
    ports: Any = None,
    name: str = "vllm-x7k2p",
    labels: dict[str, str] | None = None,
) -> dict:
    """An EndpointSlice as the controller writes it."""
    return {
        "metadata": {
            "name": name,
            "generateName": "vllm-",
            "namespace": "prod",
            "uid": "0d3c9f52-6d2b-44a7-8f63-5d5a3c1c3e0e",
            "resourceVersion": "812411",
            "generation": 7,
            "creationTimestamp": "2026-11-20T10:12:44Z",
            "labels": {
                "app": "vllm",
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": "vllm",
                **(labels or {}),
            },
            "annotations": {"endpoints.kubernetes.io/last-change-trigger-time": "2026-11-21T09:00:00Z"},
        },
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": ports if ports is not None else [{"name": "http", "protocol": "TCP", "port": 8000}],
    }


def engine_pod(
    name: str,
    address: str | None,
    *,
    ready: str | None = "True",
    phase: str = "Running",
    is_terminating: bool = False,
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A pod in the format of ``kubectl get pods -o json``, with the fields that matter and some that do not."""
    times = {"deletionTimestamp": "2026-11-21T09:00:30Z", "deletionGracePeriodSeconds": 30} if is_terminating else {}
    addresses = {"podIP": address, "podIPs": [{"ip": address}]} if address else {}
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-21T08:00:00Z"}]
    conditions += [{"type": "Ready", "status": ready, "lastProbeTime": None}] if ready else []
    return {
        "metadata": {
            "name": name,
            "generateName": "vllm-",
            "namespace": "prod",
            "uid": "b0c5f1a2-8d51-4f0e-9a41-2a8f3f6d9e11",
            "labels": {"app": "vllm", "pod-template-hash": "7d9c5b8f6d", **(labels or {})},
            **times,
        },
        "spec": {"nodeName": "gpu-node-1", "containers": [{"name": "vllm", "image": "vllm/vllm-openai"}]},
        "status": {"phase": phase, "conditions": conditions, "qosClass": "Guaranteed", **addresses},
    }


def inference_pool(
    *ports: int, labels: dict[str, str] | None = None, protocol: str | None = None, name: str = "llama"
) -> dict[str, Any]:
    """An InferencePool of the Gateway API Inference Extension, version v1."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "prod", "resourceVersion": "812377"},
        "spec": {
            "selector": {"matchLabels": {"app": "vllm"} if labels is None else labels},
            "targetPorts": [{"number": port} for port in ports or (8000,)],
            "endpointPickerRef": {"group": "", "kind": "Service", "name": "llama-epp", "failureMode": "FailClose"},
            **({"appProtocol": protocol} if protocol else {}),
        },
        "status": {"parents": [{"parentRef": {"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "gw"}}]},
    }


SLICES = "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
PODS = "/api/v1/namespaces/prod/pods"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/prod/inferencepools/"


class Handler(FakeHandler):
    server: FakeKubernetes

    def do_GET(self):  # noqa: N802 - http.server's name
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        self.server.requests.append((url.path, query, self.headers.get("Authorization")))
        if self.server.mode == "hang":
            return self.hang()
        return self._respond(url.path, query)

    def _respond(self, path, query):
        server = self.server
        if server.mode == "garbage":
            return self._send(200, b"<html>sign in</html>")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._status(401, "Unauthorized", "Unauthorized")
        if not path.startswith((SLICES, PODS, POOLS)) or path == server.forbidden:
            return self._status(403, "Forbidden", f"{path.rpartition('/')[2]} is forbidden: {path}")
        if server.mode == "redirect":
            return self.respond(307, Location="http://127.0.0.1:1/")
        if server.mode == "500":
            return self._status(500, "InternalError", "etcdserver: request timed out\r\nSet-Cookie: x")
        if "continue" in query and server.expire:
            server.expire -= 1
            return self._status(410, "Expired", "The provided continue parameter is too old")
        if path.startswith(POOLS):
            return self._pool(path.removeprefix(POOLS))
        if path == PODS:
            return self._page(query, "PodList", "v1", self.server.selected_pods(query.get("labelSelector", "")))
        is_selected = query.get("labelSelector") == "kubernetes.io/service-name=vllm"
        slices = self.server.slices if is_selected else []
        return self._page(query, "EndpointSliceList", "discovery.k8s.io/v1", slices)

    def _pool(self, name):
        found = next((pool for pool in self.server.pools if pool["metadata"]["name"] == name), None)
        if found is None:
            return self._status(404, "NotFound", f'inferencepools.inference.networking.k8s.io "{name}" not found')
        return self._send(200, json.dumps(found).encode())

    def _page(self, query, kind, version, items):
        size, start = min(int(query.get("limit", "500")), self.server.page), int(query.get("continue", "0"))
        metadata: dict[str, Any] = {"resourceVersion": "812500"}
        if start + size < len(items):
            metadata |= {"continue": str(start + size), "remainingItemCount": len(items) - start - size}
        body = {
            "kind": kind,
            "apiVersion": version,
            "metadata": metadata,
            "items": items[start : start + size],
        }
        return self._send(200, json.dumps(body).encode())

    def _status(self, code, reason, message):
        body = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }
        self._send(code, json.dumps(body).encode())

    def _send(self, code, body):
        self.respond(code, body, Content_Type="application/json")


class FakeKubernetes(FakeServer):
    """Serves ``slices``, ``pods`` and ``pools``, at most ``page`` objects per response.

    The first ``expire`` continuation tokens are expired; the path ``forbidden`` is.
    """

    def __init__(self, tls: ssl.SSLContext | None = None):
        super().__init__(Handler, tls)
        self.slices: list[dict] = []
        self.pods: list[dict] = []
        self.pools: list[dict] = []
        self.forbidden = ""
        self.page = 500
        self.expire = 0
        self.mode = "answer"
        self.requests: list[tuple[str, dict[str, str], str | None]] = []  # (path, query, Authorization)

    def selected_pods(self, selector: str) -> list[dict]:
        """The pods with all labels of an equality-based selector."""
        wanted = dict(term.split("=", 1) for term in selector.split(","))
        return [pod for pod in self.pods if wanted.items() <= pod["metadata"]["labels"].items()]


def serving_kubernetes(tls: ssl.SSLContext | None = None) -> AbstractContextManager[FakeKubernetes]:
    return running(FakeKubernetes(tls))
