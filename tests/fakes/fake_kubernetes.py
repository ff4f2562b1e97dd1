"""A Kubernetes API server over HTTP(S) that lists EndpointSlices: pagination, expiry, refusals, delays."""

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
        if path != "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices":
            return self._status(403, "Forbidden", f"endpointslices is forbidden: {path}")
        if server.mode == "500":
            return self._status(500, "InternalError", "etcdserver: request timed out\r\nSet-Cookie: x")
        if "continue" in query and server.expire:
            server.expire -= 1
            return self._status(410, "Expired", "The provided continue parameter is too old")
        return self._page(query)

    def _page(self, query):
        is_selected = query.get("labelSelector") == "kubernetes.io/service-name=vllm"
        slices = self.server.slices if is_selected else []
        size, start = min(int(query.get("limit", "500")), self.server.page), int(query.get("continue", "0"))
        metadata: dict[str, Any] = {"resourceVersion": "812500"}
        if start + size < len(slices):
            metadata |= {"continue": str(start + size), "remainingItemCount": len(slices) - start - size}
        body = {
            "kind": "EndpointSliceList",
            "apiVersion": "discovery.k8s.io/v1",
            "metadata": metadata,
            "items": slices[start : start + size],
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
    """Serves ``slices``, at most ``page`` per response; the first ``expire`` continuation tokens are expired."""

    def __init__(self, tls: ssl.SSLContext | None = None):
        super().__init__(Handler, tls)
        self.slices: list[dict] = []
        self.page = 500
        self.expire = 0
        self.mode = "answer"
        self.requests: list[tuple[str, dict[str, str], str | None]] = []  # (path, query, Authorization)


def serving_kubernetes(tls: ssl.SSLContext | None = None) -> AbstractContextManager[FakeKubernetes]:
    return running(FakeKubernetes(tls))
