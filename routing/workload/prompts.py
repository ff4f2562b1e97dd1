"""A trace's requests as chat text that shares exactly what its block ids say.

A block is 512 tokens of the rendered ChatML prompt, as the stand-in replica counts them. The template's own tokens are
taken off the block they fall into, so block ends stay where the trace has them and a prompt has the trace's length.
An id's text is a function of the id alone and ids differ from the first bytes on, so prompts share whole leading blocks
and nothing else. The first block goes into a system message, where production traffic has it, and the rest into a user
message. Only where a prompt ends on a block's end or a few tokens after it is it up to 7 tokens longer than the trace
says (12 after the first block): the template's end must not eat into a block that others share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from routing.workload.job import Job
from routing.workload.trace import BLOCK_TOKENS, TraceRequest
from routing.workload.words import TOKEN_BYTES, passage

BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
SYSTEM_HEAD = 4  # tokens of "<|im_start|>system\n"
TURN_CHANGE = 5  # of "<|im_end|>\n<|im_start|>user\n"
USER_HEAD = 3  # of "<|im_start|>user\n"
TAIL = 7  # of "<|im_end|>\n<|im_start|>assistant\n"


def block_text(block_id: int, tokens: int) -> str:
    """The text of a block, or the first ``tokens`` of it."""
    return passage(f"block {block_id}", tokens * TOKEN_BYTES)


def trace_messages(request: TraceRequest) -> list[dict[str, str]]:
    """The messages of one request of a trace."""
    sizes = [BLOCK_TOKENS] * len(request.hash_ids)
    last = request.prompt_tokens - BLOCK_TOKENS * (len(sizes) - 1)
    if len(sizes) == 1 and last == BLOCK_TOKENS:
        return [{"role": "system", "content": block_text(request.hash_ids[0], BLOCK_TOKENS - SYSTEM_HEAD)}]
    if len(sizes) == 1:
        size = max(1, last - USER_HEAD - TAIL)
        return [{"role": "user", "content": block_text(request.hash_ids[0], size)}]
    sizes[-1] = max(0, last - TAIL) if last < BLOCK_TOKENS else last
    if len(sizes) == 2:
        sizes[1] = max(1, sizes[1] - TURN_CHANGE)
    else:
        sizes[1] -= TURN_CHANGE
    sizes[0] -= SYSTEM_HEAD
    system, *rest = (block_text(block, size) for block, size in zip(request.hash_ids, sizes, strict=True))
    return [{"role": "system", "content": system}, {"role": "user", "content": "".join(rest)}]


@dataclass(frozen=True, slots=True, eq=False)
class TraceScript:
    """One request of a trace: the trace knows no sessions."""

    request: TraceRequest
    group: str = "chat"
    session_id: str | None = None
    tools: Sequence[dict[str, Any]] = ()

    def messages(self, turn: int, answers: Sequence[str]) -> list[dict[str, str]]:  # noqa: ARG002 -- one turn only
        """See ``trace_messages``."""
        return trace_messages(self.request)


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """A whole trace, once or again and again."""

    requests: Sequence[TraceRequest]
    loop: bool = False

    def jobs(self) -> Iterator[Job]:
        """In the trace's order; a further round begins one mean gap after the last arrival."""
        if not self.requests:
            return
        round_s = self.requests[-1].at_s * (1 + 1 / len(self.requests)) or 1.0
        start_s = 0.0
        while True:
            for request in self.requests:
                yield Job(start_s + request.at_s, TraceScript(request), 0, request.output_tokens)
            if not self.loop:
                return
            start_s += round_s
