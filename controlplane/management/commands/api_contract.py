"""``manage.py api_contract``: the REST API's contract in short, and a check that the views keep it.

``controlplane/api/contract.txt`` has a line for each operation (parameters, body, responses) and for each component
(fields with types, or values of an enumeration). ``*`` marks what requests must contain. Clients break if an entry of a
line disappears or a new one has a ``*``; every other addition is compatible.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from drf_spectacular.generators import SchemaGenerator

Contract = Mapping[str, list[str]]  # entries by the operation or component that starts the line
Schema = Mapping[str, Any]


class Command(BaseCommand):
    help = "Write the REST API's contract, controlplane/api/contract.txt; with --check, compare it with the views."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--check", action="store_true", help="write nothing; fail if the views differ")

    def handle(self, *_args: Any, **options: Any) -> None:
        """CommandError with every difference where --check finds any."""
        path = settings.ROOT / "controlplane/api/contract.txt"
        live = contract_of(SchemaGenerator().get_schema(request=None, public=True))  # type: ignore[no-untyped-call]
        if not options["check"]:
            path.write_text("".join(f"{name}: {' '.join(entries)}\n" for name, entries in live.items()))
            return
        lines = (line.partition(": ") for line in path.read_text().splitlines())
        breaking, compatible = differences({name: entries.split() for name, _, entries in lines}, live)
        if breaking:
            advice = "Keep it, or add a migration note to CHANGELOG.md."
            breaking = ["These changes break clients:", *breaking, advice]
        if breaking or compatible:
            raise CommandError(
                "\n".join([*breaking, *compatible, f"To accept: manage.py api_contract, which writes {path}."])
            )


def contract_of(document: Schema) -> Contract:
    """The contract that an OpenAPI document describes."""
    components = document["components"]["schemas"]
    operations, request_components = {}, set[str]()
    for path, methods in sorted(document["paths"].items()):
        for method, operation in sorted(methods.items()):
            body = list(_contents(operation.get("requestBody", {})))
            for schema in body:
                _collect(schema, components, request_components)
            operations[f"{method.upper()} {path}"] = [
                *(
                    f"{'*' * bool(part.get('required'))}{part['in']}={part['name']}"
                    for part in operation.get("parameters", ())
                ),
                *(f"body={_type(schema)}" for schema in body),
                *(
                    f"{status}={'/'.join(map(_type, _contents(response)))}"
                    for status, response in operation["responses"].items()
                    if status.startswith("2")
                ),
            ]
    return operations | {
        name: _entries(components[name], is_request=name in request_components) for name in sorted(components)
    }


def differences(before: Contract, after: Contract) -> tuple[list[str], list[str]]:
    """(changes that break clients, other changes), each as ``NAME: CHANGE``."""
    breaking, compatible = list[str](), list[str]()
    for name in sorted({**before, **after}):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            is_operation_removed = new is None and " " in name  # operations name the components that are in use
            (breaking if is_operation_removed else compatible).append(
                f"{name}: {'removed' if new is None else 'added'}"
            )
            continue
        breaking += [f"{name}: {entry} removed" for entry in old if entry not in new]
        for entry in new:
            if entry not in old:
                (breaking if entry.startswith("*") else compatible).append(f"{name}: {entry} added")
    return breaking, compatible


def _contents(message: Schema) -> Iterator[Schema]:
    return (content["schema"] for content in message.get("content", {}).values())


def _entries(schema: Schema, *, is_request: bool) -> list[str]:
    required = schema.get("required", ()) if is_request else ()
    fields = [f"{'*' * (name in required)}{name}={_type(part)}" for name, part in schema.get("properties", {}).items()]
    return sorted([*fields, *(json.dumps(value) for value in schema.get("enum", ()))]) or [_type(schema)]


def _type(schema: Schema) -> str:
    """A type in short, such as ``string|null`` or ``Pool[]``."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return "|".join(sorted({_type(branch) for branch in schema[key]}))
    if schema.get("type") == "array":
        return f"{_type(schema.get('items', {}))}[]"
    kinds = schema.get("type", "any")
    return "|".join(sorted(kinds)) if isinstance(kinds, list) else str(kinds)


def _collect(schema: Any, components: Mapping[str, Any], names: set[str]) -> None:
    """Add the names of components that a schema refers to, directly or indirectly."""
    if isinstance(schema, list):
        for item in schema:
            _collect(item, components, names)
    elif isinstance(schema, dict):
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        if name and name not in names:
            names.add(name)
            _collect(components[name], components, names)
        for value in schema.values():
            _collect(value, components, names)
