"""What every form shares."""

from __future__ import annotations

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
            name = fault.path.rpartition(".")[2]
            self.add_error(name if name in self.fields else None, fault.reason)


class ReasonForm(Form):
    """Why a change is made; it stands in the history."""

    reason = forms.CharField(
        max_length=500,
        help_text="One sentence for whoever reads the history, such as: agents share a long system prompt.",
    )
    digest = forms.CharField(widget=forms.HiddenInput, required=False)
