"""Configurations drawn from the schema itself: every field, those of tomorrow included, in small numbers."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from routing import schema

NAMES = ("a", "b", "c")
KNOWN = {  # patterns that a random text would never meet
    "digest": st.sampled_from(["0" * 64, "1" * 64]),
    "hash_secret": st.sampled_from(["0" * 32, "1" * 32]),
    "api_key": st.sampled_from(["secret-key-1", "secret-key-2"]),
    "url": st.sampled_from(["http://10.0.0.1:8000", "http://10.0.0.2:8000"]),
    "path": st.sampled_from(["/health", "/ping"]),
    "tier1_hashes": st.lists(st.sampled_from(["0" * 16, "1" * 16]), max_size=2, unique=True).map(tuple),
    "retry_on": st.lists(st.sampled_from(schema.RETRY_CAUSES), min_size=1, max_size=2, unique=True).map(tuple),
    "media_hosts": st.none() | st.lists(st.sampled_from(NAMES), max_size=2, unique=True).map(tuple),
}


def drawn(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Values of a struct."""
    return _of(msgspec.inspect.type_info(kind), "")


def _of(kind: Any, field: str) -> st.SearchStrategy[Any]:  # noqa: C901 - a table of types
    if field in KNOWN:
        return KNOWN[field]
    match kind:
        case msgspec.inspect.Metadata():
            return _of(kind.type, field)
        case msgspec.inspect.UnionType():
            return st.one_of([_of(one, field) for one in kind.types])
        case msgspec.inspect.StructType():
            return _struct(kind)
        case msgspec.inspect.VarTupleType():
            return _several(kind.item_type, field)
        case msgspec.inspect.EnumType():
            return st.sampled_from(list(kind.cls))
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            low = _low(kind)
            return st.sampled_from([int(low), int(low) + 1, int(low) + 5])
        case msgspec.inspect.FloatType():
            low = _low(kind)
            high = kind.le if kind.le is not None else low + 3
            return st.sampled_from([low + (high - low) / 4, low + (high - low) / 2, float(high)])
        case msgspec.inspect.StrType():
            return st.sampled_from(NAMES)
    raise TypeError(f"{field}: teach the generator {kind}")


def _low(kind: Any) -> float:
    return kind.ge if kind.ge is not None else kind.gt + 0.25 if kind.gt is not None else 0


def _several(item: Any, field: str) -> st.SearchStrategy[Any]:
    inner = item.type if isinstance(item, msgspec.inspect.Metadata) else item
    if isinstance(inner, msgspec.inspect.StructType) and any(one.name == "name" for one in inner.fields):
        return st.lists(_of(item, ""), max_size=3, unique_by=lambda one: one.name).map(tuple)
    return st.lists(_of(item, ""), max_size=2, unique=True).map(tuple)


def _struct(kind: Any) -> st.SearchStrategy[Any]:
    fields = {one.name: _of(one.type, one.encode_name) for one in kind.fields}
    return st.fixed_dictionaries(fields).map(lambda values: _made(kind.cls, values))


def _made(cls: type[Any], values: dict[str, Any]) -> Any:
    """The struct; where two of its fields do not go together, the one with fewer said."""
    try:
        return cls(**values)
    except ValueError:
        return cls(**{name: value for name, value in values.items() if name in {"boundary_bytes", "reserved"}})


configs = drawn(schema.RouterConfig)
