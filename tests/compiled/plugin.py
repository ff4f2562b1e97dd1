"""pytest plugin for the compiled router: refuses the plain one and deselects tests that need plain Python."""

from __future__ import annotations

import importlib

import pytest

from tests.compiled.package import PACKAGES
from tests.side_by_side import wants_to_be_alone


def pytest_configure() -> None:
    """Fail if a compiled module was imported as plain Python."""
    native = sorted((PACKAGES / "routing").rglob("*.so"))
    names = [".".join([*path.relative_to(PACKAGES).parent.parts, path.name.partition(".")[0]]) for path in native]
    plain = [name for name in names if importlib.import_module(name).__file__ not in set(map(str, native))]
    if plain or not names:
        raise pytest.UsageError(f"not the compiled router: {', '.join(plain) or 'nothing has been compiled'}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need plain Python, and those marked ``@alone``, which run elsewhere."""
    for item in items:
        if mark := item.get_closest_marker("plain_python"):
            item.add_marker(pytest.mark.skip(reason=mark.kwargs["reason"]))
    if alone := [item for item in items if wants_to_be_alone(item)]:
        config.hook.pytest_deselected(items=alone)
        items[:] = [item for item in items if not wants_to_be_alone(item)]
