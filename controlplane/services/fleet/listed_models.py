"""Which models an engine serves, by its own ``GET /v1/models`` (vLLM, SGLang, and others that speak OpenAI's API)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import msgspec

from controlplane.egress import fetch, fleet_rules, guarded_client
from routing.schema import Adapter, Model

DEADLINE_S = 2.0
MOST_BYTES = 1 << 20  # a thousand adapters take a quarter of it
AT_ONCE = 32


class _Card(msgspec.Struct):
    id: Model
    parent: Model | None = None  # of a LoRA adapter: the model that it adapts


class _List(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class ListedModels:
    """What one engine lists."""

    models: tuple[str, ...]  # served names, sorted, at least one
    adapters: tuple[Adapter, ...]


def listed_models(urls: Sequence[str]) -> dict[str, ListedModels | None]:
    """What engines list, by base URL; None for one that gives no list within ``DEADLINE_S``. Asks all at once."""
    if not urls:
        return {}
    with guarded_client(fleet_rules()) as client, ThreadPoolExecutor(min(AT_ONCE, len(urls))) as threads:
        found = threads.map(lambda url: _listed(client, url), urls)
        return dict(zip(urls, found, strict=True))


def _listed(client: httpx.Client, url: str) -> ListedModels | None:
    try:
        answer = fetch(client, "GET", f"{url}/v1/models", deadline_s=DEADLINE_S, max_bytes=MOST_BYTES)
        cards = msgspec.json.decode(answer.body, type=_List).data if answer.status == httpx.codes.OK else []
    except (httpx.HTTPError, msgspec.DecodeError, RecursionError):
        return None
    return _sorted_out(cards)


def _sorted_out(cards: Iterable[_Card]) -> ListedModels | None:
    models = {card.id for card in cards if card.parent is None}
    adapters = {card.id: card.parent for card in cards if card.parent in models and card.id not in models}
    if not models:
        return None
    return ListedModels(
        tuple(sorted(models)), tuple(Adapter(name, parent) for name, parent in sorted(adapters.items()) if parent)
    )
