"""Generated traffic: filler text, a seeded mix of four task groups, and the text of traces.

Filler text is deterministic, and texts of different keys differ from their first bytes on. Words have 3, 7 or 11
letters and a leading space, so that every 4 bytes are one token for the stand-in replica's tokenizer.

The mix has four task groups with different prompts, sessions and sharing; it is endless and reproducible:

* ``chat`` follows the production chat trace of the Mooncake release (first 30 minutes: Poisson arrivals; prompts
  log-normal with median 7,640 and mean 12,870 tokens; outputs of mean 346; 65 % of the requests open a conversation
  and each turn is followed by another with probability 0.35, median 120 s later), with lengths and pauses divided by
  ``CHAT_SCALE``. Every prompt begins with one shared system prompt, of 32 tokens; the trace's has 512.
* ``coding-assistant`` has a long tool list for each of some teams, and sessions of many quick turns that grow.
* ``retrieval`` answers short questions over shared documents, some far more popular than others.
* ``batch-summaries`` appends new texts to a few long instructions with worked examples.

Sizes are chosen for four stand-in replicas of the default capacity (131,072 tokens each): all tier-1 prompts
together are about twice what one replica holds, and half of what the four hold. README.md has the figures.

Requests of a trace become chat messages that share exactly the blocks whose ids they share. A block is 512 tokens of
the rendered ChatML prompt, as the stand-in replica counts them. Tokens of the template are subtracted from the block
they are in, so block boundaries and prompt lengths are those of the trace. The text of a block depends only on its id,
so prompts share whole leading blocks and nothing else. The first block is the system message, the rest the user
message. The template's end must not cut into a shared block. So a prompt that ends at a block boundary or a few tokens
after it is up to 7 tokens longer than in the trace (12 after the first block).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from xxhash import xxh3_64_intdigest

from routing.traffic.trace import BLOCK_TOKENS, Job, TraceRequest

TOKEN_BYTES = 4  # per token of this text, as the stand-in replica counts; about what a real tokenizer makes of it
_FILLER_BYTES = 1 << 18
_VOCABULARY = """
the and for are can has not its may one two any all out off own set get put run key map log job row bit tag new old low
top end day few due per via yet but nor who how why now day
request problem measure records systems reports indexes ordered changes results pointed grouped listing current numbers
stating checked queries storage readers entries between because without another through several exactly already
written started finally holding merging sorting counted matched parsing printed returns smaller largest seconds
necessarily description development application information environment performance requirement possibility
"""
_LETTERS = str.maketrans("0123456789", "ghijklmnop")


@cache
def _filler_text() -> str:
    rng = random.Random(20_260)  # noqa: S311 -- filler, not secrets
    vocabulary = _VOCABULARY.split()
    words: list[str] = []
    size = 0
    while size < _FILLER_BYTES:
        word = rng.choice(vocabulary)
        words.append(word)
        size += len(word) + 1
    return "".join(f" {word}" for word in words)


def passage(key: str, size: int) -> str:
    """``size`` ASCII characters: a hash of ``key``, then words. A key's longer passages begin with its shorter ones."""
    digest = xxh3_64_intdigest(key)
    filler = _filler_text()
    start = digest % _FILLER_BYTES & -TOKEN_BYTES
    text = f"{digest:016x}".translate(_LETTERS) + filler[start:]
    while len(text) < size:
        text += filler
    return text[:size]


def text_of_tokens(key: str, tokens: int) -> str:
    """A passage of ``tokens`` tokens."""
    return passage(key, max(1, tokens) * TOKEN_BYTES)


DEFAULT_RATE = 5.0  # requests/s of all groups together
# Sessions that began this long before time 0 are in progress, so the request rate is right from the start.
LEAD_IN_S = 300.0
CHAT_SCALE = 4
CHAT_SYSTEM_TOKENS = 32  # almost nothing is shared
TEAMS = 12  # coding assistants, each with its own tools
TOOLS_PER_TEAM = 24
DOCUMENTS = 40
DOCUMENT_TOKENS = 4000
TEMPLATES = 12
TEMPLATE_TOKENS = 3000


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message and its number of output tokens."""

    after_s: float  # since the turn before, or since the session's start
    text_key: str
    prompt_tokens: int  # of the user's message
    output_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """All turns of one conversation."""

    group: str
    session_id: str | None
    system: str
    turns: Sequence[Turn]
    tools: Sequence[dict[str, Any]] = ()

    def messages(self, turn: int, responses: Sequence[str]) -> list[dict[str, str]]:
        """System prompt, then alternating user and assistant messages up to user message ``turn``."""
        messages = [{"role": "system", "content": self.system}]
        for index in range(turn):
            messages.append(self._user(index))
            messages.append({"role": "assistant", "content": responses[index]})
        return [*messages, self._user(turn)]

    def _user(self, index: int) -> dict[str, str]:
        turn = self.turns[index]
        return {"role": "user", "content": text_of_tokens(turn.text_key, turn.prompt_tokens)}


MakeSession = Callable[[random.Random, str], Session]


@dataclass(frozen=True, slots=True)
class Group:
    """A task group of the mix."""

    name: str
    share: float  # of the mix's requests
    turns: float  # mean turns of a session
    make: MakeSession


@dataclass(frozen=True, slots=True)
class Mix:
    """The mix of all groups. The same seed and rate give the same jobs."""

    seed: int
    rate: float = DEFAULT_RATE  # requests/s

    def jobs(self) -> Iterator[Job]:
        """Endless jobs, in order of time."""
        return heapq.merge(*(self._jobs_of(group) for group in GROUPS), key=lambda job: job.at_s)

    def _jobs_of(self, group: Group) -> Iterator[Job]:
        """The group's sessions start at random times; their turns are merged by time."""
        rng = random.Random(f"{self.seed} {group.name}")  # noqa: S311 -- traffic, not secrets
        starts_per_s = self.rate * group.share / group.turns
        pending: list[tuple[float, int, int, Session]] = []  # (time, session number, turn, session)
        start_s, number = -LEAD_IN_S, 0
        while True:
            start_s += rng.expovariate(starts_per_s)
            while pending and pending[0][0] <= start_s:
                yield self._next(pending)
            session = group.make(rng, f"{self.seed}-{number}")
            first = _from_time_zero(session, start_s)
            if first is not None:
                heapq.heappush(pending, (first[0], number, 0, first[1]))
            number += 1

    @staticmethod
    def _next(pending: list[tuple[float, int, int, Session]]) -> Job:
        at_s, number, turn, session = heapq.heappop(pending)
        following = turn + 1
        is_last = following == len(session.turns)
        if not is_last:
            heapq.heappush(pending, (at_s + session.turns[following].after_s, number, following, session))
        return Job(at_s, session, turn, session.turns[turn].output_tokens, is_last)


def _from_time_zero(session: Session, start_s: float) -> tuple[float, Session] | None:
    """(time of the first turn, session) without turns before time 0; None if all turns are before."""
    at_s = start_s
    for index, turn in enumerate(session.turns):
        at_s += turn.after_s
        if at_s >= 0:
            return at_s, replace(session, turns=session.turns[index:])
    return None


# --- chat --------------------------------------------------------------------------------------------

CHAT_CONTINUES = 0.35
CHAT_TURNS = 1 / (1 - CHAT_CONTINUES)


def _chat(rng: random.Random, number: str) -> Session:
    """A conversation as in the published trace: mostly one long prompt, sometimes more turns."""
    turns = [_chat_turn(rng, number, 0)]
    while rng.random() < CHAT_CONTINUES:
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
    team = _random_index(rng, TEAMS, 0.5)
    turns = [
        Turn(rng.uniform(4, 16) if index else 0.0, f"code {number} {index}", rng.randint(150, 700), rng.randint(30, 90))
        for index in range(rng.randint(6, 14))
    ]
    return Session("coding-assistant", f"code-{number}", text_of_tokens(f"team {team}", 400), turns, _tools(team))


# --- retrieval ---------------------------------------------------------------------------------------


def _retrieval(rng: random.Random, number: str) -> Session:
    """One to three questions about a document, which is part of the system prompt."""
    document = _random_index(rng, DOCUMENTS, 0.6)
    system = text_of_tokens(f"document {document}", DOCUMENT_TOKENS)
    turns = [
        Turn(rng.uniform(8, 30) if index else 0.0, f"ask {number} {index}", rng.randint(20, 120), rng.randint(40, 120))
        for index in range(rng.choice((1, 1, 2, 3)))
    ]
    return Session("retrieval", f"ask-{number}", system, turns)


# --- batch summaries ---------------------------------------------------------------------------------


def _summary(rng: random.Random, number: str) -> Session:
    """One new text after one of 12 instructions."""
    template = rng.randrange(TEMPLATES)
    system = text_of_tokens(f"template {template}", TEMPLATE_TOKENS)
    turn = Turn(0.0, f"text {number}", rng.randint(400, 1600), rng.randint(60, 140))
    return Session("batch-summaries", None, system, [turn])


def _random_index(rng: random.Random, count: int, skew: float) -> int:
    """A random number below ``count``, with weight (i + 1) ** -skew."""
    weights = [(index + 1) ** -skew for index in range(count)]
    return rng.choices(range(count), weights)[0]


GROUPS = (
    Group("chat", 0.15, CHAT_TURNS, _chat),
    Group("coding-assistant", 0.40, 10.0, _coding),
    Group("retrieval", 0.25, 1.75, _retrieval),
    Group("batch-summaries", 0.20, 1.0, _summary),
)


BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES
SYSTEM_HEADER = 4  # tokens of "<|im_start|>system\n"
TURN_CHANGE = 5  # of "<|im_end|>\n<|im_start|>user\n"
USER_HEADER = 3  # of "<|im_start|>user\n"
TAIL = 7  # of "<|im_end|>\n<|im_start|>assistant\n"


def block_text(block_id: int, tokens: int) -> str:
    """The text of a block, or the first ``tokens`` of it."""
    return passage(f"block {block_id}", tokens * TOKEN_BYTES)


def trace_messages(request: TraceRequest) -> list[dict[str, str]]:
    """The messages of one request of a trace."""
    sizes = [BLOCK_TOKENS] * len(request.hash_ids)
    last = request.prompt_tokens - BLOCK_TOKENS * (len(sizes) - 1)
    if len(sizes) == 1 and last == BLOCK_TOKENS:
        return [{"role": "system", "content": block_text(request.hash_ids[0], BLOCK_TOKENS - SYSTEM_HEADER)}]
    if len(sizes) == 1:
        size = max(1, last - USER_HEADER - TAIL)
        return [{"role": "user", "content": block_text(request.hash_ids[0], size)}]
    sizes[-1] = max(0, last - TAIL) if last < BLOCK_TOKENS else last
    if len(sizes) == 2:
        sizes[1] = max(1, sizes[1] - TURN_CHANGE)
    else:
        sizes[1] -= TURN_CHANGE
    sizes[0] -= SYSTEM_HEADER
    system, *rest = (block_text(block, size) for block, size in zip(request.hash_ids, sizes, strict=True))
    return [{"role": "system", "content": system}, {"role": "user", "content": "".join(rest)}]


@dataclass(frozen=True, slots=True, eq=False)
class TraceScript:
    """One request of a trace, which has no sessions."""

    request: TraceRequest
    group: str = "chat"
    session_id: str | None = None
    tools: Sequence[dict[str, Any]] = ()

    def messages(self, turn: int, responses: Sequence[str]) -> list[dict[str, str]]:  # noqa: ARG002 -- one turn only
        """See ``trace_messages``."""
        return trace_messages(self.request)


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """A trace, played once or repeatedly."""

    requests: Sequence[TraceRequest]
    loop: bool = False

    def jobs(self) -> Iterator[Job]:
        """Jobs in the trace's order; a repetition begins one mean gap after the last arrival."""
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
