"""Silences: what is not told for a while, made on a page that shows first whom it would be for."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.access.asker import asker_of
from controlplane.access.gate import needed_here
from controlplane.access.scope import visible
from controlplane.errors import ControlPlaneError, InvalidError
from controlplane.models import Project
from controlplane.web.doors import refusals_as_messages, signed_in, within
from controlplane.web.forms.base import Form
from controlplane.web.paging import number_asked
from telemetry.matchers import Matcher
from telemetry.models import Alert, Silence
from telemetry.services.alerts import silences as service
from telemetry.services.alerts.listing import open_alerts
from telemetry.web.conditions import ConditionsField

PAST = 50
LENGTHS = (("1", "1 hour"), ("4", "4 hours"), ("24", "1 day"), ("168", "7 days"), ("720", "30 days"))  # in hours
USUAL = ("pool", "group", "replica", "rule")  # labels by which an alert is silenced unless somebody says otherwise


class SilenceForm(Form):
    """A new silence: conditions one a line, so that it needs no script."""

    matchers = ConditionsField(label="For alerts with", rows=4)
    hours = forms.ChoiceField(label="For", choices=LENGTHS, initial="4")
    project = forms.ModelChoiceField(Project.objects.none(), required=False, empty_label="all projects")
    comment = forms.CharField(max_length=500, label="Why", help_text="For whoever wonders why nobody was told.")

    def __init__(self, *args: Any, projects: QuerySet[Project], everywhere: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choice = self.fields["project"]
        if isinstance(choice, forms.ModelChoiceField):
            choice.queryset = projects
            choice.required = not everywhere
            choice.empty_label = "all projects" if everywhere else None


@require_GET
def silence_list(request: HttpRequest) -> HttpResponse:
    """What is silenced now or will be, and what was."""
    asker, now = asker_of(request), timezone.now()
    held = [_line(silence) for silence in visible(asker, service.silences())]
    past = [_line(silence) for silence in visible(asker, service.silences(ended=True))[:PAST]]
    return render(request, "telemetry/silences.html", {"held": held, "past": past, "now": now})


def _line(silence: Silence) -> dict[str, Any]:
    return {"silence": silence, "words": service.words(silence)}


@require_http_methods(["GET", "POST"])
def silence_new(request: HttpRequest) -> HttpResponse:
    """Silence alerts; a look at which ones comes first."""
    may_all = asker_of(request).may(needed_here(request), None)
    initial = {"matchers": _of_alert(request), "hours": "4"}
    form = SilenceForm(
        request.POST or None, initial=initial, projects=within(request, Project.objects.all()), everywhere=may_all
    )
    found: list[Alert] | None = None
    if request.method == "POST" and form.is_valid():
        if "preview" in request.POST:
            found = _matched(request, form)
        elif _created(request, form):
            messages.success(request, "Silenced. The alerts go on, and nobody is told of them.")
            return redirect("telemetry:silences")
    status = 422 if form.errors else 200
    return render(request, "telemetry/silence_new.html", {"form": form, "found": found}, status=status)


def _of_alert(request: HttpRequest) -> str:
    """The usual matchers of the alert that the address names."""
    number = number_asked(request, "alert")
    alert = visible(asker_of(request), Alert.objects.filter(pk=number)).first() if number else None
    if alert is None:
        return ""
    named = ({"label": name, "value": alert.labels[name]} for name in USUAL if name in alert.labels)
    return "\n".join(str(Matcher.of(one)) for one in named)


def _matched(request: HttpRequest, form: SilenceForm) -> list[Alert] | None:
    among = visible(asker_of(request), open_alerts())
    try:
        return service.matched(form.cleaned_data["matchers"], project=form.cleaned_data["project"], among=among)
    except InvalidError as error:
        form.refuse(error)
        return None


def _created(request: HttpRequest, form: SilenceForm) -> bool:
    filled = form.cleaned_data
    ends_at = timezone.now() + timedelta(hours=int(filled["hours"]))
    try:
        service.create_silence(
            matchers=filled["matchers"],
            project=filled["project"],
            ends_at=ends_at,
            comment=filled["comment"],
            by=signed_in(request),
        )
    except ControlPlaneError as error:
        form.refuse(error)
        return False
    return True


@require_POST
def silence_end(request: HttpRequest, silence_id: int) -> HttpResponse:
    """End a silence now."""
    silence = get_object_or_404(Silence, pk=silence_id)
    with refusals_as_messages(request):
        service.end_silence(silence, by=signed_in(request))
        messages.success(request, "The silence is over; what still fires is told.")
    return redirect("telemetry:silences")
