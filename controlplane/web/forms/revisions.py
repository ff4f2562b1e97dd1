"""Taking an earlier revision back into force."""

from __future__ import annotations

from typing import Any

from django import forms

from .base import Form


class RevertForm(Form):
    """Why, and the policy's name typed, so that nobody reverts the wrong one by a slip."""

    reason = forms.CharField(
        max_length=400, help_text="One sentence for whoever reads the history, such as: TTFT doubled after revision 7."
    )
    typed = forms.CharField(widget=forms.TextInput({"autocomplete": "off", "spellcheck": "false"}))
    live = forms.IntegerField(required=False, widget=forms.HiddenInput)

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = name
        self.fields["typed"].label = f"Type {name} to confirm"

    def clean_typed(self) -> str:
        """Exactly the policy's name."""
        typed = str(self.cleaned_data["typed"]).strip()
        if typed != self.name:
            raise forms.ValidationError(f"This is not {self.name}. Nothing was changed.")
        return typed
