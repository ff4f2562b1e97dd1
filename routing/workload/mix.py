"""The seeded mix: four task groups with different prompts, sessions and sharing, endless and reproducible.

* ``chat`` follows the production chat trace of the Mooncake release (first 30 minutes: Poisson arrivals; prompts
  log-normal with median 7,640 and mean 12,870 tokens; answers of mean 346; 65 % of the requests open a conversation
  and each turn is followed by another with probability 0.35, median 120 s later), with lengths and pauses divided by
  ``CHAT_SCALE``. Every prompt begins with one shared system prompt, of 32 tokens; the trace's has 512.
* ``coding-assistant`` has a long tool list for each of some teams, and sessions of many quick turns that grow.
* ``retrieval`` answers short questions over shared documents, some far more popular than others.
* ``batch-summaries`` puts ever new texts behind a few long instructions with worked examples.

The sizes are chosen for four stand-in replicas of the default capacity (131,072 tokens each): all tier-1 prompts
together are about twice what one replica holds, and half of what the four hold. README.md has the figures.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from routing.workload.job import Job
from routing.workload.words import text_of_tokens

DEFAULT_RATE = 5.0  # requests/s of all groups
# Sessions begun so long before the start are already going on: the rate is right from the first second.
LEAD_IN_S = 300.0
CHAT_SCALE = 4
CHAT_SYSTEM_TOKENS = 32  # so few that hardly anything is shared
TEAMS = 12  # coding assistants, each with its own tools
TOOLS_PER_TEAM = 24
DOCUMENTS = 40
DOCUMENT_TOKENS = 4000
TEMPLATES = 12
TEMPLATE_TOKENS = 3000


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message and what it asks for."""

    after_s: float  # since the turn before, or since the session's start
    text_key: str
    prompt_tokens: int  # of the user's message
    output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """A conversation's whole plan."""

    group: str
    session_id: str | None
    system: str
    turns: Sequence[Turn]
    tools: Sequence[dict[str, Any]] = ()

    def messages(self, turn: int, answers: Sequence[str]) -> list[dict[str, str]]:
        """System prompt, then user and assistant in turn up to the user's message number ``turn``."""
        messages = [{"role": "system", "content": self.system}]
        for index in range(turn):
            messages.append(self._user(index))
            messages.append({"role": "assistant", "content": answers[index]})
        return [*messages, self._user(turn)]

    def _user(self, index: int) -> dict[str, str]:
        turn = self.turns[index]
        return {"role": "user", "content": text_of_tokens(turn.text_key, turn.prompt_tokens)}


Maker = Callable[[random.Random, str], Session]


@dataclass(frozen=True, slots=True)
class Group:
    """A task group: its part of the requests and how it makes a session."""

    name: str
    share: float  # of the mix's requests; all together 1
    turns: float  # mean turns of a session
    make: Maker


@dataclass(frozen=True, slots=True)
class Mix:
    """All groups together. The same seed and rate give the same jobs."""

    seed: int
    rate: float = DEFAULT_RATE  # requests/s

    def jobs(self) -> Iterator[Job]:
        """Without end, ascending in time."""
        return heapq.merge(*(self._jobs_of(group) for group in GROUPS), key=lambda job: job.at_s)

    def _jobs_of(self, group: Group) -> Iterator[Job]:
        """A group's sessions start at random; their turns are merged by time."""
        rng = random.Random(f"{self.seed} {group.name}")  # noqa: S311 -- traffic, not secrets
        starts_per_s = self.rate * group.share / group.turns
        pending: list[tuple[float, int, int, Session]] = []  # (time, session number, turn, session)
        start_s, number = -LEAD_IN_S, 0
        while True:
            start_s += rng.expovariate(starts_per_s)
            while pending and pending[0][0] <= start_s:
                yield self._next(pending)
            session = group.make(rng, f"{self.seed}-{number}")
            opening = _from_the_start(session, start_s)
            if opening is not None:
                heapq.heappush(pending, (opening[0], number, 0, opening[1]))
            number += 1

    @staticmethod
    def _next(pending: list[tuple[float, int, int, Session]]) -> Job:
        at_s, number, turn, session = heapq.heappop(pending)
        following = turn + 1
        is_last = following == len(session.turns)
        if not is_last:
            heapq.heappush(pending, (at_s + session.turns[following].after_s, number, following, session))
        return Job(at_s, session, turn, session.turns[turn].output_tokens, is_last)


def _from_the_start(session: Session, start_s: float) -> tuple[float, Session] | None:
    """A session without the turns before time 0, and when its first one is; None if all of it lies before."""
    at_s = start_s
    for index, turn in enumerate(session.turns):
        at_s += turn.after_s
        if at_s >= 0:
            return at_s, replace(session, turns=session.turns[index:])
    return None


# --- chat --------------------------------------------------------------------------------------------

CHAT_GOES_ON = 0.35
CHAT_TURNS = 1 / (1 - CHAT_GOES_ON)


def _chat(rng: random.Random, number: str) -> Session:
    """A conversation of the trace's kind: mostly one long prompt, sometimes more turns."""
    turns = [_chat_turn(rng, number, 0)]
    while rng.random() < CHAT_GOES_ON:
        turns.append(_chat_turn(rng, number, len(turns)))
    return Session("chat", f"chat-{number}", text_of_tokens("chat system", CHAT_SYSTEM_TOKENS), turns)


def _chat_turn(rng: random.Random, number: str, index: int) -> Turn:
    prompt = min(123_192.0, rng.lognormvariate(math.log(7640), 1.02)) if index == 0 else rng.uniform(20, 1200)
    output = min(1500.0, rng.lognormvariate(math.log(280), 0.65))
    pause_s = rng.lognormvariate(math.log(120), 0.9) / CHAT_SCALE if index else 0.0
    key = f"chat {number} {index}"
    return Turn(pause_s, key, max(8, int(prompt / CHAT_SCALE)), max(4, int(output / CHAT_SCALE)))


# --- coding assistant --------------------------------------------------------------------------------


@cache
def _tools(team: int) -> tuple[dict[str, Any], ...]:
    """A team's tools: about 245 tokens each."""
    return tuple(
        {
            "type": "function",
            "function": {
                "name": f"team{team}_tool{number}",
                "description": text_of_tokens(f"tool {team} {number}", 160),
                "parameters": {
                    "type": "object",
                    "properties": {
                        name: {"type": "string", "description": text_of_tokens(f"{team} {number} {name}", 12)}
                        for name in ("path", "query")
                    },
                    "required": ["path"],
                },
            },
        }
        for number in range(TOOLS_PER_TEAM)
    )


def _coding(rng: random.Random, number: str) -> Session:
    """Quick turns: an instruction, then tool results, each a few hundred tokens."""
    team = _popular(rng, TEAMS, 0.5)
    turns = [
        Turn(rng.uniform(4, 16) if index else 0.0, f"code {number} {index}", rng.randint(150, 700), rng.randint(30, 90))
        for index in range(rng.randint(6, 14))
    ]
    return Session("coding-assistant", f"code-{number}", text_of_tokens(f"team {team}", 400), turns, _tools(team))


# --- retrieval ---------------------------------------------------------------------------------------


def _retrieval(rng: random.Random, number: str) -> Session:
    """A question or three about one document, which is part of the system prompt."""
    document = _popular(rng, DOCUMENTS, 0.6)
    system = text_of_tokens(f"document {document}", DOCUMENT_TOKENS)
    turns = [
        Turn(rng.uniform(8, 30) if index else 0.0, f"ask {number} {index}", rng.randint(20, 120), rng.randint(40, 120))
        for index in range(rng.choice((1, 1, 2, 3)))
    ]
    return Session("retrieval", f"ask-{number}", system, turns)


# --- batch summaries ---------------------------------------------------------------------------------


def _summary(rng: random.Random, number: str) -> Session:
    """One new text behind instructions that one in twelve shares."""
    template = rng.randrange(TEMPLATES)
    system = text_of_tokens(f"template {template}", TEMPLATE_TOKENS)
    turn = Turn(0.0, f"text {number}", rng.randint(400, 1600), rng.randint(60, 140))
    return Session("batch-summaries", None, system, [turn])


def _popular(rng: random.Random, count: int, skew: float) -> int:
    """A number below ``count``, number i with a weight of (i + 1) ** -skew."""
    weights = [(index + 1) ** -skew for index in range(count)]
    return rng.choices(range(count), weights)[0]


GROUPS = (
    Group("chat", 0.15, CHAT_TURNS, _chat),
    Group("coding-assistant", 0.40, 10.0, _coding),
    Group("retrieval", 0.25, 1.75, _retrieval),
    Group("batch-summaries", 0.20, 1.0, _summary),
)
