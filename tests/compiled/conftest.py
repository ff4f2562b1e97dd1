"""The compiled router, built when a test first needs it."""

import os

import pytest

from tests.compiled.package import CannotCompileError, compile_router


@pytest.fixture(scope="session")
def compiled() -> None:
    """Skip without a C compiler; fail if REQUIRE_PROGRAMS is set."""
    try:
        compile_router()
    except CannotCompileError as error:
        if os.environ.get("REQUIRE_PROGRAMS"):
            pytest.fail(f"{error} (REQUIRE_PROGRAMS is set)")
        pytest.skip(str(error))
