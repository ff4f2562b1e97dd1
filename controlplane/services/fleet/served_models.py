"""Which models an engine serves, by its own ``GET /v1/models`` (vLLM, SGLang, and others that speak OpenAI's API).

Which models pools answer to: a name belongs to one pool, and what relies on a name keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


def names_of(pool: Pool) -> ModelNames:
    """Every name of a model, alias or adapter that a pool answers to, each with its path."""
    return ModelNames(
        tuple(pool.models),
        msgspec.convert(pool.aliases, tuple[Alias, ...]),
        msgspec.convert(pool.adapters, tuple[Adapter, ...]),
    )


def unnamed_model_warning(added: Pool) -> str:
    """What adding this pool does to clients that name no model; "" for nothing. One query.

    Routers take such a request only where one pool can be meant: the only one, or the one that takes any model.
    """
    others = [bool(pool.models) for pool in Pool.objects.exclude(pk=added.pk)]
    if len(others) != 1 or not others[0]:  # no other pool; or the rule was in force before; or one takes any model
        return ""
    if added.models:
        return "Requests that name no model are refused from now on: there are two pools, and none takes any model."
    return f"Requests that name no model go to pool {added.name} from now on: it takes any model."


@contextmanager
def name_conflicting_model(pool: Pool, by: User | None) -> Iterator[None]:
    """Say of a refused snapshot which model of this pool another one serves; that one by name only to who may see it.

    Routers name both pools, whoever asks. What else they refuse is said as they say it, from this pool's own fields.
    """
    try:
        yield
    except InvalidError as error:
        raise _served_elsewhere(pool, by) or _relied_on(pool) or about_itself(error) from None


@contextmanager
def relative_error_paths() -> Iterator[None]:
    """Say what a snapshot was refused for from the changed object's own fields, not from all pools'."""
    try:
        yield
    except InvalidError as error:
        raise about_itself(error) from None


def about_itself(error: InvalidError) -> InvalidError:
    """The same refusal without the way from all pools to the object."""
    path, reason = error.faults[0].path, error.faults[0].reason
    steps = path.split(".")
    while len(steps) > 1 and steps[1].partition("[")[0] in {"pools", "groups", "replicas"} and steps[1].endswith("]"):
        del steps[1]
    return InvalidError(".".join(steps), reason)


def _relied_on(pool: Pool) -> InvalidError | None:
    """The first name that a replica or a task group of the pool relies on and that it has no longer."""
    adapters = {adapter["name"] for adapter in pool.adapters}
    for replica in pool.replicas.exclude(adapters=None):
        for name in sorted(set(replica.adapters or ()) - adapters):
            return InvalidError(
                "$.adapters", f"replica {replica.name} is said to hold {name!r}; change the replica first"
            )
    if not pool.models:
        return None  # it takes any model
    names = {name for name, _ in names_of(pool)}
    for group in pool.groups.exclude(match=None):
        for name in sorted(set((group.match or {})["models"]) - names):
            return InvalidError("$.models", f"task group {group.name} matches {name!r}; change the group first")
    return None


def _served_elsewhere(pool: Pool, by: User | None) -> InvalidError | None:
    """The first name that another pool has as well, if that is what is wrong."""
    mine = list(names_of(pool))
    for other in Pool.objects.exclude(pk=pool.pk):
        if not pool.models and not other.models:
            return InvalidError("$.models", f"every model is already served by {_called(other, by)}; name this pool's")
        taken = {name for name, _ in names_of(other)}
        for name, path in mine:
            if name in taken:
                return InvalidError(f"$.{path}", f"model {name!r} is already served by {_called(other, by)}")
    return None


def _called(pool: Pool, by: User | None) -> str:
    """A pool by its name where the actor may know of it; the system itself may."""
    known = by is None or roles_of(by).may(Role.VIEWER, pool.project_id)
    return f"pool {pool.name!r}" if known else "another pool"
