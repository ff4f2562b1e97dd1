"""The compiled router, made when a test first asks for it."""

import os

import pytest

from tests.compiled.package import NotHereError, compile_router


@pytest.fixture(scope="session")
def compiled() -> None:
    """Skips where it cannot be compiled, which REQUIRE_PROGRAMS makes a failure."""
    try:
        compile_router()
    except NotHereError as error:
        if os.environ.get("REQUIRE_PROGRAMS"):
            pytest.fail(f"{error} (REQUIRE_PROGRAMS is set)")
        pytest.skip(str(error))
