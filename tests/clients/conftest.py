"""The router, its stand-in replicas, and their addresses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.register_assert_rewrite(
    "tests.clients.servers"
)  # before its import, so that a failed comparison shows the difference

from tests.clients.servers import EMBEDDER, Servers, address, router_config, router_process  # noqa: E402 - see above
from tests.routing.standin.replica_process import replica_process  # noqa: E402 - see above

if find_spec("openai") is None:  # `make test`
    collect_ignore_glob = ["test_*.py"]

GENERATING = ("--step-s", "0.002", "--enable-auto-tool-choice")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise the import downloads a price list


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Two generating replicas and an embedding one behind a router, and one of each kind without a router."""
    folder: Path = tmp_path_factory.mktemp("router")
    with ExitStack() as stack:
        generating = [stack.enter_context(replica_process(*GENERATING)) for _ in range(3)]
        embedding = [stack.enter_context(replica_process("--task", "pooling", model=EMBEDDER)) for _ in range(2)]
        router = stack.enter_context(router_process(folder, router_config(generating[:2], embedding[:1])))
        yield Servers(router, generating[:2], address(generating[2].port), address(embedding[1].port))
