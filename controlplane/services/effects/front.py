"""What stands before placement: the secret in every key, who is let in, which models are served."""

from __future__ import annotations

from collections.abc import Iterator

from routing import schema

from .effect import Effect, Impact, Path, several, some
from .leaves import Differences

ANYBODY, KEYS = "anybody", "API keys only"


def front_effects(
    before: schema.RouterConfig | None, after: schema.RouterConfig, left: Differences
) -> Iterator[Effect]:
    """The secret, access, and the names of models."""
    if before is None:
        return
    if ("hash_secret",) in left:
        text = (
            "The fleet's hash secret is another: every key is hashed anew, so all homes move, everything is cold at "
            "first, and hashes of prefixes noted before match nothing."
        )
        yield Effect("hash_secret", Impact.RESET, ("every request",), text, None, None, None, (("hash_secret",),))
    yield from _access(before.access, after.access, left)
    yield from _models(before, after, left)


def _access(before: schema.Access | None, after: schema.Access | None, left: Differences) -> Iterator[Effect]:
    who = ("every client",)
    if before is None or after is None:
        if ("access",) in left:
            now, was = (KEYS, ANYBODY) if after else (ANYBODY, KEYS)
            rule = (
                f"with one of {several(len(after.keys), 'API key')}; all others get 401" if after else "without a key"
            )
            text = f"Requests are let in {rule}."
            yield Effect("access", Impact.REFUSE, who, text, was, now, 0.0, (("access",),))
        return
    old, new = {key.name: key for key in before.keys}, {key.name: key for key in after.keys}
    for name in dict.fromkeys((*new, *old)):
        place: Path = ("access", "keys", name)
        client = (f"API key {name}",)
        if name not in old:
            yield Effect("key_added", Impact.REFUSE, client, f"API key {name} is let in.", None, name, 0.0, (place,))
        elif name not in new:
            text = f"API key {name} is let in no more: its requests get 401."
            yield Effect("key_removed", Impact.REFUSE, client, text, name, None, 0.0, (place,))
        elif (*place, "digest") in left:
            text = f"API key {name} has another secret: clients that send the former one get 401."
            yield Effect("key_secret", Impact.REFUSE, client, text, None, None, 0.0, ((*place, "digest"),))


def _models(before: schema.RouterConfig, after: schema.RouterConfig, left: Differences) -> Iterator[Effect]:
    old = {pool.name: pool for pool in before.pools}
    for pool in after.pools:
        place: Path = ("pools", pool.name)
        fields = ("models", "aliases", "adapters")
        paths = left.under(*((*place, field) for field in fields))
        if pool.name not in old or not paths:
            continue
        was, now = ({name: _stands_for(one, name) for name, _ in one.names} for one in (old[pool.name], pool))
        new, gone = sorted(now.keys() - was.keys()), sorted(was.keys() - now.keys())
        other = sorted(name for name in now.keys() & was.keys() if now[name] != was[name])
        words = [f"takes {some(new)}" if new else "", f"takes {some(gone)} no more" if gone else ""]
        words += [f"takes {some(other)} for another model than before" if other else ""]
        said = ", ".join(word for word in words if word) or "says its models in another order"
        if not pool.models and old[pool.name].models:
            said = "takes any model that no other pool serves"
        text = f"Pool {pool.name} {said}."
        yield Effect("models", Impact.REFUSE, (f"pool {pool.name}",), text, sorted(was), sorted(now), None, paths)


def _stands_for(pool: schema.PoolConfig, name: str) -> str:
    named = {one.name: one.model for one in pool.aliases} | {one.name: one.model for one in pool.adapters}
    return named.get(name, name)
