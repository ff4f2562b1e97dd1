"""``manage.py write_openapi``: the committed OpenAPI document, made anew from the views."""

import json
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from controlplane.api.schema import document


class Command(BaseCommand):
    """Write ``controlplane/api/openapi.json``."""

    help = "Writes controlplane/api/openapi.json anew from the views."

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ARG002 - the signature is Django's
        """Make it, and say where it is."""
        path = settings.ROOT / "controlplane/api/openapi.json"
        path.write_text(json.dumps(document(), indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
        self.stdout.write(str(path))
