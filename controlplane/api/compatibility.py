"""Which changes of the OpenAPI document break scripts that were written for the one before. Pure.

Theory of operation. What a script sends must still be taken: whatever the former schema of a parameter or a body
allows, the new one has to allow. What a script reads must still be there: every field of the former answer stands in
the new one, with no type that it could not have had. Scripts are asked to pass over fields and words that they do not
know (README.md), so further ones break nothing, nor do other lengths and ranges of what is answered.

A schema is compared as its variants: one plain schema for each type and each branch that it may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
Document = Mapping[str, Any]

METHODS = ("get", "put", "post", "patch", "delete")
_LEAST = ("minimum", "exclusiveMinimum", "minLength", "minItems")
_MOST = ("maximum", "exclusiveMaximum", "maxLength", "maxItems")
_FORMS = frozenset({"date", "date-time", "uuid", "uri", "email"})  # others say how wide a number is
_NAMES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}


def breaking_changes(before: Document, after: Document) -> list[str]:
    """What scripts for ``before`` would trip over, each as ``METHOD address: what``, sorted; [] where nothing."""
    former, new = dict(_operations(before)), dict(_operations(after))
    found = {f"{name}: it is gone" for name in former.keys() - new.keys()}
    comparison = _Comparison(before, after)
    for name in former.keys() & new.keys():
        found |= {f"{name}: {what}" for what in comparison.operation(former[name], new[name])}
    return sorted(found)


def _operations(document: Document) -> Iterator[tuple[str, Schema]]:
    for path, methods in document.get("paths", {}).items():
        for method in METHODS:
            if method in methods:
                yield f"{method.upper()} {path}", methods[method]


class _Comparison:
    """Two documents side by side; components are compared once."""

    def __init__(self, before: Document, after: Document) -> None:
        self._before, self._after = before, after
        self._known: dict[tuple[str, str, str], list[str]] = {}

    def operation(self, old: Schema, new: Schema) -> Iterator[str]:
        yield from self._parameters(old, new)
        yield from self._bodies(old.get("requestBody"), new.get("requestBody"))
        for status, answer in old.get("responses", {}).items():
            if status.startswith("2"):
                yield from self._answers(status, answer, new.get("responses", {}).get(status))
        for scheme in old.get("security", ()):
            if scheme not in new.get("security", ()):
                yield f"nobody signs in by {', '.join(scheme) or 'nothing'} any more"

    def _parameters(self, old: Schema, new: Schema) -> Iterator[str]:
        had, has = ({(one["in"], one["name"]): one for one in each.get("parameters", ())} for each in (old, new))
        for key, one in has.items():
            if one.get("required") and not had.get(key, {}).get("required"):
                yield f"needs the parameter {key[1]}"
        for key, one in had.items():
            if key not in has:
                yield f"takes no parameter {key[1]} any more"
            else:
                reasons = self.narrowed(one.get("schema", {}), has[key].get("schema", {}))
                yield from (_at(f"the parameter {key[1]}", reason) for reason in reasons)

    def _bodies(self, old: Schema | None, new: Schema | None) -> Iterator[str]:
        if new is None:
            if old is not None:
                yield "takes no body any more"
            return
        if new.get("required") and not (old or {}).get("required"):
            yield "needs a body"
        for kind, content in (old or {}).get("content", {}).items():
            if kind not in new.get("content", {}):
                yield f"takes no {kind} any more"
            else:
                reasons = self.narrowed(content.get("schema", {}), new["content"][kind].get("schema", {}))
                yield from (_at("the body", reason) for reason in reasons)

    def _answers(self, status: str, old: Schema, new: Schema | None) -> Iterator[str]:
        if new is None:
            yield f"does not answer {status} any more"
            return
        for kind, content in old.get("content", {}).items():
            if kind not in new.get("content", {}):
                yield f"does not answer {kind} any more"
            else:
                reasons = self.lost(content.get("schema", {}), new["content"][kind].get("schema", {}))
                yield from (_at("the answer", reason) for reason in reasons)

    def narrowed(self, old: Schema, new: Schema) -> list[str]:
        """Why something that ``old`` takes is not taken by ``new``."""

        def compare() -> list[str]:
            taken = list(_variants(new, self._after))
            return [
                why for one in _variants(old, self._before) for why in _best(self._refused(one, as_) for as_ in taken)
            ]

        return self._once("narrowed", old, new, compare)

    def lost(self, old: Schema, new: Schema) -> list[str]:
        """Why something that ``new`` answers is not what ``old`` promised."""

        def compare() -> list[str]:
            promised = list(_variants(old, self._before))
            return [
                why for one in _variants(new, self._after) for why in _best(self._missing(as_, one) for as_ in promised)
            ]

        return self._once("lost", old, new, compare)

    def _once(self, what: str, old: Schema, new: Schema, compare: Callable[[], list[str]]) -> list[str]:
        """What was found out about two components before; nothing yet where one is inside itself."""
        if "$ref" not in old or "$ref" not in new:
            return compare()
        key = (what, old["$ref"], new["$ref"])
        if key not in self._known:
            self._known[key] = []
            self._known[key] = compare()
        return self._known[key]

    def _refused(self, old: Schema, new: Schema) -> list[str]:
        """Why one variant does not take all that another takes."""
        if new.get("type") not in {None, old.get("type")} and (old.get("type"), new["type"]) != ("integer", "number"):
            return [f"takes no {old.get('type', 'value of every kind')} any more"]
        reasons = list(_narrower(old, new))
        reasons += [f"needs {name}" for name in new.get("required", ()) if name not in old.get("required", ())]
        had, has = old.get("properties", {}), new.get("properties", {})
        if new.get("additionalProperties") is False:
            reasons += [f"takes no {name} any more" for name in had if name not in has]
            if old.get("additionalProperties") is not False:
                reasons.append("takes no other fields any more")
        return reasons + self._within(old, new, self.narrowed)

    def _missing(self, old: Schema, new: Schema) -> list[str]:
        """Why one variant of an answer is not what another promised."""
        if old.get("type") not in {None, new.get("type")} and (new.get("type"), old["type"]) != ("integer", "number"):
            return [f"may be {new.get('type', 'anything')} now"]
        had, has = old.get("properties", {}), new.get("properties", {})
        reasons = [f"{name} is gone" for name in had if name not in has]
        needed = [name for name in old.get("required", ()) if name in has and name not in new.get("required", ())]
        reasons += [f"{name} may be missing now" for name in needed]
        return reasons + self._within(old, new, self.lost)

    def _within(self, old: Schema, new: Schema, compare: Callable[[Schema, Schema], list[str]]) -> list[str]:
        """What is wrong further inside: in fields that both have, items, and values of further fields."""
        had, has = old.get("properties", {}), new.get("properties", {})
        pairs = [(name, had[name], has[name]) for name in had if name in has]
        pairs += [
            (name, old[key], new[key])
            for key, name in (("items", "[]"), ("additionalProperties", "*"))
            if isinstance(old.get(key), Mapping) and isinstance(new.get(key), Mapping)
        ]
        return [_at(name, reason) for name, one, other in pairs for reason in compare(one, other)]


def _narrower(old: Schema, new: Schema) -> Iterator[str]:
    """Values of a plain type that are taken no longer."""
    words = new.get("enum")
    if words is not None:
        gone = [word for word in old["enum"] if word not in words] if "enum" in old else [f"other than {words}"]
        yield from (f"takes no {word} any more" for word in gone)
        return
    yield from (f"{key} is {new[key]} now" for key in _LEAST if key in new and new[key] > old.get(key, _none(key)))
    yield from (f"{key} is {new[key]} now" for key in _MOST if key in new and new[key] < old.get(key, float("inf")))
    if new.get("pattern") not in {None, old.get("pattern")} and "enum" not in old:
        yield f"has to match {new['pattern']} now"
    if new.get("format") in _FORMS and new["format"] != old.get("format"):
        yield f"has to be a {new['format']} now"


def _none(key: str) -> float:
    """What a schema without this bound allows at least."""
    return 0 if key in {"minLength", "minItems"} else float("-inf")


def _variants(schema: Schema, document: Document) -> Iterator[Schema]:
    """The plain schemas that a schema is one of: neither references, nor branches, nor several types."""
    if "$ref" in schema:
        _, _, kind, name = schema["$ref"].split("/")
        yield from _variants(document["components"][kind][name], document)
        return
    for key in ("oneOf", "anyOf"):
        if key in schema:
            for branch in schema[key]:
                yield from _variants(branch, document)
            return
    if "allOf" in schema:
        yield from _merged(schema, document)
        return
    kinds = schema.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        yield _of_type(schema, kind)


def _merged(schema: Schema, document: Document) -> Iterator[Schema]:
    """The variants of something that is all of several; of which one at most has several itself."""
    rest = {key: value for key, value in schema.items() if key != "allOf"}
    made: list[Schema] = [rest]
    for part in schema["allOf"]:
        made = [_joined(one, other) for one in made for other in _variants(part, document)]
    yield from made


def _joined(one: Schema, other: Schema) -> Schema:
    properties = {**one.get("properties", {}), **other.get("properties", {})}
    required = [*one.get("required", ()), *other.get("required", ())]
    return {**one, **other, **({"properties": properties, "required": required} if properties else {})}


def _of_type(schema: Schema, kind: str | None) -> Schema:
    """One type of several, with those words of an enumeration that are of it."""
    words = [schema["const"]] if "const" in schema else schema.get("enum")
    plain = {key: value for key, value in schema.items() if key not in {"type", "enum", "const"}}
    if kind is not None:
        plain["type"] = kind
    if words is not None and kind != "null":
        plain["enum"] = [word for word in words if kind is None or isinstance(word, _NAMES[kind])]
    return plain


def _best(candidates: Iterator[list[str]]) -> list[str]:
    """The fewest reasons; none where one candidate fits."""
    return min(candidates, key=len, default=["is nothing any more"])


def _at(place: str, reason: str) -> str:
    """A reason with its place before it: ``the body: a.b: needs c``."""
    inner, colon, what = reason.partition(": ")
    if place.startswith("the ") or not colon:
        return f"{place}: {reason}"
    return f"{place}.{inner}: {what}"
