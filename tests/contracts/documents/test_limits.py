"""Every limit has a documented unit, range, default and reason."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from msgspec.inspect import EnumType, FloatType, IntType, Metadata, NoneType, StrType, UnionType, VarTupleType

import routing.schema
from routing.schema import BreakerConfig, ConcurrencyConfig, Disaggregation, Frozen, HealthCheck, Limits, WarmUp

TEXT = (Path(routing.schema.__file__).parent / "limits.md").read_text()
SECTIONS = {
    "limits": Limits,
    "breaker": BreakerConfig,
    "health": HealthCheck,
    "concurrency": ConcurrencyConfig,
    "warm_up": WarmUp,
    "disaggregation": Disaggregation,
}


def rows(section: str) -> dict[str, list[str]]:
    """Cells of a section's table, by the setting in its first column."""
    part = re.split(r"^##+ ", TEXT.partition(f"\n## `{section}`\n")[2], maxsplit=1, flags=re.MULTILINE)[0]
    lines = (line for line in part.splitlines() if line.startswith("| `"))
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name.strip("`"): rest for name, *rest in cells}


def described(field: msgspec.inspect.Field) -> list[str]:
    """Unit, range and default of a field, in the document's format."""
    kinds = field.type.types if isinstance(field.type, UnionType) else [field.type]
    [kind] = [kind for kind in kinds if not isinstance(kind, NoneType)]
    default = "-" if field.default is msgspec.NODEFAULT else str(field.default)
    if isinstance(kind, Metadata) and isinstance(kind.type, VarTupleType):
        assert kind.extra_json_schema["description"].endswith(".")
        return ["failures", f"{kind.type.min_length} to {kind.type.max_length}", ", ".join(field.default)]
    if isinstance(kind, Metadata):
        assert kind.extra_json_schema["description"].endswith(".")
        if isinstance(kind.type, StrType | EnumType):
            return ["-", "-", default]
        unit, kind = kind.extra["unit"], kind.type
        assert isinstance(kind, IntType | FloatType)
        minimum = kind.ge if kind.ge is not None else kind.gt
        return [unit, f"{minimum:.12g} to {kind.le:.13g}", default]
    assert isinstance(kind, StrType)
    return ["-", "-", default]


@pytest.mark.parametrize(("section", "kind"), SECTIONS.items())
def test_every_setting_is_documented_as_in_the_schema(section: str, kind: type[Frozen]) -> None:
    table = rows(section)
    fields = {field.name: described(field) for field in msgspec.inspect.type_info(kind).fields}

    assert {name: cells[:3] for name, cells in table.items()} == fields
    assert all(len(cells) == 4 and cells[3] for cells in table.values())
