"""What a store asks to make configurations ready, where nothing runs."""

from __future__ import annotations

from routing.proxy.config_store import Swap
from routing.schema import (
    LoadedSnapshot,
)


async def ready(_: LoadedSnapshot) -> Swap:
    """Make any configuration ready."""

    async def swap() -> None:
        return

    return swap
