"""What a workload is made of: requests in order of time, some of them turns of a session."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Script(Protocol):
    """A session's plan, or that of a single request. Compared and hashed by identity."""

    @property
    def group(self) -> str:
        """The task group's name: ``X-Task-Group``."""
        ...

    @property
    def session_id(self) -> str | None:
        """``X-Session-ID``; None for a request of no session."""
        ...

    def messages(self, turn: int, answers: Sequence[str]) -> list[dict[str, str]]:
        """The messages of turn ``turn`` (from 0), after ``answers`` to all turns before it."""
        ...

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """Tools offered to the model; empty for none."""
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """One request at its time."""

    at_s: float  # seconds since the workload's start
    script: Script
    turn: int  # from 0; a turn needs the answers to all before it
    output_tokens: int
    is_last: bool = True  # of its session

    def body(self, model: str | None, answers: Sequence[str]) -> dict[str, Any]:
        """The chat request: streamed, with usage, and as long as the workload says."""
        body: dict[str, Any] = {
            "messages": self.script.messages(self.turn, answers),
            "max_tokens": self.output_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if model is not None:
            body["model"] = model
        if self.script.tools:
            # the list is part of the prompt; "none" keeps replicas without a tool parser from refusing it
            body |= {"tools": list(self.script.tools), "tool_choice": "none"}
        return body


class Workload(Protocol):
    """A source of jobs, ascending in time."""

    def jobs(self) -> Iterator[Job]:
        """From the start; a generated workload may have no end."""
        ...
