"""Forms. What a value may be is decided where it is used: by the services, and for settings by the routers' schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django import forms
from django.db.models import QuerySet

from controlplane.errors import ControlPlaneError, InvalidError
from controlplane.models import Pool, Project, Replica, Role, Scope, TaskGroup
from controlplane.services.policy_settings import SettingInfo, StrategyInfo, canonical_settings, policy_catalogue
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
            name = fault.path.rpartition(".")[2]
            self.add_error(name if name in self.fields else None, fault.reason)


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
    words = {"`float`": "a number", "`int`": "a whole number", ">=": "of at least", "<=": "of at most"}
    for code, word in words.items():
        reason = reason.replace(code, word)
    return reason.rstrip(".") + "."


def range_text(info: SettingInfo) -> str:
    """What a setting may be, in words."""
    if info.low is None and info.high is None:
        return ""
    if info.kind == "text":
        return f"up to {info.high:,g} characters"
    if info.high is None:
        return f"at least {info.low:,g}"
    return f"up to {info.high:,g}" if info.low is None else f"{info.low:,g} to {info.high:,g}"


def _field(info: SettingInfo) -> forms.Field:
    facts = [range_text(info), f"default {setting(info.default)}" if info.default not in (None, "") else ""]
    about = "; ".join(fact for fact in facts if fact)
    common: dict[str, Any] = {
        "required": False,
        "label": info.field.replace("_", " ").capitalize(),
        "help_text": " ".join(part for part in (_sentence(info.help), _sentence(about)) if part),
    }
    if info.choices:
        return forms.ChoiceField(choices=[(choice, choice) for choice in info.choices], **common)
    if info.kind == "text":
        return forms.CharField(strip=False, widget=forms.TextInput({"autocomplete": "off"}), **common)
    if info.kind == "integer":
        return forms.IntegerField(widget=forms.TextInput({"inputmode": "numeric", "autocomplete": "off"}), **common)
    return forms.FloatField(widget=forms.TextInput({"inputmode": "decimal", "autocomplete": "off"}), **common)


def _sentence(text: str) -> str:
    text = text.strip().rstrip(".")
    return f"{text[0].upper()}{text[1:]}." if text else ""


class PoolForm(Form):
    """A new pool, of one of the projects that it may be made in."""

    project = forms.ModelChoiceField(
        Project.objects.none(), empty_label=None, help_text="Who may see and change it: people hold roles in projects."
    )

    name = forms.CharField(
        max_length=30, help_text="Lower-case letters, digits and -. It labels every figure and never changes."
    )
    models = forms.CharField(
        required=False,
        widget=forms.Textarea({"rows": 2}),
        help_text="Served model names, one a line. Left empty, the pool takes any model.",
    )
    description = forms.CharField(required=False, max_length=1000, help_text="What it is for, and who to ask.")

    def __init__(self, projects: QuerySet[Project], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["project"]
        if not projects.exists():
            del self.fields["project"]  # the first pool makes the first project
        elif isinstance(field, forms.ModelChoiceField):
            field.queryset = projects

    def clean_models(self) -> list[str]:
        """One name a line; empty lines do not count."""
        return [line.strip() for line in self.cleaned_data["models"].splitlines() if line.strip()]


class ProjectForm(Form):
    """A new project."""

    name = forms.CharField(max_length=30, help_text="Lower-case letters, digits and -. It never changes.")
    description = forms.CharField(required=False, max_length=1000, help_text="Whose pools these are.")


class PersonForm(Form):
    """Somebody new."""

    username = forms.CharField(max_length=150, widget=forms.TextInput({"autocomplete": "off"}))
    email = forms.EmailField(required=False, label="E-mail", widget=forms.EmailInput({"autocomplete": "off"}))
    password = forms.CharField(
        max_length=128,
        strip=False,
        widget=forms.PasswordInput({"autocomplete": "new-password"}),
        help_text="At least 12 characters. They can change it after signing in.",
    )


class PasswordForm(Form):
    """A new password for somebody."""

    password = forms.CharField(
        max_length=128,
        strip=False,
        label="New password",
        widget=forms.PasswordInput({"autocomplete": "new-password"}),
        help_text="At least 12 characters. Their sessions end.",
    )


class RoleForm(forms.Form):
    """A role, or none, in a project, or in all."""

    role = forms.ChoiceField(choices=[("", "none"), *Role.choices], required=False)
    project = forms.ModelChoiceField(Project.objects.all(), required=False)


class TokenForm(Form):
    """A new API token, acting for whoever makes it."""

    name = forms.CharField(max_length=100, help_text="What it is for, such as: nightly deploy.")
    scope = forms.ChoiceField(
        choices=Scope.choices, help_text="The most that it may do; it never may more than you do yourself."
    )
    days = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=3650,
        initial=90,
        label="Valid for",
        help_text="Days. Left empty, it works until it is revoked.",
    )


class ReplicaForm(Form):
    """A new replica."""

    name = forms.CharField(
        max_length=63, help_text="Its identity on every ring: it never changes, even when the URL does."
    )
    url = forms.CharField(max_length=2048, label="URL", help_text="The engine's base URL, such as http://gpu-1:8000.")
    weight = forms.FloatField(
        initial=1.0, help_text="Its capacity compared with the others. 1 unless the hardware is mixed."
    )


class TaskGroupForm(Form):
    """A task group, new or changed."""

    name = forms.CharField(max_length=30, help_text="What clients send in the X-Task-Group header. It never changes.")
    owner = forms.CharField(required=False, max_length=200, help_text="Who to ask: a team, an address.")
    description = forms.CharField(required=False, max_length=1000)
    replicas = forms.ModelMultipleChoiceField(
        Replica.objects.none(),
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text="Tick none to use all replicas of the pool.",
    )

    def __init__(self, pool: Pool, *args: Any, group: TaskGroup | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["replicas"]
        if isinstance(field, forms.ModelMultipleChoiceField):
            field.queryset = pool.replicas.all()
        if group is not None:
            del self.fields["name"]
