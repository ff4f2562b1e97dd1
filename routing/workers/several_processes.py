"""A router in several processes: the parent's part, from open to closed."""

from __future__ import annotations

from routing.proxy.configuration.last_known_good import LastKnownGood
from routing.proxy.configuration.signatures import Signatures
from routing.proxy.sockets.listening import bind
from routing.proxy.sockets.tls import Tls, TlsFiles
from routing.workers.supervisor import Supervisor
from routing.workers.view import WorkersView


class SeveralProcesses:
    """The supervisor and what the admin port shows of it."""

    def __init__(
        self,
        name: str,
        files: LastKnownGood,
        version: str,
        workers: int,
        tls: TlsFiles,
        *,
        signatures: Signatures | None = None,
    ) -> None:
        Tls(tls)  # files that cannot be used are better found out here than by every worker
        self._supervisor = Supervisor(name, files, workers, tls, signatures=signatures)
        self.view = WorkersView(self._supervisor, version)
        self.port = 0  # the real one, once open
        self._is_beside_others = False
        self._document: bytes | None = None

    async def start(self, document: bytes | None) -> None:
        """Keep the configuration for the workers."""
        self._document = document

    async def open(self, host: str, port: int, *, beside_others: bool) -> None:
        """Start workers that accept requests; OSError where the port is taken or a worker does not start."""
        slots = await bind(host, port, count=self._supervisor.workers, beside_others=beside_others)
        self.port = slots[0][0].getsockname()[1]
        self._is_beside_others = beside_others
        await self._supervisor.open(slots, self._document)

    def reload(self) -> None:
        """Begin to replace every worker, one after the other."""
        self._supervisor.roll()

    async def drain(self) -> None:
        """Accept nothing more, and let what runs finish."""
        await self._supervisor.drain(to_others=self._is_beside_others)

    async def close(self) -> None:
        """End everything that is left."""
        await self._supervisor.close()
