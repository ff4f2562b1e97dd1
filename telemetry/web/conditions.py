"""The field of a form that says which alerts are meant: a condition a line, so that it needs no script."""

from __future__ import annotations

from typing import Any

from django import forms

from telemetry.matchers import HELP, LONGEST, MOST


class ConditionsField(forms.CharField):
    """Conditions in the language of ``telemetry.matchers``; what each may be is the services' to say."""

    def __init__(self, *, rows: int, empty: str = "", **kwargs: Any) -> None:
        widget = forms.Textarea({"rows": rows, "autocomplete": "off", "spellcheck": "false"})
        help_text = f"{HELP} {empty}".strip()
        super().__init__(max_length=MOST * LONGEST, widget=widget, help_text=help_text, **kwargs)

    def clean(self, value: Any) -> Any:
        """The lines that are not empty."""
        return [line.strip() for line in str(super().clean(value)).splitlines() if line.strip()]
