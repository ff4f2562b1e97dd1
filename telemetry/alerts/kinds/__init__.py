"""The kinds of alert rules: the settings of each, a pure evaluation and a summary for people.

Every ``Kind`` that a module of this package defines is one; their order is that of ``RuleKind``.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from telemetry.alerts.kinds.base import Kind, RuleSettings, Scope
from telemetry.models import RuleKind

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
_DEFINED = {kind.name: kind for module in _MODULES for kind in vars(module).values() if isinstance(kind, Kind)}
KINDS: dict[str, Kind] = {name: _DEFINED[name] for name in RuleKind.values}

__all__ = ["KINDS", "Kind", "RuleSettings", "Scope"]
