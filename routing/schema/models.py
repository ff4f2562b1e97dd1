"""The names that clients use for models: served names, aliases of them, and LoRA adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from routing.schema.base import ConfigError, Frozen, Model


class Alias(Frozen, frozen=True):
    """Another name for a model or an adapter of the same pool; engines are sent the name that it stands for."""

    name: Model
    model: Model


class Adapter(Frozen, frozen=True):
    """A LoRA adapter that clients name as their model. Its KV blocks are its own, not its model's."""

    name: Model
    model: Model  # that it adapts


class ModelNames(Frozen, frozen=True):
    """Every name that one pool answers to."""

    models: tuple[Model, ...]
    aliases: tuple[Alias, ...]
    adapters: tuple[Adapter, ...]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Each name, and the path where it stands in its pool."""
        for index, model in enumerate(self.models):
            yield model, f"models[{index}]"
        for index, alias in enumerate(self.aliases):
            yield alias.name, f"aliases[{index}].name"
        for index, adapter in enumerate(self.adapters):
            yield adapter.name, f"adapters[{index}].name"


def check_names(names: ModelNames, pool: str, path: str, owners: dict[str, str]) -> None:
    """Names that nobody has yet, and that stand for something there; ConfigError otherwise. Adds them to ``owners``."""
    for name, where in names:
        if name in owners:
            raise ConfigError(f"{path}.{where}", f"model {name!r} is already served by pool {owners[name]!r}")
        owners[name] = pool
    adapters = {adapter.name for adapter in names.adapters}
    for index, adapter in enumerate(names.adapters):
        _check_known(adapter.model, names.models, f"{path}.adapters[{index}].model")
    for index, alias in enumerate(names.aliases):
        if alias.model not in adapters:
            _check_known(alias.model, names.models, f"{path}.aliases[{index}].model")


def check_held(held: tuple[str, ...] | None, adapters: Collection[str], path: str) -> None:
    """A replica holds adapters of its pool, or nobody says which (None); ConfigError otherwise."""
    for position, name in enumerate(held or ()):
        if name not in adapters:
            raise ConfigError(f"{path}[{position}]", f"the pool has no adapter {name!r}")


def _check_known(model: str, models: Collection[str], path: str) -> None:
    """A pool without models takes any, so any may be meant."""
    if models and model not in models:
        raise ConfigError(path, f"the pool has no model {model!r}")
