"""``manage.py prepare_stack``: bring the database up to date and see that there is a fleet in it."""

from argparse import ArgumentParser
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand


class Command(BaseCommand):
    """Migrate, then seed; idempotent, so that every start of the local stack may run it."""

    help = "Apply migrations and seed the fleet of the local stack."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Replicas to add when they are missing."""
        parser.add_argument("--replica", action="append", default=[], metavar="URL", help="base URL of a replica")
        parser.add_argument("--demo", action="store_true", help="the replicas are stand-ins")

    def handle(self, *_arguments: Any, **options: Any) -> None:
        """One process for both, because starting Django costs more than either."""
        call_command("migrate", interactive=False, verbosity=0)
        call_command("maintain_partitions")
        replicas = [word for url in options["replica"] for word in ("--replica", url)]
        call_command("seed_fleet", *replicas, *(["--demo"] if options["demo"] else []))
