"""Forms in sections: each is a part of the routers' schema that a row keeps, described and judged by the schema.

A field that is left empty takes its default; a section of which nothing is filled in is not set at all. So that a
default other than "no limit" can be lifted, the word ``none`` stands for null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import msgspec
from django import forms
from django.db.models import Model

from controlplane.errors import InvalidError
from controlplane.schema_fields import SettingInfo, canonical, kinds_of, setting_of, settings_of
from controlplane.web.tags import setting

from .base import Form
from .settings import plain_reason, range_text, sentence

NONE = "none"
EMPTY = object()  # what an empty field means: nothing is said
_NUMBERS = {"number": float, "integer": int}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the schema, shown together."""

    field: str  # of the row, and of the service's arguments
    struct: type[msgspec.Struct]
    title: str
    help: str
    unset: str  # what holds while nothing of it is filled in


@dataclass(frozen=True, slots=True)
class Single:
    """A field of the schema that stands by itself."""

    field: str  # of the row, and of the struct
    struct: type[msgspec.Struct]
    label: str
    help: str = ""  # instead of the schema's
    empty: Any = None  # what an empty field means


@dataclass(frozen=True, slots=True)
class ShownSection:
    """A section as the page has it."""

    about: Section
    fields: list[tuple[SettingInfo, forms.BoundField]]
    unset: forms.BoundField | None  # the box that takes it back
    is_set: bool
    is_open: bool


class SettingField(forms.CharField):
    """A text that stands for one setting: a number, a choice, or several texts, one a line."""

    def __init__(self, info: SettingInfo, *, label: str = "", help_text: str = "", unset: str = "") -> None:
        self.info = info
        super().__init__(
            required=False,
            strip=info.kind != "text",
            label=label or _label(info),
            help_text=help_text or _help(info),
            widget=_widget(info, unset),
        )

    def clean(self, value: Any) -> Any:
        """What the schema would read; EMPTY where nothing was filled in."""
        text: str = super().clean(value)
        if not text.strip():
            return EMPTY
        if text.strip().lower() == NONE and self.info.nullable:
            return [] if self.info.kind in {"texts", "pairs"} else None
        return self._read(text)

    def _read(self, text: str) -> Any:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if self.info.kind == "texts":
            return lines
        if self.info.kind == "pairs":
            return [_pair(line) for line in lines]
        try:
            return _NUMBERS.get(self.info.kind, str)(text)
        except ValueError:
            raise forms.ValidationError(
                f"Expected {'a whole ' if self.info.kind == 'integer' else 'a '}number."
            ) from None


class SectionedForm(Form):
    """A form whose sections and single settings are described by the schema; ``cleaned_data`` suits a service."""

    sections: ClassVar[tuple[Section, ...]] = ()
    singles: ClassVar[tuple[Single, ...]] = ()

    def __init__(self, *args: Any, row: Model | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.row = row
        for single in self.singles:
            info = setting_of(single.struct, single.field)
            self.fields[single.field] = SettingField(info, label=single.label, help_text=single.help)
            held = getattr(row, single.field, single.empty)
            self.initial.setdefault(single.field, "" if held == single.empty else _text(info, held))
        for section in self.sections:
            self._add(section)

    def basics(self) -> Iterator[forms.BoundField]:
        """The fields of no section."""
        return (bound for bound in self if "-" not in bound.name)

    @cached_property
    def shown_sections(self) -> list[ShownSection]:
        """The sections in order; one with an error stands open."""
        return [self._shown(section) for section in self.sections]

    def clean(self) -> dict[str, Any]:
        """Sections become the values of their rows' fields, each setting judged by itself so that all errors show."""
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        for single in self.singles:
            value = cleaned.get(single.field, EMPTY)
            self._judge(single.struct, single.field, single.field, value)
            if single.field not in self.errors:
                cleaned[single.field] = single.empty if value is EMPTY else value
        for section in self.sections:
            cleaned[section.field] = self._gathered(section, cleaned)
        return cleaned

    def _add(self, section: Section) -> None:
        held: Mapping[str, Any] | None = getattr(self.row, section.field, None)
        for info in settings_of(section.struct):
            name = f"{section.field}-{info.field}"
            self.fields[name] = SettingField(info, unset=section.unset)
            if held is not None:
                self.initial.setdefault(name, _text(info, held.get(info.field, info.default)))
        if held is not None:
            self.fields[f"{section.field}-unset"] = forms.BooleanField(
                required=False, label=f"Take it back: {section.unset}"
            )

    def _shown(self, section: Section) -> ShownSection:
        names = [(info, f"{section.field}-{info.field}") for info in settings_of(section.struct)]
        unset = f"{section.field}-unset"
        held = getattr(self.row, section.field, None) is not None
        wrong = any(name in self.errors for _, name in names)
        filled = len(self.sections) == 1 or (self.is_bound and any(self[name].value() for _, name in names))
        fields = [(info, self[name]) for info, name in names]
        return ShownSection(section, fields, self[unset] if unset in self.fields else None, held, wrong or filled)

    def _gathered(self, section: Section, cleaned: dict[str, Any]) -> dict[str, Any] | None:
        """What was said of a section; None for nothing, or where it is taken back."""
        given: dict[str, Any] = {}
        for info in settings_of(section.struct):
            name = f"{section.field}-{info.field}"
            value = cleaned.pop(name, EMPTY)
            self._judge(section.struct, info.field, name, value)
            if value is not EMPTY:
                given[info.field] = value
        if cleaned.pop(f"{section.field}-unset", False) or not given:
            return None
        for info in settings_of(section.struct):
            if info.required and info.field not in given:
                self.add_error(f"{section.field}-{info.field}", "Needed with the others.")
        return given

    def _judge(self, struct: type[msgspec.Struct], field: str, name: str, value: Any) -> None:
        if value is EMPTY or name in self.errors:
            return
        try:
            canonical(kinds_of(struct, field)[field], value, "$")
        except InvalidError as error:
            fault = error.faults[0]
            where = _place(fault.path, value)
            self.add_error(name, f"{where}{plain_reason(fault.reason)}")


def _place(path: str, value: Any) -> str:
    """Which line of several is meant: ``line 2: ``."""
    digits = path.removeprefix("$").partition("]")[0].removeprefix("[")
    return f"Line {int(digits) + 1}: " if digits.isdigit() and isinstance(value, list) else ""


def _pair(line: str) -> dict[str, str]:
    name, equals, model = (part.strip() for part in line.partition("="))
    if not equals or not name or not model:
        raise forms.ValidationError(f"Expected name = model, not {line[:80]!r}.")
    return {"name": name, "model": model}


def _text(info: SettingInfo, value: Any) -> str:
    """A value as somebody would type it; "" where an empty field means the same."""
    if value is None:
        return "" if info.default is None else NONE
    if info.kind == "pairs":
        return "\n".join(f"{one['name']} = {one['model']}" for one in value)
    if info.kind == "texts":
        return "\n".join(value) if value or not info.nullable else NONE
    return setting(value)


def _shown(value: Any) -> str:
    return f"{value:,.15g}" if isinstance(value, float | int) else setting(value)


def _label(info: SettingInfo) -> str:
    """Its name as words; the unit stands beside it."""
    suffix = "_s" if info.unit == "seconds" else ""
    return info.field.removesuffix(suffix).replace("_", " ").capitalize()


def _help(info: SettingInfo) -> str:
    default = "" if info.default in (None, "", []) else f"default {_shown(info.default)}"
    several = {"texts": "one a line", "pairs": "one a line, as name = model"}.get(info.kind, "")
    is_said = "null" in info.help or info.kind == "texts"
    lifted = f"{NONE}: no limit" if info.nullable and info.default is not None and not is_said else ""
    facts = "; ".join(fact for fact in (range_text(info), several, default, lifted) if fact)
    return " ".join(part for part in (sentence(info.help.replace("null:", f"{NONE}:")), sentence(facts)) if part)


def _widget(info: SettingInfo, unset: str) -> forms.Widget:
    if info.choices:
        return forms.Select(choices=[("", unset or "not set"), *((choice, choice) for choice in info.choices)])
    if info.kind in {"texts", "pairs"}:
        return forms.Textarea({"rows": 2, "autocomplete": "off", "spellcheck": "false"})
    mode = {"integer": "numeric", "number": "decimal"}.get(info.kind, "text")
    return forms.TextInput({"inputmode": mode, "autocomplete": "off"})
