"""The process that reads large bodies: ``python -m routing.proxy.large_body_process``, started by its router.

It reads a request from its input, answers it on its output, and ends where its input does. A request is the number of
the path and the body, an answer the canonical prompt and a pickled rest, each behind a head with their lengths. Only
its router writes to it and reads from it.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
from typing import BinaryIO, Final

from routing.balancing.request import BodyReading, read_body, reduce_body
from routing.prompt.bodies import BODIES
from routing.prompt.canonical import CanonicalPrompt
from routing.prompt.rewrite import Layout, layout_of
from routing.types import BodyError

REQUEST: Final = struct.Struct("!BQ")  # path, bytes of the body
ANSWER: Final = struct.Struct("!QQ")  # bytes of the rest, bytes of the canonical prompt
PATHS: Final = tuple(BODIES)
NICENESS: Final = 5  # the event loop goes first where cores are few


def packed(path: str, body: bytes) -> tuple[bytes, bytes]:
    """A request, in two pieces."""
    return REQUEST.pack(PATHS.index(path), len(body)), body


def answered(path: str, body: bytes) -> tuple[bytes, bytes]:
    """What was read, in two pieces: a rest, and the canonical prompt."""
    try:
        reading = read_body(path, body)
        layout = layout_of(body)
    except BodyError as error:
        return pickle.dumps((error.param, error.reason)), b""
    prompt = reading.prompt
    facts = prompt.tools_end, prompt.system_end, prompt.message_ends, prompt.ids, prompt.salt, prompt.rendering
    asks = reading.session_key, reading.is_plain, reading.omits_usage
    return pickle.dumps((facts, prompt.is_text, reduce_body(reading.body), asks, layout.spans, layout.end)), prompt.data


def unpacked(rest: bytes, data: bytes) -> BodyReading:
    """The reading of an answer; the BodyError that it was."""
    found = pickle.loads(rest)  # noqa: S301 - of a process of our own
    if len(found) == 2:
        raise BodyError(*found)
    facts, is_text, body, (session, is_plain, omits_usage), *layout = found
    prompt = CanonicalPrompt(data, *facts, is_text=is_text)
    reading = BodyReading(body, prompt, session, is_plain=is_plain, omits_usage=omits_usage)
    reading.layout = Layout(*layout)
    return reading


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer one request after the other, until there are no more."""
    while head := requests.read(REQUEST.size):
        path, size = REQUEST.unpack(head)
        rest, data = answered(PATHS[path], requests.read(size))
        answers.write(ANSWER.pack(len(rest), len(data)))
        answers.write(rest)
        answers.write(data)
        answers.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the router's
    os.nice(NICENESS)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
