"""A strategy's settings, as the routers' schema describes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django import forms

from controlplane.errors import InvalidError
from controlplane.schema_fields import SettingInfo
from controlplane.services.policies.settings import StrategyInfo, canonical_settings, policy_catalogue
from controlplane.web.tags import setting

from .base import Form


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
