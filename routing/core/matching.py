"""From a request to its pool, by model, and to its task group, by name."""

from __future__ import annotations

from routing.core.types import UnknownModelError
from routing.schema import PoolConfig, RouterConfig, TaskGroupConfig


class Matcher:
    """The pools of a configuration by the models that they serve, and their task groups by name."""

    __slots__ = ("_any_model", "_by_model", "_groups", "_unnamed")

    def __init__(self, config: RouterConfig) -> None:
        self._by_model = {model: pool for pool in config.pools for model in pool.models}
        self._any_model = next((pool for pool in config.pools if not pool.models), None)
        self._unnamed = config.pools[0] if len(config.pools) == 1 else self._any_model
        self._groups = {(pool.name, group.name): group for pool in config.pools for group in pool.groups}

    def pool(self, model: str | None) -> PoolConfig:
        """The pool that serves a model, else the one that takes any; UnknownModelError if there is neither.

        A request that names no model gets the engine's default one where only one pool can be meant.
        """
        pool = self._unnamed if model is None else self._by_model.get(model, self._any_model)
        if pool is None:
            raise UnknownModelError(model)
        return pool

    def group(self, pool: PoolConfig, name: str | None) -> TaskGroupConfig | None:
        """The pool's task group of that name; None for no name and for one that is not configured."""
        return self._groups.get((pool.name, name)) if name else None
