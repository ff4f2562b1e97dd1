"""``manage.py write_openapi``: the committed OpenAPI document, made anew from the views."""

import json
import re
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.api.compatibility import breaking_changes
from controlplane.api.schema import document


class Command(BaseCommand):
    """Write ``controlplane/api/openapi.json``, unless that would break scripts that nobody warned."""

    help = "Writes controlplane/api/openapi.json anew from the views."

    def add_arguments(self, parser: CommandParser) -> None:
        """Whether it is only compared, and whether it may break scripts."""
        parser.add_argument("--check", action="store_true", help="write nothing; fail where something would change")
        parser.add_argument(
            "--breaking", action="store_true", help="write it although scripts break, as CHANGELOG.md tells operators"
        )

    def handle(self, *args: Any, **options: Any) -> None:  # noqa: ARG002 - the signature is Django's
        """Make it, and say where it is; CommandError with every break."""
        path = settings.ROOT / "controlplane/api/openapi.json"
        present = path.read_text("utf-8")
        made = json.dumps(document(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
        broken = breaking_changes(json.loads(present), json.loads(made)) if made != present else []
        if broken and (options["check"] or not options["breaking"]):
            advice = "Deprecate it first (controlplane/api/deprecations.py); or tell operators, and say --breaking."
            raise CommandError("\n".join(["Scripts would break:", *broken, advice]))
        if options["check"]:
            if made != present:
                raise CommandError(f"{path} is not what the views say: run write_openapi, and look at what it changes.")
            return
        if untold := _untold(broken, settings.ROOT / "CHANGELOG.md"):
            raise CommandError(f"CHANGELOG.md has no migration note that names {untold} below its newest heading.")
        path.write_text(made, encoding="utf-8")
        self.stdout.write(str(path))


def _untold(broken: list[str], changelog: Path) -> str:
    """The nouns of broken addresses that no migration note of the next release names."""
    _, newest, *_ = re.split(r"^## ", changelog.read_text("utf-8"), flags=re.MULTILINE)
    notes = [entry for entry in re.split(r"^- ", newest, flags=re.MULTILINE) if "Migration" in entry]
    nouns = {line.partition("/api/v1/")[2].partition(":")[0].partition("/")[0] for line in broken}
    return ", ".join(f"`{noun}`" for noun in sorted(nouns) if not any(f"`{noun}" in note for note in notes))
