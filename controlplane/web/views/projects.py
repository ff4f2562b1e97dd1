"""Projects: pools that the same people look after."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST

from controlplane.errors import ControlPlaneError
from controlplane.models import Project
from controlplane.services.access.projects import create_project, remove_project, update_project
from controlplane.web.doors import form_page, refusals_as_messages, signed_in
from controlplane.web.forms.projects import ProjectForm


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
        with refusals_as_messages(request):
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
