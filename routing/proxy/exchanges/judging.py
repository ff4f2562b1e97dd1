"""What a failure of a replica means: whether another one may do better, and what the client is told if none does."""

from __future__ import annotations

import re
from typing import Final

from routing.proxy.http.answer import AnswerHead
from routing.proxy.http.errors import RefusalError
from routing.proxy.metrics.metrics import Outcome
from routing.proxy.replicas.upstream import Failure

RETRIED_STATUSES: Final = frozenset({502, 503, 504})
SHUTTING_DOWN: Final = b"cannot schedule new futures after shutdown"  # vLLM's 500 while it drains
QUEUE_FULL: Final = b"currently busy and cannot accept new requests"  # vLLM's 503 at its own limit of waiting requests
BUSY: Final = "busy"
INVALID_STATUSES: Final = frozenset({400, 422})  # of engines that do not take a request's fields

_retry_after: Final = re.compile(rb"^retry-after:", re.IGNORECASE | re.MULTILINE).search


def cause_of(answer: AnswerHead, body: bytes) -> str | None:
    """Why another replica may do better than this answer of 429 or more; None if it would not."""
    status = answer.status
    if status == 429:
        return "status_429" if _retry_after(answer.lines) else None
    if status == 500 and SHUTTING_DOWN in body:
        return "draining"
    if status == 503 and QUEUE_FULL in body:
        return BUSY
    return f"status_{status}" if status in RETRIED_STATUSES else None


def names_usage_request(body: bytes) -> bool:
    """Whether an error may be about the ask for usage that the router put into the request."""
    return b"stream_options" in body or b"include_usage" in body


def is_its_fault(status: int, cause: str | None) -> bool:
    """Whether an error of 429 or more counts against the replica; ``cause`` as above."""
    return status >= 500 and status != 501 and cause != BUSY


def unreachable(replica: str, reason: str) -> RefusalError:
    """What the client is told when no replica can be connected to; of several, the last one."""
    return RefusalError(502, f"replica {replica!r} cannot be reached: {reason}")


def outcome_of(status: int, *, placed: bool) -> Outcome:
    """How a request counts that the router answered by itself."""
    if status < 500:
        return Outcome.CLIENT_ERROR
    return Outcome.REPLICA_ERROR if placed else Outcome.ROUTER_ERROR


def no_answer(replica: str, failure: Failure) -> RefusalError:
    """What the client is told when a replica's answer will never come, or not its rest."""
    if failure is Failure.TIMEOUT:
        return RefusalError(504, f"replica {replica!r} did not answer in time")
    if failure is Failure.BAD_ANSWER:
        return RefusalError(502, f"replica {replica!r} answered with something that is not HTTP")
    return RefusalError(502, f"replica {replica!r} closed the connection before its answer was complete")
