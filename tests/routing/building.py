"""Small configurations, prompts and requests for the tests of routing."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from routing.balancing.candidates import Choice
from routing.balancing.request import PlacementRequest
from routing.prompt.canonical import CanonicalPrompt, canonical_prompt
from routing.prompt.hashing import PrefixHasher
from routing.prompt.parsing import parse_body
from routing.schema import (
    PolicyConfig,
    PoolConfig,
    PrefixHashSettings,
    ReplicaConfig,
    ReplicaState,
    RouterConfig,
    Settings,
    TaskGroupConfig,
)
from routing.types import PrefixHash, ReplicaId

SECRET = "5ec2e7" * 8
CHAT = "/v1/chat/completions"
DEADLINE_S = 60.0


def names(count: int) -> list[ReplicaId]:
    return [ReplicaId(f"replica-{number}") for number in range(count)]


def replicas(count: int, **fields: Any) -> tuple[ReplicaConfig, ...]:
    return tuple(ReplicaConfig(name=name, url=f"http://{name}:8000", **fields) for name in names(count))


def pool(
    settings: Settings | None = None,
    members: tuple[ReplicaConfig, ...] = replicas(4),
    groups: Iterable[TaskGroupConfig] = (),
    models: tuple[str, ...] = (),
    name: str = "chat",
) -> PoolConfig:
    policy = PolicyConfig(name="everyday", revision=3, settings=settings or PrefixHashSettings())
    return PoolConfig(name=name, policy=policy, models=models, replicas=members, groups=tuple(groups))


def config(*pools: PoolConfig, secret: str = SECRET) -> RouterConfig:
    return RouterConfig(hash_secret=secret, pools=pools or (pool(),))


def chat(*messages: tuple[str, Any], **fields: Any) -> CanonicalPrompt:
    """The canonical prompt of a chat body with these (role, content) messages."""
    listed = [{"role": role, "content": content} for role, content in messages]
    return canonical(CHAT, {"model": "llama", "messages": listed, **fields})


def block_hashes(hasher: PrefixHasher, prompt: CanonicalPrompt, model: str = "llama") -> array[int]:
    """Its block hashes in one array."""
    return array("Q", b"".join(hasher.chunks(prompt, model)))


def canonical(path: str, body: Any) -> CanonicalPrompt:
    return canonical_prompt(parse_body(path, json.dumps(body).encode()))


def request(
    text: str = "Hello",
    model: str | None = "llama",
    group: str | None = None,
    session: str | None = None,
    prompt: CanonicalPrompt | None = None,
    key: str | None = None,
    key_groups: tuple[str, ...] | None = None,
) -> PlacementRequest:
    return PlacementRequest(model, group, session, prompt or chat(("user", text)), key=key, key_groups=key_groups)


def as_tuple(choice: Choice) -> tuple[object, ...]:
    """All fields of a choice."""
    return choice.target, choice.reason, choice.skipped, choice.hit_tokens


class FixedKeys:
    """Keys with fixed values."""

    media = None

    def __init__(
        self,
        session: int | None = None,
        tier1: int | None = None,
        tier2: int | None = None,
        chain: Sequence[int] = (),
        prompt_tokens: int = 100,
        block_tokens: int = 10,
    ) -> None:
        self.session = self.conversation = None if session is None else PrefixHash(session)
        self.tier1 = None if tier1 is None else PrefixHash(tier1)
        self.tier2 = None if tier2 is None else PrefixHash(tier2)
        self.chain = chain
        self.prompt_tokens = self.estimate = prompt_tokens
        self.block_tokens = block_tokens

    def add_surplus(self, tokens: int) -> None:
        """Correct the length by what the residency knows."""
        self.prompt_tokens = self.estimate + tokens


def draining(count: int) -> tuple[ReplicaConfig, ...]:
    return replicas(count, state=ReplicaState.DRAINING)


async def until(condition: Callable[[], object], what: str = "a condition") -> None:
    """Wait until a condition holds."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"waited {DEADLINE_S} s for {what}") from None
