"""People, the roles that they hold in projects, and where they are signed in."""

from __future__ import annotations

from django.contrib import messages
from django.contrib.auth.models import User
from django.db.models import Count, Prefetch
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.accounts.second_factor import has_code
from controlplane.errors import ControlPlaneError
from controlplane.models import Project, Role, RoleAssignment
from controlplane.services.access.people import add_person, set_active, set_password, set_role
from controlplane.services.access.second_factors import reset_second_factor
from controlplane.services.access.sessions import MOST_SHOWN, end_sessions, sessions_of
from controlplane.services.access.sign_ins import unlock_sign_in
from controlplane.web.doors import form_page, refusals_as_messages, signed_in
from controlplane.web.forms.people import PasswordForm, PersonForm, RoleForm

MEANINGS = {
    Role.VIEWER: "sees pages, charts and events",
    Role.OPERATOR: "also drains, activates and disables replicas, pauses and aborts rollouts, tries channels",
    Role.EDITOR: "also drafts policies, changes replicas, task groups, alert rules and channels",
    Role.APPROVER: "also publishes policies; resumes, promotes and approves rollouts",
    Role.ADMIN: "also pools, people, everybody's tokens and the audit log",
}


@require_GET
def people(request: HttpRequest) -> HttpResponse:
    """Everybody with their roles, and the projects."""
    held = Prefetch("roles", RoleAssignment.objects.select_related("project"))
    context = {
        "people": User.objects.order_by("username").prefetch_related(held),
        "projects": Project.objects.annotate(pool_count=Count("pools")).order_by("name"),
        "meanings": MEANINGS.items(),
    }
    return render(request, "controlplane/people.html", context)


@sensitive_post_parameters("password")
@require_http_methods(["GET", "POST"])
def person_new(request: HttpRequest) -> HttpResponse:
    """Add somebody, who sees nothing until they are given a role."""
    form = PersonForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            person = add_person(**form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"{person.username} may sign in, and sees nothing yet: give a role below.")
            return redirect("controlplane:person", person_id=person.pk)
    return form_page(request, form, title="Add somebody", action="Add", back="controlplane:people", back_label="People")


@require_GET
def person(request: HttpRequest, person_id: int) -> HttpResponse:
    """One person: roles, and whether they may sign in."""
    return _page(request, get_object_or_404(User, pk=person_id), PasswordForm())


@require_POST
def person_role(request: HttpRequest, person_id: int) -> HttpResponse:
    """Give a role in a project or in all of them, or take it away."""
    someone, form = get_object_or_404(User, pk=person_id), RoleForm(request.POST)
    if form.is_valid():
        role, project = form.cleaned_data["role"], form.cleaned_data["project"]
        with refusals_as_messages(request):
            set_role(someone, Role(role) if role else None, project, by=signed_in(request))
            messages.success(request, f"The roles of {someone.username} were changed, from the next request on.")
    else:
        messages.error(request, "There is no such role or project. Nothing was changed.")
    return redirect("controlplane:person", person_id=person_id)


@require_POST
def person_active(request: HttpRequest, person_id: int) -> HttpResponse:
    """Let somebody sign in no more, or again."""
    someone = get_object_or_404(User, pk=person_id)
    with refusals_as_messages(request):
        someone = set_active(someone, not someone.is_active, by=signed_in(request))
        what = "may sign in again" if someone.is_active else "is signed out, and their tokens do not work any more"
        messages.success(request, f"{someone.username} {what}.")
    return redirect("controlplane:person", person_id=person_id)


@sensitive_post_parameters("password")
@require_POST
def person_password(request: HttpRequest, person_id: int) -> HttpResponse:
    """A new password for somebody who forgot theirs."""
    someone, form = get_object_or_404(User, pk=person_id), PasswordForm(request.POST)
    if form.is_valid():
        try:
            set_password(someone, form.cleaned_data["password"], by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"{someone.username} has a new password; their sessions have ended.")
            return redirect("controlplane:person", person_id=person_id)
    return _page(request, someone, form, status=422)


@require_POST
def person_unlock(request: HttpRequest, person_id: int) -> HttpResponse:
    """Let somebody who failed too often try again now."""
    someone = get_object_or_404(User, pk=person_id)
    unlock_sign_in(someone, by=signed_in(request))
    messages.success(request, f"{someone.username} may try to sign in again.")
    return redirect("controlplane:person", person_id=person_id)


@require_POST
def person_second_factor(request: HttpRequest, person_id: int) -> HttpResponse:
    """Take away the second factor of somebody who lost theirs."""
    someone = get_object_or_404(User, pk=person_id)
    with refusals_as_messages(request):
        reset_second_factor(someone, by=signed_in(request))
        messages.success(request, f"{someone.username} signs in without a second factor until they set one up.")
    return redirect("controlplane:person", person_id=person_id)


@require_POST
def person_sessions_end(request: HttpRequest, person_id: int) -> HttpResponse:
    """Sign somebody out everywhere."""
    someone = get_object_or_404(User, pk=person_id)
    ended = end_sessions(someone, by=signed_in(request))
    messages.success(request, f"{ended} session{'' if ended == 1 else 's'} of {someone.username} ended.")
    return redirect("controlplane:person", person_id=person_id)


def _page(request: HttpRequest, someone: User, form: PasswordForm, status: int = 200) -> HttpResponse:
    held = {(assignment.project_id, assignment.from_groups): assignment.role for assignment in someone.roles.all()}
    places = [(project, project.pk if project else None) for project in (None, *Project.objects.all())]
    rows = [(project, held.get((key, False), ""), held.get((key, True), "")) for project, key in places]
    context = {
        "person": someone,
        "rows": rows,
        "roles": Role.choices,
        "form": form,
        "meanings": MEANINGS.items(),
        "has_code": has_code(someone),
        "sessions": list(sessions_of(someone)[:MOST_SHOWN]),
        "locks": someone.sign_in_locks.filter(until__gt=timezone.now()),
    }
    return render(request, "controlplane/person.html", context, status=status)
