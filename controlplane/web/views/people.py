"""People, the roles that they hold in projects, and where they are signed in.

Projects: pools that the same people look after.

API tokens: one's own, and for admins everybody's.

Where one is signed in, and ending that.
"""

from __future__ import annotations

from datetime import timedelta

from django.contrib import messages
from django.contrib.auth.models import User
from django.db.models import Count, Prefetch, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.access.actor import actor_of
from controlplane.accounts.sign_in_methods import has_totp
from controlplane.errors import ControlPlaneError
from controlplane.models import ApiToken, Project, Role, RoleAssignment, Scope
from controlplane.services.access.people import (
    MAX_SHOWN,
    add_person,
    end_session,
    end_sessions,
    reset_second_factor,
    sessions_of,
    set_active,
    set_password,
    set_role,
)
from controlplane.services.access.sign_ins import unlock_sign_in
from controlplane.services.access.tokens import create_token, revoke_token
from controlplane.services.fleet.pools import create_project, remove_project, update_project
from controlplane.web.base import errors_as_messages, form_page, signed_in
from controlplane.web.forms.people import PasswordForm, PersonForm, ProjectForm, RoleForm, TokenForm

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
        with errors_as_messages(request):
            set_role(someone, Role(role) if role else None, project, by=signed_in(request))
            messages.success(request, f"The roles of {someone.username} were changed, from the next request on.")
    else:
        messages.error(request, "There is no such role or project. Nothing was changed.")
    return redirect("controlplane:person", person_id=person_id)


@require_POST
def person_active(request: HttpRequest, person_id: int) -> HttpResponse:
    """Let somebody sign in no more, or again."""
    someone = get_object_or_404(User, pk=person_id)
    with errors_as_messages(request):
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
    with errors_as_messages(request):
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
        "has_totp": has_totp(someone),
        "sessions": list(sessions_of(someone)[:MAX_SHOWN]),
        "locks": someone.sign_in_locks.filter(until__gt=timezone.now()),
    }
    return render(request, "controlplane/person.html", context, status=status)


@require_http_methods(["GET", "POST"])
def project_new(request: HttpRequest) -> HttpResponse:
    """A project, for pools that other people look after."""
    form = ProjectForm(request.POST or None)
    if request.method == "POST" and form.is_valid():
        try:
            project = create_project(**form.cleaned_data, by=signed_in(request))
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            messages.success(request, f"Project {project.name} was created. Give people roles in it.")
            return redirect("controlplane:people")
    return form_page(
        request, form, title="Add a project", action="Add the project", back="controlplane:people", back_label="People"
    )


@require_POST
def project_approval(request: HttpRequest, project_id: int) -> HttpResponse:
    """Have what is published in a project wait for a second person, or no longer."""
    project = get_object_or_404(Project, pk=project_id)
    project = update_project(project, needs_approval=not project.needs_approval, by=signed_in(request))
    what = "waits for a second person from now on" if project.needs_approval else "waits for nobody any more"
    messages.success(request, f"What is published in project {project.name} {what}.")
    return redirect("controlplane:people")


@require_http_methods(["GET", "POST"])
def project_remove(request: HttpRequest, project_id: int) -> HttpResponse:
    """Remove a project without pools."""
    project = get_object_or_404(Project, pk=project_id)
    if request.method == "POST":
        with errors_as_messages(request):
            remove_project(project, by=signed_in(request))
            messages.success(request, f"Project {project.name} was removed.")
        return redirect("controlplane:people")
    context = {
        "back": reverse("controlplane:people"),
        "title": f"Remove project {project.name}",
        "text": "The roles that people hold in it go with it. A project with pools stays.",
        "action": "Remove the project",
        "danger": True,
    }
    return render(request, "controlplane/confirm.html", context)


@never_cache
@require_http_methods(["GET", "POST"])
def tokens(request: HttpRequest) -> HttpResponse:
    """The list, and a form for a new one; its text is shown once, in the answer."""
    form, text = TokenForm(request.POST or None), None
    if request.method == "POST" and form.is_valid():
        filled, user = form.cleaned_data, signed_in(request)
        expires_at = timezone.now() + timedelta(days=filled["days"]) if filled["days"] else None
        try:
            _, text = create_token(
                user, name=filled["name"], scopes=[Scope(filled["scope"])], expires_at=expires_at, by=user
            )
        except ControlPlaneError as error:
            form.refuse(error)
        else:
            form = TokenForm()
    context = {"tokens": _shown(request), "form": form, "text": text}
    return render(request, "controlplane/tokens.html", context, status=422 if form.errors else 200)


@require_POST
def token_revoke(request: HttpRequest, token_id: int) -> HttpResponse:
    """End a token now."""
    token = get_object_or_404(_shown(request), pk=token_id)
    with errors_as_messages(request):
        revoke_token(token, by=signed_in(request))
        messages.success(request, f"Token {token.name} does not work any more.")
    return redirect("controlplane:tokens")


def _shown(request: HttpRequest) -> QuerySet[ApiToken]:
    rows = ApiToken.objects.select_related("user")
    return rows if actor_of(request).may(Role.ADMIN, None) else rows.filter(user=signed_in(request))


@require_GET
def session_list(request: HttpRequest) -> HttpResponse:
    """One's own, the one that asks marked."""
    sessions = list(sessions_of(signed_in(request))[:MAX_SHOWN])
    context = {"sessions": sessions, "here": request.session.session_key, "most": MAX_SHOWN}
    return render(request, "controlplane/sessions.html", context)


@require_POST
def session_end(request: HttpRequest, session_id: int) -> HttpResponse:
    """End one of one's own; the one that asks is signed out."""
    session = get_object_or_404(sessions_of(signed_in(request)), pk=session_id)
    end_session(session, by=signed_in(request))
    if session.key == request.session.session_key:
        return redirect("account_login")
    messages.success(request, "That session has ended.")
    return redirect("controlplane:sessions")


@require_POST
def sessions_end_others(request: HttpRequest) -> HttpResponse:
    """End all of one's own but the one that asks."""
    person = signed_in(request)
    ended = end_sessions(person, except_key=request.session.session_key or "", by=person)
    messages.success(request, f"{ended} other session{'' if ended == 1 else 's'} ended. This one goes on.")
    return redirect("controlplane:sessions")
