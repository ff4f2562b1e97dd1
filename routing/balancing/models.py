"""From the name that a client uses for a model to the pool that serves it, and to what the name stands for.

An alias is another name for a model or an adapter, so prompts under both share their KV blocks. An adapter is none: its
blocks are its own, though its weights are mostly those of the model that it adapts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from routing.schema import PoolConfig, RouterConfig
from routing.types import UnknownModelError

MAX_STRANGE: Final = 256  # names remembered that no configuration knows


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the name of a model stands for."""

    pool: PoolConfig
    name: str  # as engines know it: the model's, or the adapter's
    model: str  # "" for an engine's default one
    adapter: str = ""  # "" for none


class Models:
    """The names of all pools of a configuration."""

    __slots__ = ("_any_model", "_by_name", "_strange", "_unnamed")

    def __init__(self, config: RouterConfig) -> None:
        self._by_name = {name: served for pool in config.pools for name, served in _names(pool)}
        self._strange: dict[str, ServedModel] = {}  # names that nobody knows, in the pool that takes any
        self._any_model = next((pool for pool in config.pools if not pool.models), None)
        only = config.pools[0] if len(config.pools) == 1 else self._any_model
        self._unnamed = None if only is None else _default(only)

    def served(self, name: str | None) -> ServedModel:
        """What a name stands for, in the pool that takes any model if nobody knows it; else UnknownModelError.

        A request that names no model gets the engine's default one where only one pool can be meant.
        """
        if name is None:
            served = self._unnamed
        else:
            served = self._by_name.get(name) or self._strange.get(name) or self._stranger(name)
        if served is None:
            raise UnknownModelError(name)
        return served

    def _stranger(self, name: str) -> ServedModel | None:
        if self._any_model is None:
            return None
        if len(self._strange) >= MAX_STRANGE:
            self._strange.clear()
        served = self._strange[name] = ServedModel(self._any_model, name, name)
        return served


def _names(pool: PoolConfig) -> Iterator[tuple[str, ServedModel]]:
    """Every name of a pool; aliases come last, for they stand for one of the others."""
    known = {model: ServedModel(pool, model, model) for model in pool.models}
    known |= {it.name: ServedModel(pool, it.name, it.model, it.name) for it in pool.adapters}
    yield from known.items()
    for alias in pool.aliases:
        yield alias.name, known.get(alias.model) or ServedModel(pool, alias.model, alias.model)


def _default(pool: PoolConfig) -> ServedModel:
    """What vLLM takes a request for that names no model: the first of its served names."""
    model = pool.models[0] if pool.models else ""
    return ServedModel(pool, model, model)
