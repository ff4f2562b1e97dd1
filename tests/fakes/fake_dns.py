"""A DNS server on loopback over UDP and TCP, with records by name and type and with faults."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import dns.flags
import dns.message
import dns.rcode
import dns.rrset


class FakeDns:
    """``records["vllm.test."]["A"] = [...]``; ``mode``: answer, silent, garbage, truncate or a response code."""

    def __init__(self) -> None:
        self.records: dict[str, dict[str, list[str]]] = {}
        self.mode = "answer"
        self.queries: list[tuple[str, str, str]] = []  # (transport, name, type)
        self._udp, self._tcp = _bind_same_port()
        self.port = self._udp.getsockname()[1]
        self._closing = threading.Event()
        for sock in (self._udp, self._tcp):
            sock.settimeout(0.05)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def serve(self) -> None:
        while not self._closing.is_set():
            try:
                wire, client = self._udp.recvfrom(4096)
                for response in self.responses(wire, "udp"):
                    self._udp.sendto(response, client)
            except TimeoutError:
                self._serve_tcp()

    def _serve_tcp(self) -> None:
        try:
            connection, _ = self._tcp.accept()
        except TimeoutError:
            return
        with connection:
            connection.settimeout(2)
            (length,) = struct.unpack("!H", connection.recv(2))
            for response in self.responses(connection.recv(length), "tcp"):
                connection.sendall(struct.pack("!H", len(response)) + response)

    def responses(self, wire: bytes, transport: str) -> Iterator[bytes]:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        kind = dns.rdatatype.to_text(question.rdtype)
        self.queries.append((transport, question.name.to_text(), kind))
        if self.mode == "silent":
            return
        if self.mode == "garbage":
            yield wire[:2] + b"\x80\xff" * 20
            return
        response = dns.message.make_response(query)
        if self.mode not in {"answer", "truncate"}:
            response.set_rcode(dns.rcode.from_text(self.mode))
        elif self.mode == "truncate" and transport == "udp":
            response.flags |= dns.flags.TC
        else:
            self._add_records(response, question.name, kind)
        yield response.to_wire(max_size=65_535)

    def _add_records(self, response, name, kind) -> None:
        records = self.records.get(name.to_text())
        if records is None:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif records.get(kind):
            response.answer.append(dns.rrset.from_text_list(name, 5, "IN", kind, records[kind]))

    def close(self) -> None:
        self._closing.set()
        self._udp.close()
        self._tcp.close()


@contextmanager
def serving_dns() -> Iterator[FakeDns]:
    server = FakeDns()
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server._closing.set()
        thread.join(timeout=5)
        server.close()


def _bind_same_port() -> tuple[socket.socket, socket.socket]:
    """Bind one port for both transports, retrying if the TCP port is taken."""
    for _ in range(50):
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        try:
            return udp, socket.create_server(udp.getsockname())
        except OSError:
            udp.close()
    raise AssertionError("no port is free for both UDP and TCP")
