"""Parts of the routers' schema that rows store: validation, and metadata for forms and documents. No queries.

Ranges, defaults, units and help come from the schema's annotations. A row stores such a part as JSON with every
default written out, so that a release which changes a default does not change the running configuration.
``None`` means "not set: the routers' own default".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from controlplane.errors import Fault, InvalidError
from routing.schema import (
    ApiKey,
    GroupMatch,
    PoolConfig,
    ReplicaConfig,
    RouterConfig,
    TaskGroupConfig,
    explain_reason,
)

_REASON = re.compile(r"(?P<reason>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_MAX_REASON = 200  # characters; msgspec quotes unknown names, however long


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting, for forms and documentation."""

    field: str
    kind: str  # number, integer, choice, text, json; "texts": a list of texts, "pairs": of structs of two texts
    unit: str  # "" for a choice and a text
    low: float | None  # inclusive; None: unbounded; for a text, of its length
    high: float | None
    choices: tuple[str, ...]
    default: Any
    help: str
    nullable: bool = False  # whether null is a value, most often "no limit"
    required: bool = False  # whether it has no default


@cache
def settings_of(struct: type[msgspec.Struct]) -> tuple[SettingInfo, ...]:
    """Every field of a struct of the schema, in order. TypeError for a type of field that forms do not support."""
    return tuple(_setting(field) for field in _fields(struct))


def setting_of(struct: type[msgspec.Struct], field: str) -> SettingInfo:
    """One field of a struct whose other fields forms may not support."""
    return next(_setting(member) for member in _fields(struct) if member.name == field)


def kinds_of(struct: type[msgspec.Struct], *fields: str) -> dict[str, Any]:
    """The annotated types of some fields of a struct, for ``canonical``."""
    types = {field.name: field.type for field in msgspec.structs.fields(struct)}
    return {name: types[name] for name in fields}


def canonical(kind: Any, value: Any, path: str) -> Any:
    """A value of a schema type as JSON, every default written out; None stays None. InvalidError within ``path``."""
    if value is None:
        return None
    try:
        decoded = msgspec.json.decode(json.dumps(value, allow_nan=False).encode(), type=kind)
    except msgspec.DecodeError as error:
        match = _REASON.fullmatch(str(error))
        reason, inner_path = (match["reason"], match["path"] or "") if match else (str(error), "")
        raise InvalidError(path + inner_path, explain_reason(reason)[:_MAX_REASON]) from None
    except (TypeError, ValueError, RecursionError) as error:  # not representable as JSON
        raise InvalidError(path, str(error)[:_MAX_REASON]) from None
    return json.loads(msgspec.json.encode(decoded))


def canonical_fields(kinds: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with those named in ``kinds`` made canonical. One InvalidError names all faults."""
    result, faults = dict(values), list[Fault]()
    for name in kinds.keys() & values.keys():
        try:
            result[name] = canonical(kinds[name], values[name], f"$.{name}")
        except InvalidError as error:
            faults += error.faults
    if faults:
        raise InvalidError.of(faults)
    return result


def schema_values(kinds: Mapping[str, Any], row: object) -> dict[str, Any]:
    """A row's fields named in ``kinds`` as values of the schema, without those that are None."""
    stored = {name: getattr(row, name) for name in kinds}
    return {name: msgspec.convert(value, kinds[name]) for name, value in stored.items() if value is not None}


def json_schemas(kinds: Iterable[Any], ref_template: str) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """The JSON schema of each type, and of the components that they refer to by ``ref_template`` with ``{name}``."""
    schemas, components = msgspec.json.schema_components(kinds, ref_template=ref_template)
    return tuple(map(_translate_patterns, schemas)), _translate_patterns(components)


def _translate_patterns(schema: Any) -> Any:
    r"""A JSON schema with patterns in JSON Schema's dialect, which has ``$`` where Python has ``\Z``."""
    if isinstance(schema, dict):
        return {
            name: value.replace(r"\Z", "$")
            if name == "pattern" and isinstance(value, str)
            else _translate_patterns(value)
            for name, value in schema.items()
        }
    return [_translate_patterns(item) for item in schema] if isinstance(schema, list) else schema


def _fields(struct: type[msgspec.Struct]) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(struct)
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"{struct} is no struct")
    return info.fields


def _setting(field: inspect.Field) -> SettingInfo:
    unit, text, nullable, kind = _unwrapped(field.type)
    required = field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT
    default = None if field.default is msgspec.NODEFAULT else field.default
    common: dict[str, Any] = {"help": text, "nullable": nullable, "required": required}
    name = field.encode_name
    match kind:
        case inspect.EnumType(cls=cls):
            choices = tuple(str(member.value) for member in cls)
            return SettingInfo(name, "choice", "", None, None, choices, str(default), **common)
        case inspect.StrType():
            return SettingInfo(name, "text", "", kind.min_length, kind.max_length, (), default, **common)
        case inspect.FloatType() | inspect.IntType():
            kind_name = "number" if isinstance(kind, inspect.FloatType) else "integer"
            low = kind.ge if kind.ge is not None else kind.gt
            return SettingInfo(name, kind_name, unit, low, kind.le, (), default, **common)
        case inspect.VarTupleType(item_type=item):
            kind_name = "pairs" if isinstance(_unwrapped(item)[3], inspect.StructType) else "texts"
            return SettingInfo(name, kind_name, "", None, None, (), list(default or ()), **common)
        case inspect.DictType():
            return SettingInfo(name, "json", "", None, None, (), default, **common)
    raise TypeError(f"{field.name}: forms do not support a {type(kind).__name__}")


def _unwrapped(kind: inspect.Type) -> tuple[str, str, bool, inspect.Type]:
    """(unit, description, whether null is allowed, the type without metadata and null)."""
    unit, text, nullable = "", "", False
    while True:
        match kind:
            case inspect.Metadata(type=inner):
                unit = (kind.extra or {}).get("unit", unit)
                text = (kind.extra_json_schema or {}).get("description", text)
                kind = inner
            case inspect.UnionType(types=types) if kind.includes_none:
                nullable = True
                kind = next(member for member in types if not isinstance(member, inspect.NoneType))
            case _:
                return unit, text, nullable, kind


# The parts that each row stores, by the schema's own names and types.
POOL = kinds_of(
    PoolConfig,
    "models",
    "aliases",
    "adapters",
    "adapter_replicas",
    "health",
    "breaker",
    "caps",
    "concurrency",
    "tier1",
    "stream_usage",
    "on_stream_failure",
    "keep_alive_s",
    "warm_up",
    "session_keys",
    "paths",
    "disaggregation",
    "allowed_origins",
)
GROUP = kinds_of(
    TaskGroupConfig,
    "match",
    "tier1",
    "priority",
    "ttft_objective_ms",
    "concurrency",
    "caps",
    "response_cache",
    "semantic_cache",
)
REPLICA = kinds_of(ReplicaConfig, "adapters", "data_parallel_size", "kv_events", "role")
CLIENT_KEY = kinds_of(ApiKey, "models", "groups", "tenant", "requests_per_s", "burst", "tokens_per_min", "queue_weight")
FLEET = kinds_of(RouterConfig, "limits")
API_KEY = kinds_of(ReplicaConfig, "api_key")["api_key"]
TIER1_HASHES = kinds_of(GroupMatch, "tier1_hashes")["tier1_hashes"]
