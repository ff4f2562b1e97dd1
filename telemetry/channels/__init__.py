"""Channels deliver alerts; every ``ChannelKind`` that a module of this package defines is one of ``KINDS``."""

from importlib import import_module
from pkgutil import iter_modules

from telemetry.channels.base import ChannelKind

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
KINDS: dict[str, ChannelKind] = {
    kind.name: kind for module in _MODULES for kind in vars(module).values() if isinstance(kind, ChannelKind)
}
