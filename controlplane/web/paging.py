"""Paging by plain links: ``?before=`` the last one that was shown."""

from __future__ import annotations

from django.http import HttpRequest


def number_asked(request: HttpRequest, param: str) -> int | None:
    """A number in the address; None where there is none, or something that is no number of ours."""
    text = request.GET.get(param, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
