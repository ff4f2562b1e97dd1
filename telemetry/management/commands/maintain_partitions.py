"""``manage.py maintain_partitions``: runs the hourly maintenance of partitions now."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandParser
from django.utils import timezone

from telemetry.storage.partitions import DAYS_AHEAD, maintain


class Command(BaseCommand):
    help = "Create the daily tables of readings and decisions for the days ahead and drop those beyond their retention."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--days-ahead", type=int, default=DAYS_AHEAD, help="days after today to create tables for")
        parser.add_argument(
            "--retention-days",
            type=int,
            default=settings.READINGS_RETENTION_DAYS,
            help="days of readings to keep (WARMPATH_READINGS_RETENTION_DAYS)",
        )
        parser.add_argument(
            "--decisions-h",
            type=int,
            default=settings.DECISIONS_RETENTION_H,
            help="hours of decisions to keep (WARMPATH_DECISIONS_RETENTION_H)",
        )

    def handle(self, *_: Any, **options: Any) -> None:
        result = maintain(
            timezone.now(),
            retention_days=options["retention_days"],
            decisions_h=options["decisions_h"],
            rollup_days=settings.ROLLUP_RETENTION_DAYS,
            days_ahead=options["days_ahead"],
        )
        self.stdout.write(f"{len(result.created)} tables created, {len(result.dropped)} dropped.")
