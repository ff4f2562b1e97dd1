"""A replica process to be killed; uses only the standard library, so that it restarts quickly.

Answers the first ``answers`` requests and holds every other one without a byte of a response; writes a byte to
standard output for each request that it holds.
"""

from __future__ import annotations

import asyncio
import os
import sys

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Victim:
    def __init__(self, answers: int) -> None:
        self._answers = answers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                writer.close()
                return
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
            )
            await reader.readexactly(length)
            if not head.startswith(b"GET /health "):
                self._answers -= 1
                if self._answers < 0:
                    os.write(1, b"h")
                    continue
            writer.write(ANSWER)


async def main(port: int, answers: int) -> None:
    server = await asyncio.start_server(Victim(answers).serve, "127.0.0.1", port)
    os.write(1, b"r")
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
