"""Every strategy and each of its settings is documented, with the unit, range and default of the schema."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

import routing.balancing.strategies
from routing.balancing.strategies.registry import STRATEGIES
from routing.schema import LowestCostSettings, PolicySettings, Settings, load_settings

FOLDER = Path(routing.balancing.strategies.__file__).parent
ROOT = Path(__file__).parents[3]
SECTIONS = ["What it does", "When to use it", "Settings", "What it costs"]
every_strategy = pytest.mark.parametrize("settings", get_args(Settings), ids=lambda settings: settings.name)


def documentation(settings: type[Settings]) -> str:
    path = FOLDER / f"{settings.name}.md"
    assert path.exists(), f"{path.relative_to(ROOT)}, with the sections {SECTIONS}"
    return path.read_text()


def rows(text: str) -> dict[str, list[str]]:
    """Table rows that begin with a `name` in code, by that name."""
    cells = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")
    )
    return {name.strip("`"): rest for name, *rest in cells}


def described(field: msgspec.inspect.Field) -> tuple[str, str, str]:
    """Unit, range and default of a field, in the document's format."""
    kind, unit = field.type, "-"
    if isinstance(kind, msgspec.inspect.Metadata):
        unit = (kind.extra or {}).get("unit", "-")
        kind = kind.type
    if isinstance(kind, msgspec.inspect.EnumType):
        return unit, ", ".join(f"`{member}`" for member in kind.cls), f"`{field.default}`"
    if isinstance(kind, msgspec.inspect.StrType):
        return unit, f"up to {kind.max_length} characters", field.default or "-"
    return unit, f"{kind.ge:g} to {kind.le}".removesuffix(".0"), str(field.default)


def leaves(kind: type) -> set[type]:
    """The classes derived from one, without those that others derive from."""
    return set().union(*(leaves(derived) for derived in kind.__subclasses__())) or {kind}


def test_every_settings_type_has_its_strategy() -> None:
    assert set(get_args(Settings)) == leaves(PolicySettings), "a member of Settings in routing/schema/strategies.py"
    assert set(STRATEGIES) == set(get_args(Settings)), "a row of STRATEGIES in routing/balancing/strategies/registry.py"


def test_no_other_part_names_a_strategy() -> None:
    """What other parts need to know of a strategy is an attribute of its settings or a method of its class."""
    names = {settings.__name__ for settings in get_args(Settings)} - {LowestCostSettings.__name__}  # the default
    used = re.compile(rf"\b({'|'.join(sorted(names))})\b")
    schema = {ROOT / "routing/schema/strategies.py", ROOT / "routing/schema/__init__.py"}
    modules = {path for package in ("routing", "controlplane", "telemetry") for path in (ROOT / package).rglob("*.py")}

    assert len(modules) > 300
    assert [str(path) for path in modules - schema if path.parent != FOLDER and used.search(path.read_text())] == []


@every_strategy
def test_every_strategy_has_its_document(settings: type[Settings]) -> None:
    assert re.findall(r"^## (.+)$", documentation(settings), re.MULTILINE) == SECTIONS
    assert f"]({settings.name}.md)" in (FOLDER / "README.md").read_text(), "a row of the table in the folder's README"


@every_strategy
def test_every_setting_is_documented_as_in_the_schema(settings: type[Settings]) -> None:
    table = rows(documentation(settings).partition("\n## Settings\n")[2])
    fields = {field.name: described(field) for field in msgspec.inspect.type_info(settings).fields}

    assert {name: tuple(cells[:3]) for name, cells in table.items()} == fields
    assert all(len(cells) == 4 and cells[3] for cells in table.values())


@every_strategy
def test_every_example_is_a_valid_policy(settings: type[Settings]) -> None:
    examples = re.findall(r"```json\n(.*?)```", documentation(settings), re.DOTALL)

    assert examples
    assert all(type(load_settings(example.encode())) is settings for example in examples)
