"""Base forms. Labels, ranges, defaults and checks of settings come from the routers' schema.

An empty field takes its default, and a section without any value is not set. The word ``none`` stands for null, so
that a default other than "no limit" can be lifted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import msgspec
from django import forms
from django.db import transaction
from django.db.models import Model
from django.utils.html import format_html
from django.utils.safestring import SafeString

from controlplane.errors import ChangedError, ControlPlaneError, InvalidError
from controlplane.models import RoutingPolicy, VersionedModel
from controlplane.schema_fields import SettingInfo, canonical, kinds_of, setting_of, settings_of
from controlplane.services.checks import lock_row
from controlplane.services.policies.settings import StrategyInfo, canonical_settings, policy_catalogue
from controlplane.web.tags import readable, setting

NONE = "none"
DEFAULTS_APPLY = "defaults"  # ``Section.unset`` of a section whose defaults apply while it is not set
ROUTER_DEFAULTS = "router defaults"  # the same, for settings of routers
UNSET = object()  # the value of an empty setting field
LONG_TEXT = 1000  # characters; longer texts get a multi-line field
_NUMBERS = {"number": float, "integer": int}
_INPUT_MODES = {"integer": "numeric", "number": "decimal"}
_PLAIN_WORDS = {
    "`float`": "a number",
    "`int`": "a whole number",
    "`str`": "a text",
    "matching regex": "of the form",
    ">=": "of at least",
    "<=": "of at most",
    " > ": " of more than ",
}


class Form(forms.Form):
    """A form that shows errors of services beside the fields that they name."""

    error_css_class = "invalid"
    edited: VersionedModel | RoutingPolicy | None = None  # what the form edits
    etag = ""  # of the row as the user saw it

    def editing(self, row: VersionedModel | RoutingPolicy | None) -> Self:
        """This form for an edit of ``row``; ``locked`` rejects it if the row was changed since the form was opened."""
        self.edited = row
        if row is not None:
            self.etag = self.data.get("version", "") if self.is_bound else row.etag
        return self

    def version_input(self) -> SafeString:
        """The hidden field with the version that the user saw."""
        return format_html('<input type="hidden" name="version" value="{}">', self.etag) if self.etag else SafeString()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the edited row; ChangedError if it was changed since the form was opened.

        The error page carries the new version, so saving again replaces the other change. A form without a version
        replaces any change.
        """
        with transaction.atomic():
            if self.edited is not None:
                rows = type(self.edited)._base_manager.select_for_update(no_key=True)  # noqa: SLF001 - every row
                row: Any = lock_row(rows, self.edited.pk)
                seen, self.etag = self.etag, row.etag
                if seen not in {"", row.etag}:
                    raise ChangedError(str(row._meta.verbose_name))  # noqa: SLF001 - Django's documented name
            yield

    @contextmanager
    def service_errors(self) -> Iterator[None]:
        """Turn a service's error into errors of this form."""
        try:
            yield
        except InvalidError as error:
            for fault in error.faults:
                self.add_error(self._field_at(fault.path), fault.reason)
        except ControlPlaneError as error:
            self.add_error(None, str(error))

    def basics(self) -> list[forms.BoundField]:
        """The visible fields that belong to no section."""
        return [field for field in self.visible_fields() if "-" not in field.name]

    def _field_at(self, path: str) -> str | None:
        """The field of a JSON path: ``tier1-boundary`` of ``$.tier1.boundary``, else the first one of ``tier1-``."""
        steps = re.sub(r"\[\d+\]", "", path).split(".")[1:]
        for name in ("-".join(steps), *steps[-1:], *steps[:1]):
            if name in self.fields:
                return name
        return next((name for name in self.fields if steps and name.startswith(f"{steps[0]}-")), None)


class SettingField(forms.CharField):
    """A text field for one setting: a number, a choice, or several texts, one a line.

    ``check`` is the schema's: it takes the parsed value and raises InvalidError. A cleaned value is UNSET if empty.
    """

    def __init__(
        self,
        info: SettingInfo,
        check: Callable[[Any], object],
        *,
        required: bool = False,
        label: str = "",
        help_text: str = "",
        unset: str = "",
    ) -> None:
        self.info, self.check = info, check
        super().__init__(
            required=required,
            strip=info.kind != "text",
            label=label or setting_label(info),
            help_text=help_text or _help(info),
            widget=_widget(info, unset),
        )

    def clean(self, value: Any) -> Any:
        """Parse and check the value."""
        text: str = super().clean(value)
        if not text.strip():
            return UNSET
        parsed = self._parse(text)
        try:
            self.check(parsed)
        except InvalidError as error:
            fault = error.faults[0]
            raise forms.ValidationError(f"{_line_of(fault.path, parsed)}{plain_reason(fault.reason)}") from None
        return parsed

    def _parse(self, text: str) -> Any:
        kind, lines = self.info.kind, [line.strip() for line in text.splitlines() if line.strip()]
        if text.strip().lower() == NONE and self.info.nullable:
            return [] if kind in {"texts", "pairs"} else None
        if kind == "texts":
            return lines
        if kind == "pairs":
            return [_pair(line) for line in lines]
        if kind == "json":
            return _json_object(text)
        try:
            return _NUMBERS.get(kind, str)(text)
        except ValueError:
            raise forms.ValidationError(f"Expected {'a whole' if kind == 'integer' else 'a'} number.") from None


def struct_field(struct: type[msgspec.Struct], info: SettingInfo, **options: Any) -> SettingField:
    """A field for one setting of a struct of the schema."""
    return SettingField(info, partial(canonical, kinds_of(struct, info.field)[info.field], path="$"), **options)


@dataclass(frozen=True, slots=True)
class SettingComparison:
    """A setting as it is filled in."""

    info: SettingInfo
    field: forms.BoundField
    is_default: bool
    is_active: bool  # or the active settings have no such setting
    active: Any = None


class SettingsForm(Form):
    """The settings of one strategy."""

    based_on = forms.IntegerField(required=False, widget=forms.HiddenInput)

    def __init__(self, strategy: StrategyInfo, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.strategy = strategy
        for info in strategy.settings:
            self.fields[info.field] = SettingField(info, partial(self._check_setting, info.field))
            if info.field in self.initial:
                self.initial[info.field] = setting_text(info, self.initial[info.field])

    def _check_setting(self, field: str, value: Any) -> None:
        canonical_settings({"strategy": self.strategy.name, field: value})

    def setting_fields(self) -> Iterator[tuple[SettingInfo, forms.BoundField]]:
        """Each setting with its field, in the schema's order."""
        return ((info, self[info.field]) for info in self.strategy.settings)

    def compared(self, active: Mapping[str, Any] | None) -> Iterator[SettingComparison]:
        """Each setting of this filled-in form, compared with its default and with its value in ``active`` settings."""
        is_same = active is not None and active.get("strategy") == self.strategy.name
        for info, field in self.setting_fields():
            try:
                value = field.field.clean(field.value() or "")
            except forms.ValidationError:
                yield SettingComparison(info, field, is_default=False, is_active=True)
                continue
            value = info.default if value is UNSET else value
            before = (active or {}).get(info.field, info.default if is_same else value)
            is_default, is_active = value == info.default, value == before
            yield SettingComparison(info, field, is_default=is_default, is_active=is_active, active=before)

    def rebase(self, revision: int) -> None:
        """Base the next save on another active revision than the one that the form was opened on."""
        self.data = {**{name: self.data[name] for name in self.data}, "based_on": str(revision)}

    def settings(self) -> dict[str, Any]:
        """The settings that were filled in."""
        names = (info.field for info in self.strategy.settings)
        values = {name: self.cleaned_data[name] for name in names if self.cleaned_data.get(name, UNSET) is not UNSET}
        return {"strategy": self.strategy.name, **values}


def strategy_named(name: str) -> StrategyInfo | None:
    """The strategy of that name in the catalogue."""
    return next((info for info in policy_catalogue() if info.name == name), None)


def plain_reason(reason: str) -> str:
    """A schema error in plain words."""
    for code, words in _PLAIN_WORDS.items():
        reason = reason.replace(code, words)
    return reason.rstrip(".") + "."


def range_text(info: SettingInfo) -> str:
    """The range of a setting in words; "" if it is unlimited."""
    low, high = (f"{limit:,.15g}" if limit is not None else "" for limit in (info.low, info.high))
    if not high:
        return f"at least {low}" if low else ""
    if info.kind == "text":
        return f"up to {high} characters"
    return f"{low} to {high}" if low else f"up to {high}"


def sentence(text: str) -> str:
    """The text as a sentence; "" for an empty text."""
    text = text.strip().rstrip(".")
    return f"{text[0].upper()}{text[1:]}." if text else ""


@dataclass(frozen=True, slots=True)
class Section:
    """A struct of the schema that is edited as one section of a form."""

    field: str  # of the row, and argument of the service
    struct: type[msgspec.Struct]
    title: str
    help: str
    unset: str  # what applies while the section is not set


@dataclass(frozen=True, slots=True)
class Single:
    """A field of the schema outside any section."""

    field: str  # of the row and of the struct
    struct: type[msgspec.Struct]
    label: str
    help: str = ""  # instead of the schema's
    empty: Any = None  # the value of an empty field


@dataclass(frozen=True, slots=True)
class BoundSection:
    """A section as the page shows it."""

    about: Section
    fields: list[tuple[SettingInfo, forms.BoundField]]
    unset: forms.BoundField | None  # the check box that removes the section
    is_set: bool
    is_open: bool


class SectionedForm(Form):
    """A form with sections and single settings; ``cleaned_data`` holds the arguments of a service."""

    sections: ClassVar[tuple[Section, ...]] = ()
    singles: ClassVar[tuple[Single, ...]] = ()

    def __init__(self, *args: Any, row: Model | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.row = row
        for single in self.singles:
            info = setting_of(single.struct, single.field)
            self.fields[single.field] = struct_field(single.struct, info, label=single.label, help_text=single.help)
            value = getattr(row, single.field, single.empty)
            self.initial.setdefault(single.field, "" if value == single.empty else setting_text(info, value))
        for section in self.sections:
            self._add(section)

    @cached_property
    def bound_sections(self) -> list[BoundSection]:
        """The sections in order; one with errors or values is open."""
        return [self._bound(section) for section in self.sections]

    def clean(self) -> dict[str, Any]:
        """Replace UNSET by the empty value of each single setting, and collect the values of each section."""
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        for single in self.singles:
            if cleaned.get(single.field) is UNSET:
                cleaned[single.field] = single.empty
        for section in self.sections:
            cleaned[section.field] = self._section_value(section, cleaned)
        return cleaned

    def _add(self, section: Section) -> None:
        values: Mapping[str, Any] | None = getattr(self.row, section.field, None)
        for info in settings_of(section.struct):
            name = f"{section.field}-{info.field}"
            self.fields[name] = struct_field(section.struct, info, unset=section.unset)
            if values is not None:
                self.initial.setdefault(name, setting_text(info, values.get(info.field, info.default)))
        if values is not None:
            box = forms.BooleanField(required=False, label=f"Reset to: {section.unset}")
            self.fields[f"{section.field}-unset"] = box

    def _bound(self, section: Section) -> BoundSection:
        fields = [(info, self[f"{section.field}-{info.field}"]) for info in settings_of(section.struct)]
        unset = f"{section.field}-unset"
        is_open = len(self.sections) == 1 or any(
            field.errors or (self.is_bound and field.value()) for _, field in fields
        )
        is_set = getattr(self.row, section.field, None) is not None
        return BoundSection(section, fields, self[unset] if unset in self.fields else None, is_set, is_open)

    def _section_value(self, section: Section, cleaned: dict[str, Any]) -> dict[str, Any] | None:
        """The values of a section; None if nothing is filled in or the section is reset."""
        names = {info.field: f"{section.field}-{info.field}" for info in settings_of(section.struct)}
        cells = {field: cleaned.pop(name, UNSET) for field, name in names.items()}
        values = {field: value for field, value in cells.items() if value is not UNSET}
        if cleaned.pop(f"{section.field}-unset", False) or not values:
            return None
        for info in settings_of(section.struct):
            if info.required and info.field not in values:
                self.add_error(names[info.field], "Required together with the other fields of this section.")
        return values


def setting_text(info: SettingInfo, value: Any) -> str:
    """A value as a user would type it; "" if an empty field means the same."""
    if value is None:
        return "" if info.default is None else NONE
    if info.kind == "pairs":
        return "\n".join(f"{pair['name']} = {pair['model']}" for pair in value)
    if info.kind == "texts":
        return "\n".join(value) if value or not info.nullable else NONE
    return setting(value)


def _line_of(path: str, value: Any) -> str:
    """The line of a multi-line field that an error is about: ``Line 2: ``."""
    digits = path.removeprefix("$").partition("]")[0].removeprefix("[")
    return f"Line {int(digits) + 1}: " if digits.isdigit() and isinstance(value, list) else ""


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise forms.ValidationError("Expected a JSON object, such as the content of config.json.")
    return value


def _pair(line: str) -> dict[str, str]:
    name, equals, model = (part.strip() for part in line.partition("="))
    if not equals or not name or not model:
        raise forms.ValidationError(f"Expected name = model, not {line[:80]!r}.")
    return {"name": name, "model": model}


def setting_label(info: SettingInfo) -> str:
    """The field's name as a label, such as ``Maximum TTFT p95 growth``."""
    words = readable(info.field.removesuffix("_s" if info.unit == "seconds" else "")).split(" ")
    words[0] = {"max": "maximum", "min": "minimum"}.get(words[0], words[0])
    text = " ".join(words)
    return f"{text[0].upper()}{text[1:]}"


def _help(info: SettingInfo) -> str:
    default = _default_text(info)
    format_help = {"texts": "one per line", "pairs": "one per line, as name = model"}.get(info.kind, "")
    explains_null = "null" in info.help or info.kind == "texts"
    no_limit = f"{NONE}: no limit" if info.nullable and info.default is not None and not explains_null else ""
    default_text = f"default {default}" if default else ""
    facts = "; ".join(fact for fact in (range_text(info), format_help, default_text, no_limit) if fact)
    return " ".join(filter(None, (sentence(info.help.replace("null:", f"{NONE}:")), sentence(facts))))


def _widget(info: SettingInfo, unset: str) -> forms.Widget:
    if info.choices:
        empty = unset or ("not set" if info.default is None else f"default ({info.default})")
        return forms.Select(choices=[("", empty), *((choice, choice) for choice in info.choices)])
    if info.kind in {"texts", "pairs"}:
        return forms.Textarea({"rows": 2, "autocomplete": "off", "spellcheck": "false"})
    if info.kind == "json" or (info.kind == "text" and (info.high or 0) > LONG_TEXT):
        return forms.Textarea({"rows": 4})
    attributes = {"inputmode": _INPUT_MODES.get(info.kind, "text"), "autocomplete": "off"}
    default = _default_text(info)
    if default and unset in {"", DEFAULTS_APPLY, ROUTER_DEFAULTS}:
        attributes |= {"placeholder": default, "data-default": ""}
    return forms.TextInput(attributes)


def _default_text(info: SettingInfo) -> str:
    """The default as a user would type it; "" if it is empty."""
    default = info.default
    if default in (None, "", []):
        return ""
    if isinstance(default, list):
        return ", ".join(map(str, default))
    return f"{default:,.15g}" if isinstance(default, float | int) else setting(default)
