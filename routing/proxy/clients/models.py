"""``/v1/models`` as the router answers it: every name of every pool that a client may use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from routing.proxy.http.local_answer import LocalAnswer
from routing.schema import PoolConfig, RouterConfig

if TYPE_CHECKING:
    from routing.proxy.clients.access import Grant


def models_answer(config: RouterConfig, grant: Grant | None) -> LocalAnswer | None:
    """The models that one may use; None if a pool takes any: then its replicas know them and we do not."""
    if any(not pool.models for pool in config.pools):
        return None
    cards = [card for pool in config.pools for card in _cards(pool) if _may_use(grant, card)]
    return LocalAnswer(200, msgspec.json.encode({"object": "list", "data": cards}))


def _cards(pool: PoolConfig) -> Iterator[dict[str, Any]]:
    """In vLLM's words: an alias has another model as its root, an adapter the model that it adapts as its parent."""
    for model in pool.models:
        yield _card(model, model)
    for alias in pool.aliases:
        yield _card(alias.name, alias.model)
    for adapter in pool.adapters:
        yield _card(adapter.name, adapter.name, adapter.model)


def _card(name: str, root: str, parent: str | None = None) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "warmpath", "root": root, "parent": parent}


def _may_use(grant: Grant | None, card: dict[str, Any]) -> bool:
    """A key for a model is good for its aliases too."""
    return grant is None or grant.models is None or card["id"] in grant.models or card["root"] in grant.models
