"""pytest plugin for the compiled router: refuses the plain one, and selects tests and their cases.

``make test`` runs the tests of compiled modules on the compiled router alone and says so by ``ONLY_COMPILED``: then all
cases are run. Otherwise the plain router runs them all, and some suffice.
"""

from __future__ import annotations

import importlib
import os
from collections import defaultdict
from collections.abc import Iterable

import pytest

from tests.compiled.package import ONLY_COMPILED, PACKAGES
from tests.side_by_side import wants_to_be_alone

CASES = 8  # of each parametrized test, if all of its cases run on the plain router


def pytest_configure() -> None:
    """Fail if a compiled module was imported as plain Python."""
    native = sorted((PACKAGES / "routing").rglob("*.so"))
    names = [".".join([*path.relative_to(PACKAGES).parent.parts, path.name.partition(".")[0]]) for path in native]
    plain = [name for name in names if importlib.import_module(name).__file__ not in set(map(str, native))]
    if plain or not names:
        raise pytest.UsageError(f"not the compiled router: {', '.join(plain) or 'nothing has been compiled'}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need plain Python; leave out those marked ``@alone``, which run elsewhere, and most cases."""
    for item in items:
        if mark := item.get_closest_marker("plain_python"):
            item.add_marker(pytest.mark.skip(reason=mark.kwargs["reason"]))
    side_by_side = [item for item in items if not wants_to_be_alone(item)]
    selected = set(side_by_side if ONLY_COMPILED in os.environ else _some_cases(side_by_side))
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = [item for item in items if item in selected]


def _some_cases(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Up to ``CASES`` evenly spaced cases of each parametrized test."""
    cases_of = defaultdict(list)
    for item in items:
        cases_of[item.nodeid.partition("[")[0]].append(item)
    return [case for cases in cases_of.values() for case in cases[:: -(-len(cases) // CASES)]]
