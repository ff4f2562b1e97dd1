"""The gRPC service of an endpoint picker: external processing for Envoy, and health checks.

A picker is a router whose data port speaks Envoy's protocol: configuration, admin port, announcements, health checks of
replicas, KV events and saved residency are the router's. It is one process; run several for more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
from grpc import aio

from routing import __version__
from routing.http.tls import TlsError, TlsFiles
from routing.log import event
from routing.picker.endpoints import Endpoints
from routing.picker.ext_proc import Incoming, ProcessingStream, StreamEndedError
from routing.picker.messages import HealthCheckRequest, HealthCheckResponse, ProcessingRequest, ProcessingResponse
from routing.proxy.services import ActiveConfiguration
from routing.server import new_router, run
from routing.settings import ServeSettings, read_picker_settings
from routing.singleprocess import SingleProcess

EXTERNAL_PROCESSOR: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH: Final = "grpc.health.v1.Health"
LIVENESS: Final = "liveness"
READINESS: Final = frozenset({"", "readiness", EXTERNAL_PROCESSOR})
SERVING, NOT_SERVING = 1, 2
LINGER_S: Final = 2.0  # between NOT_SERVING and the end of new streams, for clients that check the health
MAX_MESSAGE_BYTES: Final = 64 << 20  # of a whole body in BUFFERED mode
OPTIONS: Final = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]

logger = logging.getLogger(__name__)


class Picker(SingleProcess):
    """A router without HTTP clients: its port accepts streams of Envoy."""

    def __init__(self, settings: ServeSettings) -> None:
        super().__init__(new_router(settings), __version__, settings.state_dir)
        self._fallbacks = settings.fallbacks
        self._certificate = Certificate(settings.tls) if settings.tls.certificate else None
        self._server: Any = None
        self._cached_endpoints: Endpoints | None = None

    async def open(self, host: str, port: int, *, reuse_port: bool) -> None:  # noqa: ARG002 - always False
        """Accept streams; OSError if the port is taken."""
        self._server = aio.server(options=OPTIONS)
        self._server.add_generic_rpc_handlers(_handlers(self._process, self._check))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._certificate is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, self._certificate.credentials())
        except RuntimeError:
            self.port = 0
        if not self.port:
            raise OSError(f"cannot bind to {address}")
        await self._server.start()

    def reload(self) -> None:
        """Read the certificate again, if there is one."""
        if self._certificate is not None:
            self._certificate.reload()

    async def drain(self) -> None:
        """Report NOT_SERVING, then accept no new streams, and wait for the requests in flight."""
        router = self.router
        router.begin_draining()
        event(logger, "draining", in_flight=router.services.in_flight, limit_s=router.limits.drain_timeout_s)
        await asyncio.sleep(LINGER_S)
        await self._server.stop(router.limits.drain_timeout_s)
        await self._saved_residency.save()

    async def close(self) -> None:
        """Abort the streams that remain."""
        if self._server is not None:
            await self._server.stop(None)
        await super().close()

    def _endpoints(self, active: ActiveConfiguration) -> Endpoints:
        cached = self._cached_endpoints
        if cached is None or cached.active is not active:
            cached = self._cached_endpoints = Endpoints(active)
        return cached

    async def _process(self, _requests: Any, context: Any) -> None:
        """Serve one stream."""

        async def read() -> Any:
            message = await context.read()
            return None if message is aio.EOF else message

        incoming, stream = Incoming(read), ProcessingStream(self.router, self._endpoints, self._fallbacks)
        try:
            while not stream.is_over:
                for reply in await stream.replies(await incoming.next(), incoming):
                    await context.write(reply)
                stream.on_sent()
        except StreamEndedError:
            pass
        finally:
            incoming.close()
            stream.close()

    async def _check(self, request: Any, context: Any) -> Any:
        """One health check; the gRPC status is NOT_FOUND for an unknown service."""
        if request.service == LIVENESS:
            return HealthCheckResponse(status=SERVING)
        if request.service not in READINESS:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return HealthCheckResponse(status=SERVING if self.router.not_ready_reason is None else NOT_SERVING)


def _handlers(process: Callable[..., Any], check: Callable[..., Any]) -> tuple[Any, ...]:
    streams = grpc.stream_stream_rpc_method_handler(
        process,
        request_deserializer=ProcessingRequest.FromString,
        response_serializer=ProcessingResponse.SerializeToString,
    )
    checks = grpc.unary_unary_rpc_method_handler(
        check,
        request_deserializer=HealthCheckRequest.FromString,
        response_serializer=HealthCheckResponse.SerializeToString,
    )
    return (
        grpc.method_handlers_generic_handler(EXTERNAL_PROCESSOR, {"Process": streams}),
        grpc.method_handlers_generic_handler(HEALTH, {"Check": checks}),
    )


class Certificate:
    """The certificate of the port. TlsError if its files cannot be read."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._newest = self._read()

    def credentials(self) -> Any:
        """Credentials whose new connections use the certificate that was read last."""
        return grpc.dynamic_ssl_server_credentials(self._newest, lambda: self._newest)

    def reload(self) -> None:
        """Read the files again; if that fails, the previous certificate stays."""
        try:
            self._newest = self._read()
        except TlsError as error:
            event(logger, "certificate_rejected", level=logging.ERROR, reason=str(error))
        else:
            event(logger, "certificate_loaded")

    def _read(self) -> Any:
        files = self._files
        try:
            pair = Path(files.key or "").read_bytes(), Path(files.certificate or "").read_bytes()
        except OSError as error:
            raise TlsError(f"{files.certificate} with the key {files.key} cannot be read: {error.strerror}") from None
        return grpc.ssl_server_certificate_configuration([pair])


def main(argv: Sequence[str]) -> int:
    """Run an endpoint picker; exit status as of ``serve``."""
    return run(argv, read_picker_settings, Picker)
