"""Users, their roles and sessions; projects; API tokens."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

from django import forms
from django.contrib import messages
from django.contrib.auth.models import User
from django.db.models import Count, Prefetch, QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.access.actor import actor_of
from controlplane.accounts.sign_in_methods import has_totp
from controlplane.models import ApiToken, Project, Role, RoleAssignment, Scope
from controlplane.services.access.sign_ins import unlock_sign_in
from controlplane.services.access.tokens import create_token, revoke_token
from controlplane.services.access.users import (
    MAX_SHOWN,
    add_user,
    end_session,
    end_sessions,
    reset_second_factor,
    sessions_of,
    set_active,
    set_password,
    set_role,
)
from controlplane.services.fleet.pools import create_project, remove_project, update_project
from controlplane.web.base import confirm_page, current_user, errors_as_messages, form_page
from controlplane.web.forms.base import Form

USERS = "controlplane:users"
ROLE_DESCRIPTIONS = {
    Role.VIEWER: "Sees pages, charts and events.",
    Role.OPERATOR: "Also drains, activates and disables replicas, pauses and aborts rollouts, tests channels.",
    Role.EDITOR: "Also drafts policies; changes replicas, task groups, alert rules and channels.",
    Role.APPROVER: "Also publishes policies; approves, promotes and resumes rollouts.",
    Role.ADMIN: "Also manages pools, users, all tokens and the audit log.",
}


def _password_field(help_text: str, label: str = "Password") -> forms.CharField:
    widget = forms.PasswordInput({"autocomplete": "new-password"})
    return forms.CharField(max_length=128, strip=False, label=label, widget=widget, help_text=help_text)


class UserForm(Form):
    """A new user."""

    username = forms.CharField(max_length=150, widget=forms.TextInput({"autocomplete": "off"}))
    email = forms.EmailField(required=False, label="E-mail", widget=forms.EmailInput({"autocomplete": "off"}))
    password = _password_field("At least 12 characters. The user can change it after signing in.")


class PasswordForm(Form):
    """A new password for another user."""

    password = _password_field("At least 12 characters. All sessions of the user end.", "New password")


class RoleForm(forms.Form):
    """A role, or none, in one project or in all."""

    role = forms.ChoiceField(choices=[("", "none"), *Role.choices], required=False)
    project = forms.ModelChoiceField(Project.objects.all(), required=False)


class ProjectForm(Form):
    """A new project."""

    name = forms.CharField(max_length=30, help_text="Lower-case letters, digits and -. It cannot be changed.")
    description = forms.CharField(required=False, max_length=1000, help_text="Purpose and contact.")


class TokenForm(Form):
    """A new API token."""

    name = forms.CharField(max_length=100, help_text="What it is for, such as: nightly deploy.")
    scope = forms.ChoiceField(
        choices=Scope.choices, help_text="Upper limit of the token's permissions; it never has more than you have."
    )
    days = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=3650,
        initial=90,
        label="Valid for",
        help_text="Days. Empty: until it is revoked.",
    )


@require_GET
def user_list(request: HttpRequest) -> HttpResponse:
    """Users with their roles, and projects."""
    roles = Prefetch("roles", RoleAssignment.objects.select_related("project"))
    context = {
        "users": User.objects.order_by("username").prefetch_related(roles),
        "projects": Project.objects.annotate(pool_count=Count("pools")).order_by("name"),
        "role_descriptions": ROLE_DESCRIPTIONS.items(),
    }
    return render(request, "controlplane/users.html", context)


@sensitive_post_parameters("password")
@require_http_methods(["GET", "POST"])
def user_new(request: HttpRequest) -> HttpResponse:
    """Add a user, who has no role yet."""
    form = UserForm(request.POST or None)
    if form.is_valid():
        with form.service_errors():
            user = add_user(**form.cleaned_data, by=current_user(request))
            messages.success(request, f"{user.username} can sign in, but sees nothing yet: assign a role below.")
            return redirect("controlplane:user", user_id=user.pk)
    return form_page(request, form, title="Add user", action="Add user", back=USERS, back_label="Users")


@require_GET
def user_detail(request: HttpRequest, user_id: int) -> HttpResponse:
    """One user: roles, password, sessions and second factor."""
    return _user_page(request, get_object_or_404(User, pk=user_id), PasswordForm())


@require_POST
def user_role(request: HttpRequest, user_id: int) -> HttpResponse:
    """Set or remove a role in one project or in all."""
    user, form = get_object_or_404(User, pk=user_id), RoleForm(request.POST)
    if form.is_valid():
        role, project = form.cleaned_data["role"], form.cleaned_data["project"]
        with errors_as_messages(request):
            set_role(user, Role(role) if role else None, project, by=current_user(request))
            messages.success(request, f"The roles of {user.username} were changed.")
    else:
        messages.error(request, "There is no such role or project. Nothing was changed.")
    return redirect("controlplane:user", user_id=user_id)


@require_POST
def user_active(request: HttpRequest, user_id: int) -> HttpResponse:
    """Disable or enable an account."""
    user = get_object_or_404(User, pk=user_id)
    with errors_as_messages(request):
        user = set_active(user, not user.is_active, by=current_user(request))
        result = "is enabled" if user.is_active else "is disabled: sessions have ended and tokens are rejected"
        messages.success(request, f"The account {user.username} {result}.")
    return redirect("controlplane:user", user_id=user_id)


@sensitive_post_parameters("password")
@require_POST
def user_password(request: HttpRequest, user_id: int) -> HttpResponse:
    """Set a new password for a user who forgot theirs."""
    user, form = get_object_or_404(User, pk=user_id), PasswordForm(request.POST)
    if form.is_valid():
        with form.service_errors():
            set_password(user, form.cleaned_data["password"], by=current_user(request))
            messages.success(request, f"{user.username} has a new password. All their sessions have ended.")
            return redirect("controlplane:user", user_id=user_id)
    return _user_page(request, user, form, status=422)


@require_POST
def user_unlock(request: HttpRequest, user_id: int) -> HttpResponse:
    """Unlock an account after too many failed sign-ins."""
    user = get_object_or_404(User, pk=user_id)
    unlock_sign_in(user, by=current_user(request))
    messages.success(request, f"{user.username} can try to sign in again.")
    return redirect("controlplane:user", user_id=user_id)


@require_POST
def user_second_factor(request: HttpRequest, user_id: int) -> HttpResponse:
    """Remove the second factor of a user who lost it."""
    user = get_object_or_404(User, pk=user_id)
    with errors_as_messages(request):
        reset_second_factor(user, by=current_user(request))
        messages.success(request, f"{user.username} signs in without a second factor until a new one is set up.")
    return redirect("controlplane:user", user_id=user_id)


@require_POST
def user_sessions_end(request: HttpRequest, user_id: int) -> HttpResponse:
    """Sign a user out everywhere."""
    user = get_object_or_404(User, pk=user_id)
    ended = end_sessions(user, by=current_user(request))
    messages.success(request, f"{ended} session{'' if ended == 1 else 's'} of {user.username} ended.")
    return redirect("controlplane:user", user_id=user_id)


def _user_page(request: HttpRequest, user: User, form: PasswordForm, status: int = 200) -> HttpResponse:
    roles = {(assignment.project_id, assignment.from_groups): assignment.role for assignment in user.roles.all()}
    projects = [(project, project.pk if project else None) for project in (None, *Project.objects.all())]
    context = {
        "account": user,
        "rows": [(project, roles.get((key, False), ""), roles.get((key, True), "")) for project, key in projects],
        "roles": Role.choices,
        "form": form,
        "role_descriptions": ROLE_DESCRIPTIONS.items(),
        "has_totp": has_totp(user),
        "sessions": list(sessions_of(user)[:MAX_SHOWN]),
        "locks": user.sign_in_locks.filter(until__gt=timezone.now()),
    }
    return render(request, "controlplane/user.html", context, status=status)


@require_http_methods(["GET", "POST"])
def project_new(request: HttpRequest) -> HttpResponse:
    """Add a project."""
    form = ProjectForm(request.POST or None)
    if form.is_valid():
        with form.service_errors():
            project = create_project(**form.cleaned_data, by=current_user(request))
            messages.success(request, f"Project {project.name} was created. Assign roles in it to users.")
            return redirect(USERS)
    return form_page(request, form, title="Add project", action="Add project", back=USERS, back_label="Users")


@require_POST
def project_approval(request: HttpRequest, project_id: int) -> HttpResponse:
    """Require a second user's approval of publications in a project, or stop requiring it."""
    project = get_object_or_404(Project, pk=project_id)
    project = update_project(project, needs_approval=not project.needs_approval, by=current_user(request))
    result = "need the approval of a second user" if project.needs_approval else "take effect without approval"
    messages.success(request, f"Publications in project {project.name} now {result}.")
    return redirect(USERS)


@require_http_methods(["GET", "POST"])
def project_remove(request: HttpRequest, project_id: int) -> HttpResponse:
    """Remove a project without pools."""
    project = get_object_or_404(Project, pk=project_id)
    return confirm_page(
        request,
        partial(remove_project, project, by=current_user(request)),
        back=USERS,
        title=f"Remove project {project.name}",
        text="All roles in it are removed too. A project with pools cannot be removed.",
        action="Remove project",
        done=f"Project {project.name} was removed.",
    )


@never_cache
@require_http_methods(["GET", "POST"])
def tokens(request: HttpRequest) -> HttpResponse:
    """API tokens, and a form for a new one, whose secret is shown once in the response."""
    form, text = TokenForm(request.POST or None), None
    if form.is_valid():
        values, user = form.cleaned_data, current_user(request)
        expires_at = timezone.now() + timedelta(days=values["days"]) if values["days"] else None
        with form.service_errors():
            scopes = [Scope(values["scope"])]
            _, text = create_token(user, name=values["name"], scopes=scopes, expires_at=expires_at, by=user)
            form = TokenForm()
    context = {"tokens": _tokens(request), "form": form, "text": text}
    return render(request, "controlplane/tokens.html", context, status=422 if form.errors else 200)


@require_POST
def token_revoke(request: HttpRequest, token_id: int) -> HttpResponse:
    """Revoke a token."""
    token = get_object_or_404(_tokens(request), pk=token_id)
    with errors_as_messages(request):
        revoke_token(token, by=current_user(request))
        messages.success(request, f"Token {token.name} was revoked.")
    return redirect("controlplane:tokens")


def _tokens(request: HttpRequest) -> QuerySet[ApiToken]:
    """The user's own tokens; all tokens for an admin."""
    rows = ApiToken.objects.select_related("user")
    return rows if actor_of(request).may(Role.ADMIN, None) else rows.filter(user=current_user(request))


@require_GET
def session_list(request: HttpRequest) -> HttpResponse:
    """The user's sessions."""
    sessions = list(sessions_of(current_user(request))[:MAX_SHOWN])
    context = {"sessions": sessions, "current_key": request.session.session_key, "max_shown": MAX_SHOWN}
    return render(request, "controlplane/sessions.html", context)


@require_POST
def session_end(request: HttpRequest, session_id: int) -> HttpResponse:
    """End one of the user's sessions; ending the current one signs the user out."""
    session = get_object_or_404(sessions_of(current_user(request)), pk=session_id)
    end_session(session, by=current_user(request))
    if session.key == request.session.session_key:
        return redirect("account_login")
    messages.success(request, "The session has ended.")
    return redirect("controlplane:sessions")


@require_POST
def sessions_end_others(request: HttpRequest) -> HttpResponse:
    """End all of the user's sessions except the current one."""
    user = current_user(request)
    ended = end_sessions(user, except_key=request.session.session_key or "", by=user)
    messages.success(request, f"{ended} other session{'' if ended == 1 else 's'} ended. This session continues.")
    return redirect("controlplane:sessions")
