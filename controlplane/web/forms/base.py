"""What every form shares.

A strategy's settings, as the routers' schema describes them.

Forms in sections: each is a part of the routers' schema that a row keeps, described and judged by the schema.

A field that is left empty takes its default; a section of which nothing is filled in is not set at all. So that a
default other than "no limit" can be lifted, the word ``none`` stands for null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import msgspec
from django import forms
from django.db.models import Model

from controlplane.errors import ControlPlaneError, InvalidError
from controlplane.schema_fields import SettingInfo, canonical, kinds_of, setting_of, settings_of
from controlplane.services.policies.settings import StrategyInfo, canonical_settings, policy_catalogue
from controlplane.web.tags import setting


class Form(forms.Form):
    """A form whose fields tell assistive technology about their errors, and that shows a service's refusal."""

    error_css_class = "invalid"

    def refuse(self, error: ControlPlaneError) -> None:
        """Show a service's refusal beside the field that it names, else above the form."""
        if not isinstance(error, InvalidError):
            self.add_error(None, str(error))
            return
        for fault in error.faults:
            self.add_error(self._field_at(fault.path), fault.reason)

    def _field_at(self, path: str) -> str | None:
        """The field that a JSON path means: ``$.tier1.boundary`` is ``tier1-boundary``, or the first of ``tier1-``."""
        steps = re.sub(r"\[\d+\]", "", path).split(".")[1:]
        for name in ("-".join(steps), *steps[-1:], *steps[:1]):
            if name in self.fields:
                return name
        return next((name for name in self.fields if steps and name.startswith(f"{steps[0]}-")), None)


class ReasonForm(Form):
    """Why a change is made; it stands in the history."""

    reason = forms.CharField(
        max_length=500,
        help_text="One sentence for whoever reads the history, such as: agents share a long system prompt.",
    )
    digest = forms.CharField(widget=forms.HiddenInput, required=False)


class SettingsForm(Form):
    """The settings of one strategy. Every rule is the router's own: a field is checked by the schema it would run."""

    based_on = forms.IntegerField(required=False, widget=forms.HiddenInput)

    def __init__(self, strategy: StrategyInfo, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.strategy = strategy
        for info in strategy.settings:
            self.fields[info.field] = _field(info)

    def setting_fields(self) -> Iterator[tuple[SettingInfo, forms.BoundField]]:
        """Each setting with its field, in the schema's order."""
        return ((info, self[info.field]) for info in self.strategy.settings)

    def rebase(self, live: int) -> None:
        """Have the next save be over another live revision than the one that the form was opened on."""
        self.data = {**{name: self.data[name] for name in self.data}, "based_on": str(live)}

    def settings(self) -> dict[str, Any]:
        """What was filled in; an empty field takes the default."""
        names = [info.field for info in self.strategy.settings]
        filled = {name: self.cleaned_data[name] for name in names if self.cleaned_data.get(name) not in (None, "")}
        return {"strategy": self.strategy.name, **filled}

    def clean(self) -> dict[str, Any]:
        """Have the router's schema judge each setting by itself, so that all errors show at once."""
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        for info in self.strategy.settings:
            value = cleaned.get(info.field)
            if value in (None, ""):
                continue
            try:
                canonical_settings({"strategy": self.strategy.name, info.field: value})
            except InvalidError as error:
                self.add_error(info.field, plain_reason(error.faults[0].reason))
        return cleaned


def strategy_named(name: str) -> StrategyInfo | None:
    """The catalogue's entry of that name, if there is one."""
    return next((info for info in policy_catalogue() if info.name == name), None)


def plain_reason(reason: str) -> str:
    """A schema's reason in an operator's words."""
    words = {
        "`float`": "a number",
        "`int`": "a whole number",
        "`str`": "a text",
        "matching regex": "of the form",
        ">=": "of at least",
        "<=": "of at most",
        " > ": " of more than ",
    }
    for code, word in words.items():
        reason = reason.replace(code, word)
    return reason.rstrip(".") + "."


def range_text(info: SettingInfo) -> str:
    """What a setting may be, in words."""
    if info.low is None and info.high is None:
        return ""
    if info.kind == "text":
        return f"up to {info.high:,.15g} characters"
    if info.high is None:
        return f"at least {info.low:,.15g}"
    return f"up to {info.high:,.15g}" if info.low is None else f"{info.low:,.15g} to {info.high:,.15g}"


def _field(info: SettingInfo) -> forms.Field:
    facts = [range_text(info), f"default {setting(info.default)}" if info.default not in (None, "") else ""]
    about = "; ".join(fact for fact in facts if fact)
    common: dict[str, Any] = {
        "required": False,
        "label": info.field.replace("_", " ").capitalize(),
        "help_text": " ".join(part for part in (sentence(info.help), sentence(about)) if part),
    }
    if info.choices:
        return forms.ChoiceField(choices=[(choice, choice) for choice in info.choices], **common)
    if info.kind == "text":
        return forms.CharField(strip=False, widget=forms.TextInput({"autocomplete": "off"}), **common)
    if info.kind == "integer":
        return forms.IntegerField(widget=forms.TextInput({"inputmode": "numeric", "autocomplete": "off"}), **common)
    return forms.FloatField(widget=forms.TextInput({"inputmode": "decimal", "autocomplete": "off"}), **common)


def sentence(text: str) -> str:
    """The text as a sentence; "" for none."""
    text = text.strip().rstrip(".")
    return f"{text[0].upper()}{text[1:]}." if text else ""


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
