"""Projects: who looks after which pools."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction

from controlplane.errors import InUseError, NameTakenError
from controlplane.models import EventKind, Project
from controlplane.models.fleet import SHORT_NAME
from controlplane.services.checks import check_name, hold
from controlplane.services.events import record_event

DEFAULT = "default"


def default_project() -> Project:
    """The project of pools for which none is named."""
    return Project.objects.get_or_create(name=DEFAULT)[0]


@transaction.atomic
def create_project(
    name: str, *, description: str = "", needs_approval: bool = False, by: User | None = None
) -> Project:
    """Create a project, which nobody but admins of everything can see yet. NameTakenError, InvalidError."""
    check_name(name, SHORT_NAME, "$.name")
    try:
        with transaction.atomic():
            project = Project.objects.create(name=name, description=description, needs_approval=needs_approval)
    except IntegrityError:
        raise NameTakenError("project", name) from None
    record_event(EventKind.PROJECT_CREATED, f"Project {name} was created.", project=project, by=by)
    return project


@transaction.atomic
def update_project(
    project: Project, *, description: str | None = None, needs_approval: bool | None = None, by: User | None = None
) -> Project:
    """Change what is given. ``needs_approval``: what is published from now on waits for a second person."""
    project = hold(Project.objects.select_for_update(no_key=True), project.pk)
    before = facts(project)
    project.description = project.description if description is None else description
    project.needs_approval = project.needs_approval if needs_approval is None else needs_approval
    if facts(project) != before:
        project.save()
        change = {"before": before, "after": facts(project)}
        summary = f"Project {project.name} was changed."
        record_event(EventKind.PROJECT_CHANGED, summary, project=project, by=by, detail=change)
    return project


def facts(project: Project) -> dict[str, Any]:
    """What an event shows of a project before and after a change."""
    return {name: getattr(project, name) for name in ("name", "description", "needs_approval")}


@transaction.atomic
def remove_project(project: Project, *, by: User | None = None) -> None:
    """Remove a project and every role in it; InUseError while it has pools."""
    project = hold(Project.objects.select_for_update(), project.pk)
    if project.pools.exists():
        raise InUseError(f"Project {project.name} still has pools; remove those first.")
    record_event(EventKind.PROJECT_REMOVED, f"Project {project.name} was removed.", project=project, by=by)
    project.delete()
