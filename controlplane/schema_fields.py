"""Parts of the routers' schema that a row keeps: described for forms and documents, and checked.

Nothing about a setting is written here twice: ranges, defaults, units and help all come from the schema's own
annotations. A row keeps such a part as JSON with every default written out, so that a release which changes a default
does not change what runs; ``None`` stays None, for "not set: as the routers do by themselves". Pure: no query.

Which parts of the routers' schema each row keeps, under the schema's own names and by its types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect as described

from controlplane.errors import Fault, InvalidError
from routing.schema import ApiKey, GroupMatch, PoolConfig, ReplicaConfig, RouterConfig, TaskGroupConfig

_REASON = re.compile(r"(?P<reason>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_MAX_REASON = 200  # characters; msgspec quotes a name that nobody knows, however long it is


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting, as a form or a page of documentation shows it."""

    field: str
    kind: str  # "number", "integer", "choice", "text"; "texts" a list of them, "pairs" one of structs of two texts
    unit: str  # "" for a choice and a text
    low: float | None  # both included; None: open; of a text's length
    high: float | None
    choices: tuple[str, ...]
    default: Any
    help: str
    nullable: bool = False  # whether null is a value, most often "no limit"
    required: bool = False  # whether it has no default


@cache
def settings_of(struct: type[msgspec.Struct]) -> tuple[SettingInfo, ...]:
    """Every field of a struct of the schema, in its order; TypeError for a kind of field that nobody thought of."""
    found = described.type_info(struct)
    if not isinstance(found, described.StructType):
        raise TypeError(f"{struct} is no struct")
    return tuple(_setting(field) for field in found.fields)


def setting_of(struct: type[msgspec.Struct], field: str) -> SettingInfo:
    """One field of a struct that may have others of which no form knows."""
    found = described.type_info(struct)
    if not isinstance(found, described.StructType):
        raise TypeError(f"{struct} is no struct")
    return next(_setting(one) for one in found.fields if one.name == field)


def kinds_of(struct: type[msgspec.Struct], *fields: str) -> dict[str, Any]:
    """The annotated types of some fields of a struct, for ``canonical``."""
    known = {field.name: field.type for field in msgspec.structs.fields(struct)}
    return {name: known[name] for name in fields}


def canonical(kind: Any, value: Any, path: str) -> Any:
    """A value of a type of the schema as JSON, every default written out; InvalidError below ``path``. None stays."""
    if value is None:
        return None
    try:
        read = msgspec.json.decode(json.dumps(value, allow_nan=False).encode(), type=kind)
    except msgspec.DecodeError as error:
        raise InvalidError(*_said(str(error), path)) from None
    except (TypeError, ValueError, RecursionError) as error:  # nothing that JSON can say
        raise InvalidError(path, str(error)[:_MAX_REASON]) from None
    return json.loads(msgspec.json.encode(read))


def checked(kinds: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with those that ``kinds`` knows made canonical; one InvalidError that names everything wrong."""
    done, faults = dict(values), list[Fault]()
    for name in kinds.keys() & values.keys():
        try:
            done[name] = canonical(kinds[name], values[name], f"$.{name}")
        except InvalidError as error:
            faults += error.faults
    if faults:
        raise InvalidError.of(faults)
    return done


def revived(kinds: Mapping[str, Any], row: object) -> dict[str, Any]:
    """What a row holds of ``kinds``, as the schema's own values; what is None there is left to the schema's default."""
    held = {name: getattr(row, name) for name in kinds}
    return {name: msgspec.convert(value, kinds[name]) for name, value in held.items() if value is not None}


def json_schemas(kinds: Iterable[Any], ref_template: str) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """The JSON schema of each type, and of what these refer to by ``ref_template`` (it holds ``{name}``)."""
    schemas, components = msgspec.json.schema_components(kinds, ref_template=ref_template)
    return tuple(map(_published, schemas)), _published(components)


def _published(schema: Any) -> Any:
    r"""A JSON schema with patterns in its own language, which says ``$`` where Python says ``\Z``."""
    if isinstance(schema, dict):
        return {
            name: it.replace(r"\Z", "$") if name == "pattern" and isinstance(it, str) else _published(it)
            for name, it in schema.items()
        }
    return [_published(it) for it in schema] if isinstance(schema, list) else schema


def _said(text: str, path: str) -> tuple[str, str]:
    """Where and what: msgspec puts both into one sentence."""
    match = _REASON.fullmatch(text)
    reason, below = (match["reason"], match["path"]) if match else (text, "")
    return path + (below or ""), reason[:_MAX_REASON]


def _setting(field: described.Field) -> SettingInfo:
    unit, text, nullable, kind = _unwrapped(field.type)
    required = field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
    default = None if field.default is msgspec.NODEFAULT else field.default
    common: dict[str, Any] = {"help": text, "nullable": nullable, "required": required}
    name = field.encode_name
    match kind:
        case described.EnumType(cls=cls):
            choices = tuple(str(member.value) for member in cls)
            return SettingInfo(name, "choice", "", None, None, choices, str(default), **common)
        case described.StrType():
            return SettingInfo(name, "text", "", kind.min_length, kind.max_length, (), default, **common)
        case described.FloatType() | described.IntType():
            word = "number" if isinstance(kind, described.FloatType) else "integer"
            low = kind.ge if kind.ge is not None else kind.gt
            return SettingInfo(name, word, unit, low, kind.le, (), default, **common)
        case described.VarTupleType(item_type=item):
            word = "pairs" if isinstance(_unwrapped(item)[3], described.StructType) else "texts"
            return SettingInfo(name, word, "", None, None, (), list(default or ()), **common)
    raise TypeError(f"{field.name}: no form knows a {type(kind).__name__}; teach it this one")


def _unwrapped(kind: described.Type) -> tuple[str, str, bool, described.Type]:
    """(unit, description, whether it may be null, what is inside)."""
    unit, text, nullable = "", "", False
    while True:
        match kind:
            case described.Metadata(type=inner):
                unit = (kind.extra or {}).get("unit", unit)
                text = (kind.extra_json_schema or {}).get("description", text)
                kind = inner
            case described.UnionType(types=types) if kind.includes_none:
                nullable = True
                kind = next(one for one in types if not isinstance(one, described.NoneType))
            case _:
                return unit, text, nullable, kind


POOL = kinds_of(
    PoolConfig,
    "models",
    "aliases",
    "adapters",
    "health",
    "breaker",
    "caps",
    "concurrency",
    "tier1",
    "share_half_life",
    "stream_usage",
    "warm_up",
)
GROUP = kinds_of(TaskGroupConfig, "match", "tier1", "auto_replicas", "priority", "concurrency", "caps")
REPLICA = kinds_of(ReplicaConfig, "adapters", "data_parallel_size")
CLIENT_KEY = kinds_of(ApiKey, "models", "groups", "tenant", "requests_per_s", "burst", "tokens_per_min")
FLEET = kinds_of(RouterConfig, "limits")
API_KEY = kinds_of(ReplicaConfig, "api_key")["api_key"]
TIER1_HASHES = kinds_of(GroupMatch, "tier1_hashes")["tier1_hashes"]
