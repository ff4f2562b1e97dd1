"""What every form shares."""

from __future__ import annotations

import re

from django import forms

from controlplane.errors import ControlPlaneError, InvalidError


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
