"""ZMTP as bytes: whole, in pieces, damaged and too long. Peers of ZeroMQ's library are in ``test_subscriptions.py``."""

from __future__ import annotations

import random
import socket
import time
from contextlib import suppress

import pytest

from routing.kv_events import event_stream
from routing.kv_events.event_stream import MESSAGE_S, PING_S, PONG_S, Connection
from routing.kv_events.zmtp import (
    GREETING_BYTES,
    MAX_FRAMES,
    MAX_SKIPPED_BYTES,
    PING,
    ProtocolError,
    Receiver,
    frame,
    greeting_and_ready,
    message,
)

LIMIT = 1000
MESSAGES = [[b"topic", b"12345678", b"x" * size] for size in (0, 1, 255, 256, 999)]


def taken(receiver: Receiver) -> list[list[bytes]]:
    """All messages that are whole."""
    messages = []
    while (frames := receiver.next_message()) is not None:
        messages.append(frames)
    return messages


def sent() -> bytes:
    return greeting_and_ready(b"PUB") + b"".join(map(message, MESSAGES))


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_messages_are_read_however_their_bytes_arrive(size):
    receiver, messages = Receiver(LIMIT), []
    data = sent()
    for at in range(0, len(data), size):
        receiver.feed(data[at : at + size])
        messages += taken(receiver)

    assert messages == MESSAGES
    assert receiver.is_ready


@pytest.mark.parametrize("size", [1, 100, 100_000])
def test_a_frame_over_the_limit_is_skipped_and_counts_as_empty(size):
    receiver, messages = Receiver(LIMIT), []
    data = greeting_and_ready(b"PUB") + message([b"a", b"x" * (LIMIT + 1)]) + message([b"b", b"y"])
    for at in range(0, len(data), size):
        receiver.feed(data[at : at + size])
        messages += taken(receiver)

    assert messages == [[b"a", b""], [b"b", b"y"]]


def test_a_ping_gets_a_pong_with_its_context():
    receiver = Receiver(LIMIT)
    receiver.feed(greeting_and_ready(b"PUB") + frame(b"\x04PING\0\x0acontext", 4))

    assert receiver.next_message() is None
    assert receiver.replies == [frame(b"\x04PONGcontext", 4)]


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff\0\0\0\0\0\0\0\1\x7f\1" + bytes(60),
        greeting_and_ready(b"PUB")[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
        greeting_and_ready(b"PUB")[:GREETING_BYTES] + message([b"before READY"]),
        greeting_and_ready(b"PUB") + b"\xff\xff",
        greeting_and_ready(b"PUB") + frame(b"\x05ERROR\x00", 4),
        greeting_and_ready(b"PUB") + frame(b"\x05OTHER" + b"x" * 5000, 4),
        greeting_and_ready(b"PUB") + message([b""] * (MAX_FRAMES + 1)),
    ],
)
def test_other_protocols_and_unusual_frames_end_the_connection(data):
    receiver = Receiver(LIMIT)
    receiver.feed(data)
    with pytest.raises(ProtocolError):
        taken(receiver)


def test_damaged_bytes_raise_nothing_else():
    rng = random.Random(1)
    for _ in range(2000):
        data, receiver = bytearray(sent()), Receiver(LIMIT)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with suppress(ProtocolError):
            for at in range(0, len(data), 500):
                receiver.feed(bytes(data[at : at + 500]))
                taken(receiver)


def receive(connection: Connection) -> None:
    """Wait until something has been received."""
    deadline = time.monotonic() + 30.0
    while not connection.receive(0.0):
        assert time.monotonic() < deadline


def send_without_reading(peer: socket.socket, data: bytes, connection: Connection) -> None:
    for _ in range(1000):
        peer.sendall(data)
        receive(connection)
        assert connection.next_message() is None
        connection.read_bytes = 0


def test_a_peer_that_sends_pings_and_does_not_read_is_lost():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection = Connection(server.getsockname(), b"SUB", b"", 0.0)
        peer, _ = server.accept()
        with peer:
            peer.sendall(greeting_and_ready(b"PUB"))
            pings = frame(b"\x04PING\0\0" + b"x" * 100, 4) * 500
            with pytest.raises(ProtocolError):
                send_without_reading(peer, pings, connection)
            connection.close()


def test_a_silent_peer_is_asked_and_then_lost():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = Connection(server.getsockname(), b"SUB", b"", 0.0)
        peer, _ = server.accept()
        with peer:
            peer.sendall(greeting_and_ready(b"PUB"))
            peer.settimeout(5.0)
            receive(connection)
            assert connection.next_message() is None
            connection.check(PING_S / 2)
            connection.check(PING_S)
            received = b""
            while not received.endswith(PING):
                received += peer.recv(1000)
            connection.check(PING_S + PONG_S)
            with pytest.raises(TimeoutError):
                connection.check(PING_S + PONG_S + 0.01)
            connection.close()


def test_a_peer_that_never_gets_ready_is_lost():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = Connection(server.getsockname(), b"SUB", b"", 0.0)
        connection.check(event_stream.CONNECT_S)
        with pytest.raises(TimeoutError):
            connection.check(event_stream.CONNECT_S + 0.01)
        connection.close()


@pytest.mark.parametrize("size", [1 << 62, MAX_SKIPPED_BYTES + 1])
def test_a_length_that_no_engine_sends_ends_the_connection(size):
    """One wrong bit in a length; what follows would be skipped for ever."""
    receiver = Receiver(LIMIT)
    receiver.feed(greeting_and_ready(b"PUB") + b"\x02" + size.to_bytes(8, "big") + b"x" * 100)
    with pytest.raises(ProtocolError, match=f"{size:,} bytes"):
        receiver.next_message()


def test_a_message_that_does_not_end_ends_the_connection_although_bytes_arrive():
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = Connection(server.getsockname(), b"SUB", b"", 0.0)
        peer, _ = server.accept()
        peer.sendall(greeting_and_ready(b"PUB") + b"\x02" + (1 << 20).to_bytes(8, "big"))
        now_s, reason = 0.0, ""
        while not reason and now_s < 10 * MESSAGE_S:
            peer.sendall(b"x")
            connection.receive(now_s)
            assert connection.next_message() is None
            try:
                connection.check(now_s)
            except ProtocolError as error:
                reason = str(error)
            now_s += 0.1
        assert "did not end" in reason
        assert now_s >= MESSAGE_S
        connection.close()
        peer.close()
