"""Where one is signed in, and ending that."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from controlplane.services.access.sessions import MOST_SHOWN, end_session, end_sessions, sessions_of
from controlplane.web.doors import signed_in


@require_GET
def session_list(request: HttpRequest) -> HttpResponse:
    """One's own, the one that asks marked."""
    sessions = list(sessions_of(signed_in(request))[:MOST_SHOWN])
    context = {"sessions": sessions, "here": request.session.session_key, "most": MOST_SHOWN}
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
    ended = end_sessions(person, but=request.session.session_key or "", by=person)
    messages.success(request, f"{ended} other session{'' if ended == 1 else 's'} ended. This one goes on.")
    return redirect("controlplane:sessions")
