"""``manage.py seed_fleet``: what a new installation starts with."""

from __future__ import annotations

import re
import secrets
from typing import Any
from urllib.parse import urlsplit

from django.contrib.auth.models import User
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from controlplane.errors import ControlPlaneError
from controlplane.models import Pool, Replica
from controlplane.services.fleet.pools import create_pool
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.fleet.task_groups import create_task_group
from controlplane.settings import env

ADMIN = "admin"
POOL = "default"
GROUPS = {
    "chat": "Conversations with people.",
    "coding-assistant": "A coding assistant with a long list of tools.",
    "retrieval": "Questions over shared documents.",
    "batch-summaries": "Summaries made in bulk.",
}


class Command(BaseCommand):
    """Add what is missing, change and remove nothing; to run it again is harmless."""

    help = "Create the admin user, the pool 'default', its task groups and the given replicas, where missing."

    def add_arguments(self, parser: CommandParser) -> None:
        """The replicas to add."""
        parser.add_argument(
            "--replica", metavar="URL", nargs="+", action="extend", default=[], help="base URLs of replicas to add"
        )

    @transaction.atomic
    def handle(self, *_args: Any, **options: Any) -> None:
        """Seed; CommandError for a URL that no replica can have."""
        self._admin()
        try:
            pool = Pool.objects.filter(name=POOL).first() or create_pool(
                POOL, description="Where every model is served.", strategy="round_robin"
            )  # so that whoever looks sees what a better policy changes
            for url in options["replica"]:
                self._replica(pool, url.rstrip("/"))
            for name, description in GROUPS.items():
                if not pool.groups.filter(name=name).exists():
                    create_task_group(pool, name, description=description)
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

    def _replica(self, pool: Pool, url: str) -> None:
        if Replica.objects.filter(url=url).exists():
            return
        add_replica(pool, name=_free_name(url), url=url)
        self.stdout.write(f"Added replica {url}")


def _free_name(url: str) -> str:
    """``gpu-1-8000`` for ``http://gpu-1:8000``, with a number behind it where that is taken."""
    where = urlsplit(url)
    base = re.sub(r"[^a-z0-9._-]+", "-", f"{where.hostname}-{where.port or where.scheme}{where.path}".lower())
    base = base.strip("-._")[:55].strip("-._") or "replica"
    taken = set(Replica.objects.filter(name__startswith=base).values_list("name", flat=True))
    names = (base, *(f"{base}-{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)
