"""``manage.py seed_fleet``: create the admin user, replicas and pools of a new installation, where missing."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
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
    """Idempotent: changes and removes nothing.

    Replicas that list the same model share a pool; the first pool is called ``default``. The pool accepts any model
    while no replica lists one, and gets the names in a later run unless somebody changed the pool meanwhile.
    """

    help = "Create the admin user, the given replicas and pools of the models that they list, where missing."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--replica", metavar="URL", nargs="+", action="extend", default=[], help="base URLs of replicas to add"
        )
        parser.add_argument(
            "--demo",
            action="store_true",
            help="the replicas are stand-ins: one pool for any model, with the demo's task groups",
        )

    def handle(self, *_args: Any, **options: Any) -> None:
        """CommandError for an invalid replica URL."""
        urls = [url.rstrip("/") for url in options["replica"]]
        admin, shown = self._new_admin()
        try:
            with transaction.atomic():
                if admin is not None:
                    admin.save()
                if options["demo"]:
                    self._demo(urls)
            if shown:
                self.stdout.write(f"Sign in as {ADMIN} with the password {shown}  (shown this once)")
            if not options["demo"]:
                self._fleet(urls, listed_models(urls))
        except ControlPlaneError as error:
            raise CommandError(str(error)) from None

    def _new_admin(self) -> tuple[User | None, str]:
        """The admin user if there is none yet, not saved, and a password to show, or "".

        To be called outside of a transaction: hashing a password takes seconds on a busy machine.
        """
        if User.objects.filter(username=ADMIN).exists():
            return None, ""
        configured = env.text("ADMIN_PASSWORD", "")
        password = configured or secrets.token_urlsafe(15)
        admin = User(username=ADMIN, is_staff=True, is_superuser=True)
        admin.set_password(password)
        return admin, "" if configured else password

    def _demo(self, urls: Sequence[str]) -> None:
        """One pool under a new pool's strategy, so that a bad change is a drop two minutes after the start."""
        pool = Pool.objects.filter(name=POOL).first() or create_pool(POOL, description="Where every model is served.")
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
            existing = Replica.objects.filter(url=url).select_related("pool").first()
            models = listed[url]
            pool = existing.pool if existing else _pool_for(models)
            if models and _lacks_models(pool):
                pool = update_pool(pool, **_model_settings(models))
            if not existing:
                self._replica(pool, url)
            if not pool.models:
                self.stdout.write(f"Replica {url} lists no models yet: pool {pool.name} takes any model name.")

    def _replica(self, pool: Pool, url: str) -> None:
        if Replica.objects.filter(url=url).exists():
            return
        parts = urlsplit(url)
        address = f"{parts.hostname}-{parts.port or parts.scheme}{parts.path}"
        add_replica(pool, name=_free_name(Replica, address, r"[^a-z0-9._-]+", "-._", 55, "replica"), url=url)
        self.stdout.write(f"Added replica {url}")


def _pool_for(models: ListedModels | None) -> Pool:
    """The pool of a new replica: one that serves its models, else the default pool, else a new one."""
    if models and (serving_pool := Pool.objects.filter(models__overlap=list(models.models)).first()):
        return serving_pool
    default = Pool.objects.filter(name=POOL).first()
    if default and (models is None or not default.models):
        return default
    if models is None:
        return create_pool(POOL)
    model = models.models[0].rpartition("/")[2]
    name = _free_name(Pool, model, r"[^a-z0-9_-]+", "-_", 26, "pool") if default else POOL
    return create_pool(name, **_model_settings(models))


def _lacks_models(pool: Pool) -> bool:
    """Whether the pool's models are unknown and nobody changed the pool."""
    return not pool.models and not Event.objects.filter(pool=pool, kind=EventKind.POOL_CHANGED).exists()


def _model_settings(models: ListedModels) -> Any:
    return {"models": models.models, "adapters": msgspec.to_builtins(models.adapters)}


def _free_name(
    model: type[Pool | Replica], text: str, invalid: str, separators: str, max_length: int, default: str
) -> str:
    """An unused name from a text, such as ``gpu-1-8000`` or ``qwen3-8b``; a number is appended if it is taken."""
    base = re.sub(invalid, "-", text.lower()).strip(separators)[:max_length].strip(separators) or default
    taken = set(model._default_manager.values_list("name", flat=True))  # noqa: SLF001 - Django's name
    names = (base, *(f"{base}-{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)
