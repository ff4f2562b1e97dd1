"""Client keys as routers are told of them.

A key is of one project: it is good for that project's models alone, its tenant is none of another project's, and
routers know it as ``project.name``. What a key names and is there no longer is left out, and a key for nothing is not
let in: nobody's change can be refused for what a key names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec

from controlplane.models import ClientKey, Pool
from routing import schema


def access_of(keys: Iterable[ClientKey], pools: Sequence[Pool]) -> schema.Access:
    """Those that are let in, by name; ``pools`` with their groups at hand."""
    told = (_told(key, pools) for key in keys)
    return schema.Access(tuple(sorted((key for key in told if key), key=lambda key: key.name)))


def api_key(key: ClientKey) -> schema.ApiKey:
    """A key as its row says it."""
    return schema.ApiKey(
        name=key.full_name,
        digest=key.digest,
        models=_tuple(key.models),
        groups=_tuple(key.groups),
        tenant=f"{key.project.name}.{key.tenant}" if key.tenant else None,
        requests_per_s=key.requests_per_s,
        burst=key.burst,
        tokens_per_min=key.tokens_per_min,
        expires_at=None if key.expires_at is None else int(key.expires_at.timestamp()),
    )


def names_of(pools: Iterable[Pool]) -> set[str] | None:
    """Every name of a model, alias or adapter of some pools; None where one of them takes any model."""
    names: set[str] = set()
    for pool in pools:
        if not pool.models:
            return None
        named: list[dict[str, Any]] = [*pool.aliases, *pool.adapters]
        names |= {*pool.models, *(one["name"] for one in named)}
    return names


def claiming(group: schema.TaskGroupConfig, project: str, keys: Collection[str]) -> schema.TaskGroupConfig:
    """The group with the keys that it claims by their full names, those that are let in alone."""
    match = group.match
    if not match.api_keys and not match.api_key_prefixes:
        return group
    names = tuple(name for name in (f"{project}.{short}" for short in match.api_keys) if name in keys)
    prefixes = tuple(f"{project}.{prefix}" for prefix in match.api_key_prefixes)
    told = msgspec.structs.replace(match, api_keys=names, api_key_prefixes=prefixes)
    return msgspec.structs.replace(group, match=told)


def _told(key: ClientKey, pools: Sequence[Pool]) -> schema.ApiKey | None:
    """The key within what its project has; None where that is nothing."""
    own = [pool for pool in pools if pool.project_id == key.project_id]
    said = api_key(key)
    models = _models(said.models, names_of(own), is_alone=len(own) == len(pools))
    groups = _those(said.groups, {group.name for pool in own for group in pool.groups.all()})
    if not own or models == () or groups == ():
        return None
    return msgspec.structs.replace(said, models=models, groups=groups)


def _models(said: tuple[str, ...] | None, known: Collection[str] | None, *, is_alone: bool) -> tuple[str, ...] | None:
    """Its project's alone, unless there is no other project's; a project that takes any model cannot be told apart."""
    if known is None:
        return said
    if said is None:
        return None if is_alone else tuple(sorted(known))
    return _those(said, known)


def _those(said: tuple[str, ...] | None, known: Collection[str]) -> tuple[str, ...] | None:
    return None if said is None else tuple(name for name in said if name in known)


def _tuple(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)
