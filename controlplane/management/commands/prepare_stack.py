"""``manage.py prepare_stack``: migrate the local stack's database, seed its fleet, collect static files. Idempotent."""

from argparse import ArgumentParser
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand


class Command(BaseCommand):
    """One process for all, because starting Django takes longer than each."""

    help = "Apply migrations, seed the fleet and collect the static files of the local stack."
    requires_system_checks = ()  # they take longer than the rest; `make check` runs them

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--replica", action="append", default=[], metavar="URL", help="base URL of a replica")
        parser.add_argument("--demo", action="store_true", help="the replicas are stand-ins")

    def handle(self, *_arguments: Any, **options: Any) -> None:
        call_command("migrate", interactive=False, verbosity=0)
        call_command("maintain_partitions")
        call_command("seed_fleet", replica=options["replica"], demo=options["demo"])
        call_command("collectstatic", clear=True, interactive=False, verbosity=0)
