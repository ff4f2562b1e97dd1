"""``manage.py seed_fleet``: what a new installation starts with."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from controlplane.errors import ControlPlaneError
from controlplane.models import Event, EventKind, Pool, Replica
from controlplane.services.fleet.pools import create_pool, update_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.served_models import ListedModels, listed_models
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.settings import env

ADMIN = "admin"
POOL = "default"
DEMO_GROUPS = {
    "chat": "Conversations with people.",
    "coding-assistant": "A coding assistant with a long list of tools.",
    "retrieval": "Questions over shared documents.",
    "batch-summaries": "Summaries made in bulk.",
}


class Command(BaseCommand):
    """Add what is missing, change and remove nothing that somebody made; to run it again is harmless.

    Replicas that list the same model share a pool; the first pool is called ``default``. It takes any model while no
    replica lists any, and gets the names at a later run unless somebody changed it meanwhile.
    """

    help = "Create the admin user, the given replicas and pools of the models that they list, where missing."

    def add_arguments(self, parser: CommandParser) -> None:
        """The replicas to add."""
        parser.add_argument(
            "--replica", metavar="URL", nargs="+", action="extend", default=[], help="base URLs of replicas to add"
        )
        parser.add_argument(
            "--demo",
            action="store_true",
            help="the replicas are stand-ins: one pool for any model under round_robin, with the demo's task groups",
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        """Seed; CommandError for a URL that no replica can have."""
        urls = [url.rstrip("/") for url in options["replica"]]
        try:
            with transaction.atomic():
                self._admin()
                if options["demo"]:
                    self._demo(urls)
            if not options["demo"]:
                self._fleet(urls, listed_models(urls))
        except ControlPlaneError as error:
            raise CommandError(str(error)) from None

    def _admin(self) -> None:
        if User.objects.filter(username=ADMIN).exists():
            return
        given = env.text("ADMIN_PASSWORD", "")
        password = given or secrets.token_urlsafe(15)
        User.objects.create_superuser(ADMIN, password=password)
        if not given:
            self.stdout.write(f"Sign in as {ADMIN} with the password {password}  (shown this once)")

    def _demo(self, urls: Sequence[str]) -> None:
        """A pool under ``round_robin``, so that an operator sees what a better policy changes."""
        pool = Pool.objects.filter(name=POOL).first() or create_pool(
            POOL, description="Where every model is served.", strategy="round_robin"
        )
        for url in urls:
            self._replica(pool, url)
        for name, description in DEMO_GROUPS.items():
            if not pool.groups.filter(name=name).exists():
                create_task_group(pool, name, description=description)

    @transaction.atomic
    def _fleet(self, urls: Sequence[str], listed: dict[str, ListedModels | None]) -> None:
        if not Pool.objects.exists() and not any(listed.values()):
            create_pool(POOL)
        for url in urls:
            known = Replica.objects.filter(url=url).select_related("pool").first()
            pool = known.pool if known else _pool_of(listed[url])
            if (found := listed[url]) and _may_be_named(pool):
                pool = update_pool(pool, **_settings(found))
            if not known:
                self._replica(pool, url)
            if not pool.models:
                self.stdout.write(f"Replica {url} lists no models yet: pool {pool.name} takes any model name.")

    def _replica(self, pool: Pool, url: str) -> None:
        if Replica.objects.filter(url=url).exists():
            return
        where = urlsplit(url)
        address = f"{where.hostname}-{where.port or where.scheme}{where.path}"
        taken = set(Replica.objects.values_list("name", flat=True))
        add_replica(pool, name=_replica_name(address, taken), url=url)
        self.stdout.write(f"Added replica {url}")


def _pool_of(found: ListedModels | None) -> Pool:
    """The pool that a new replica belongs to: one that serves a model of its, or the default one; else a new one."""
    if found and (sharing := Pool.objects.filter(models__overlap=list(found.models)).first()):
        return sharing
    default = Pool.objects.filter(name=POOL).first()
    if default and (found is None or not default.models):
        return default
    if found is None:
        return create_pool(POOL)
    taken = set(Pool.objects.values_list("name", flat=True))
    return create_pool(_pool_name(found.models[0], taken) if default else POOL, **_settings(found))


def _may_be_named(pool: Pool) -> bool:
    """Whether the names of its models are not known yet and nobody decided about them."""
    return not pool.models and not Event.objects.filter(pool=pool, kind=EventKind.POOL_CHANGED).exists()


def _settings(found: ListedModels) -> Any:
    """The arguments that give a pool these names."""
    return {"models": found.models, "adapters": msgspec.to_builtins(found.adapters)}


def _replica_name(text: str, taken: Collection[str]) -> str:
    """``gpu-1-8000`` for ``gpu-1:8000``, with a number behind it where that is taken."""
    base = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:55].strip("-._")
    return _free_name(base or "replica", taken)


def _pool_name(model: str, taken: Collection[str]) -> str:
    """``qwen3-8b`` for ``Qwen/Qwen3-8B``, with a number behind it where that is taken."""
    base = re.sub(r"[^a-z0-9_-]+", "-", model.rpartition("/")[2].lower()).strip("-_")[:26].strip("-_")
    return _free_name(base or "pool", taken)


def _free_name(base: str, taken: Collection[str]) -> str:
    names = (base, *(f"{base}-{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)
