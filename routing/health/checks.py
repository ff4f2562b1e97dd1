"""Whether each replica answers: asked at intervals, and told by requests that could not connect.

Theory of operation. One task per replica asks its health path, on a connection of its own each time, because a kept
one says nothing about new ones. ``failures`` bad findings in a row make a replica down, ``successes`` good ones make
it up; a replica never asked counts as up. Requests that cannot connect make the task ask at once, ``AGAIN_S`` after it
last did at the soonest. If that check finds the same, they are one bad finding more, however many they were; else they
were a moment's affair, such as a queue of newcomers that overflowed, and cost a well replica nothing. A replica that is
down is no candidate, even if all are: then clients get a 503 that names the pool. It is asked on, at the same interval,
so no pool stays dark on old news.

A replica with too much to do may be late with its health check while its answers come. Such a silence is no finding:
under overload it would strike all replicas at once, and take the whole pool down for being busy.

Which LoRA adapters a replica has loaded, by its own ``/v1/models``.

Asked by the health check's task, on a connection of its own. vLLM loads and drops adapters at run time, so it is asked
again every few checks; an answer that cannot be read tells nothing, and what was known stays.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import count

import msgspec
from msgspec import Struct

from routing.balancing.health import HealthRegistry
from routing.http.tasks import Background, run_until_cancelled
from routing.http.tls import describe_os_error
from routing.log import event
from routing.schema import HealthCheck
from routing.types import ReplicaId
from routing.upstream.client import send_request
from routing.upstream.pool import Address

EVERY = 5  # health checks between two questions
MAX_BYTES = 1 << 20  # of an answer; a thousand adapters take a quarter of it

_length = re.compile(rb"\r\ncontent-length: *([0-9]{1,7})\r\n", re.IGNORECASE).search


class _Card(Struct):
    id: str


class _Models(Struct):
    data: list[_Card]


_models = msgspec.json.Decoder(_Models)


async def held_adapters(address: Address, names: frozenset[str], timeout_s: float) -> frozenset[str] | None:
    """Those of ``names`` that a replica lists; None where it gives no answer that says."""
    try:
        async with asyncio.timeout(timeout_s):
            body = await _list_adapters(address)
        return names & {card.id for card in _models.decode(body).data}
    except (TimeoutError, OSError, ValueError, EOFError, RecursionError, asyncio.LimitOverrunError):
        return None


async def _list_adapters(address: Address) -> bytes:
    """The body of the answer; ValueError if it is none of 200 with a length."""
    async with send_request(address, "/v1/models") as answer:
        head = await answer.readuntil(b"\r\n\r\n")
        _, status, *_ = head.split(maxsplit=2)  # too few are a ValueError
        length = _length(head)
        if length is None or status != b"200" or int(length[1]) > MAX_BYTES:
            raise ValueError("no list of models")
        return await answer.readexactly(int(length[1]))


AGAIN_S = 0.1  # between two questions at least, however many requests fail

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Finding:
    """What is known of one replica. ``is_up`` is None until it was asked."""

    is_up: bool | None = None
    reason: str | None = None  # of the latest bad finding, while it stands
    last_ok_at: datetime | None = None
    failures: int = 0  # in a row
    successes: int = 0
    was_refused: bool = False  # a request could not connect since the latest check began
    ask_now: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def health(self) -> str:
        """``up``, ``down`` or ``unknown``."""
        return "unknown" if self.is_up is None else "up" if self.is_up else "down"


@dataclass(frozen=True, slots=True)
class Checked:
    """Whom to ask, and how."""

    name: str
    address: Address
    check: HealthCheck
    adapters: frozenset[str] = frozenset()  # of which it should tell what it holds


class HealthChecks:
    """The findings of this router, and the tasks that make them. Verdicts go to the book that placement reads."""

    def __init__(
        self,
        book: HealthRegistry,
        on_health_check_passed: Callable[[ReplicaId], None],
        progress_at: Callable[[str], float],
    ) -> None:
        self._book = book
        self._came_up = on_health_check_passed  # hears of each replica that was down and is up again
        self._progress_at = progress_at  # when a replica's answers last brought a byte, in loop time
        self._findings: dict[str, Finding] = {}
        self._checked: dict[str, Checked] = {}  # by name, as the findings and the tasks
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def configure(self, all_checked: list[Checked]) -> None:
        """Ask these replicas from now on, and no others. A replica that moved is a new one."""
        wanted = {checked.name: checked for checked in all_checked}
        for name in self._checked.keys() - wanted.keys():
            self._tasks.pop(name).cancel()
            self._forget(name)
        for name, checked in wanted.items():
            before = self._checked.get(name)
            if before == checked:
                continue
            if before is not None:
                self._tasks[name].cancel()
                if before.address != checked.address:
                    self._forget(name)
            self._checked[name] = checked
            self._findings.setdefault(name, Finding())
            asking = run_until_cancelled(Background.HEALTH, partial(self._keep_asking, checked))
            self._tasks[name] = asyncio.get_running_loop().create_task(asking)

    def status(self, name: str) -> Finding:
        """What is known of a replica; nothing, for one that is not checked."""
        return self._findings.get(name) or Finding()

    def on_connect_failed(self, name: str) -> None:
        """A request could not connect: ask again at once, and count it if that shows the same."""
        finding = self._findings.get(name)
        if finding is not None:
            finding.was_refused = True
            finding.ask_now.set()

    def request_check(self, name: str) -> None:
        """A request got no answer, which may have many causes: ask again at once."""
        finding = self._findings.get(name)
        if finding is not None:
            finding.ask_now.set()

    def close(self) -> None:
        """Ask no more."""
        for task in self._tasks.values():
            task.cancel()

    def _forget(self, name: str) -> None:
        self._findings.pop(name, None)
        self._checked.pop(name, None)
        self._book.mark(ReplicaId(name), up=True)
        self._book.set_adapters(ReplicaId(name), None)

    async def _keep_asking(self, checked: Checked) -> None:
        finding, time = self._findings[checked.name], asyncio.get_running_loop().time
        for turn in count():
            finding.ask_now.clear()
            was_refused, finding.was_refused = finding.was_refused, False
            began_at = time()
            reason = await check_once(checked)
            if reason is None:
                if checked.adapters and (not turn % EVERY or not finding.is_up):
                    await self._learn_adapters(checked)
                self._found_good(checked)
            elif reason != _silence(checked.check) or self._progress_at(checked.name) < began_at:
                self._found_bad(checked, reason, findings=2 if was_refused else 1)
            interval_s = checked.check.interval_s * random.uniform(0.9, 1.1)  # noqa: S311 - no secret
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await finding.ask_now.wait()
            await asyncio.sleep(began_at + min(AGAIN_S, interval_s) - time())

    async def _learn_adapters(self, checked: Checked) -> None:
        held = await held_adapters(checked.address, checked.adapters, checked.check.timeout_s)
        if held is not None:
            self._book.set_adapters(ReplicaId(checked.name), held)

    def _found_good(self, checked: Checked) -> None:
        finding = self._findings[checked.name]
        finding.last_ok_at = datetime.now(UTC)
        finding.failures, finding.successes, finding.reason = 0, finding.successes + 1, None
        if finding.is_up is None or finding.successes >= checked.check.successes:
            finding.is_up = True
            if self._book.mark(ReplicaId(checked.name), up=True):
                event(logger, "replica_up", replica=checked.name)
                self._came_up(ReplicaId(checked.name))

    def _found_bad(self, checked: Checked, reason: str, *, findings: int) -> None:
        finding = self._findings[checked.name]
        finding.failures, finding.successes, finding.reason = finding.failures + findings, 0, reason
        if finding.failures >= checked.check.failures:
            finding.is_up = False
            if self._book.mark(ReplicaId(checked.name), up=False):
                event(logger, "replica_down", level=logging.WARNING, replica=checked.name, reason=reason)


async def check_once(checked: Checked) -> str | None:
    """Ask once; why it is not well, or None if it is."""
    try:
        async with asyncio.timeout(checked.check.timeout_s):
            status = await _ask(checked.address, checked.check.path)
    except TimeoutError:
        return _silence(checked.check)
    except OSError as error:
        return describe_os_error(error)
    except UnicodeError:  # of a host that no resolver takes
        return "its host name cannot be resolved"
    except (EOFError, asyncio.LimitOverrunError, ValueError):
        return "its answer is not HTTP"
    return None if 200 <= status < 300 else f"health check answered {status}"


def _silence(check: HealthCheck) -> str:
    return f"no answer within {check.timeout_s:g} s"


async def _ask(address: Address, path: str) -> int:
    """The status of the answer; ValueError if it is not HTTP."""
    async with send_request(address, path) as answer:
        version, status, *_ = (await answer.readuntil(b"\r\n")).split(maxsplit=2)  # too few are a ValueError
    if not version.startswith(b"HTTP/1."):
        raise ValueError("not HTTP")
    return int(status)
