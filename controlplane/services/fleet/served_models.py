"""Model names: what engines list in ``GET /v1/models``, and readable errors where names of pools conflict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import msgspec
from django.contrib.auth.models import User

from controlplane.access.actor import roles_of
from controlplane.egress import fetch, fleet_rules, guarded_client
from controlplane.errors import InvalidError
from controlplane.models import Pool, Role
from routing.schema import Adapter, Alias, Model, ModelNames

DEADLINE_S = 2.0
MAX_BYTES = 1 << 20  # a thousand adapters take a quarter of it
MAX_CONCURRENT = 32


class _Card(msgspec.Struct):
    id: Model
    parent: Model | None = None  # of a LoRA adapter: its base model


class _ModelList(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class ListedModels:
    """The models of one engine."""

    models: tuple[str, ...]  # served names, sorted, at least one
    adapters: tuple[Adapter, ...]


def listed_models(urls: Sequence[str]) -> dict[str, ListedModels | None]:
    """The models of engines by base URL; None without a response within ``DEADLINE_S``. Requests run concurrently."""
    if not urls:
        return {}
    with guarded_client(fleet_rules()) as client, ThreadPoolExecutor(min(MAX_CONCURRENT, len(urls))) as threads:
        return dict(zip(urls, threads.map(lambda url: _list_models(client, url), urls), strict=True))


def _list_models(client: httpx.Client, url: str) -> ListedModels | None:
    try:
        response = fetch(client, "GET", f"{url}/v1/models", deadline_s=DEADLINE_S, max_bytes=MAX_BYTES)
        cards = msgspec.json.decode(response.body, type=_ModelList).data if response.status == httpx.codes.OK else []
    except (httpx.HTTPError, msgspec.DecodeError, RecursionError):
        return None
    models = {card.id for card in cards if card.parent is None}
    adapters = {card.id: card.parent for card in cards if card.parent in models and card.id not in models}
    if not models:
        return None
    return ListedModels(
        tuple(sorted(models)), tuple(Adapter(name, parent) for name, parent in sorted(adapters.items()) if parent)
    )


def unnamed_model_warning(added: Pool) -> str:
    """What adding this pool changes for requests that name no model; "" for nothing. One query.

    Routers accept such requests only if there is one pool, or one pool accepts any model.
    """
    other_pools = list(Pool.objects.exclude(pk=added.pk))
    if len(other_pools) != 1 or not other_pools[0].models:
        return ""
    if added.models:
        return "Requests that name no model are rejected from now on: there are two pools, and none accepts any model."
    return f"Requests that name no model go to pool {added.name} from now on: it accepts any model."


@contextmanager
def name_conflicting_model(pool: Pool, by: User | None) -> Iterator[None]:
    """Explain a rejected snapshot by the pool's own names; another pool is named only to users who may see it."""
    try:
        yield
    except InvalidError as error:
        raise _name_conflict(pool, by) or _removed_name_in_use(pool) or _relative(error) from None


@contextmanager
def relative_error_paths() -> Iterator[None]:
    """Name the path of an error within the changed object, instead of the whole configuration."""
    try:
        yield
    except InvalidError as error:
        raise _relative(error) from None


def _relative(error: InvalidError) -> InvalidError:
    path, reason = error.faults[0].path, error.faults[0].reason
    steps = path.split(".")
    while len(steps) > 1 and steps[1].partition("[")[0] in {"pools", "groups", "replicas"} and steps[1].endswith("]"):
        del steps[1]
    return InvalidError(".".join(steps), reason)


def _model_names(pool: Pool) -> ModelNames:
    """All names of a pool's models, aliases and adapters, each with its path."""
    return ModelNames(
        tuple(pool.models),
        msgspec.convert(pool.aliases, tuple[Alias, ...]),
        msgspec.convert(pool.adapters, tuple[Adapter, ...]),
    )


def _removed_name_in_use(pool: Pool) -> InvalidError | None:
    """The first removed name that a replica or a task group of the pool uses."""
    adapters = {adapter["name"] for adapter in pool.adapters}
    for replica in pool.replicas.exclude(adapters=None):
        for name in sorted(set(replica.adapters or ()) - adapters):
            return InvalidError("$.adapters", f"replica {replica.name} lists {name!r}; change the replica first")
    if not pool.models:
        return None  # it accepts any model
    names = {name for name, _ in _model_names(pool)}
    for group in pool.groups.exclude(match=None):
        for name in sorted(set((group.match or {})["models"]) - names):
            return InvalidError("$.models", f"task group {group.name} matches {name!r}; change the group first")
    return None


def _name_conflict(pool: Pool, by: User | None) -> InvalidError | None:
    """The first name that another pool has as well."""
    names = list(_model_names(pool))
    for other in Pool.objects.exclude(pk=pool.pk):
        is_visible = by is None or roles_of(by).may(Role.VIEWER, other.project_id)
        reason = f"is already served by pool {other.name!r}" if is_visible else "cannot be used here; choose another"
        if not pool.models and not other.models:
            where = f": pool {other.name!r} accepts every model" if is_visible else ""
            return InvalidError("$.models", f"list this pool's models{where}")
        other_names = {name for name, _ in _model_names(other)}
        for name, path in names:
            if name in other_names:
                return InvalidError(f"$.{path}", f"model {name!r} {reason}")
    return None
