"""A chart's figure, and the same data as a table, CSV and JSON."""

from __future__ import annotations

import csv
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.cache import cache_control
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import conditional_page, require_GET

from controlplane.web.tags import spreadsheet_safe
from telemetry.metrics.windows import PointState, Series
from telemetry.services.figures.replicas import cold_periods, events_of
from telemetry.web.charts import CHARTS, Chart, View, absence, figure_words, notes_of, why_empty
from telemetry.web.figures import build_figure, markers
from telemetry.web.ranges import Asked, asked


@require_GET
@gzip_page  # holds no secret that its length could tell
@cache_control(private=True, no_cache=True)
@conditional_page
def chart_figure(request: HttpRequest, slug: str) -> HttpResponse:
    """The figure that charts.js draws."""
    state = asked(request)
    _, view, lines = _lines(state, slug)
    window = state.range.window
    marks = markers(events_of(state.subject, window), window)
    return JsonResponse(build_figure(view, lines, marks, window, cold_periods(state.subject, window)))


@require_GET
def chart_table(request: HttpRequest, slug: str) -> HttpResponse:
    """The data behind the chart as a page: what it shows for those who cannot see it, or run no scripts."""
    state = asked(request)
    chart, view, lines = _lines(state, slug)
    context = {
        "chart": chart,
        "view": view,
        "asked": state,
        "labels": [line.label for line in lines],
        "notes": notes_of(lines),
        "empty": why_empty(view, lines),
        "rows": [(at, [_cell(line, number, view) for line in lines]) for number, at in _steps(lines)],
    }
    return render(request, "telemetry/chart_table.html", context)


@require_GET
def chart_csv(request: HttpRequest, slug: str) -> HttpResponse:
    """The data as CSV: a column per line, empty where nothing is known, and the notes of the lines in the last one."""
    _, view, lines = _lines(asked(request), slug)
    response = HttpResponse(content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{slug}.csv"'
    writer = csv.writer(response)
    notes = [spreadsheet_safe(" ".join(found))] if (found := notes_of(lines)) else []
    names = (spreadsheet_safe(f"{line.label} ({view.unit})") for line in lines)
    writer.writerow(["time", *names, *(["notes"] if notes else [])])
    for number, at in _steps(lines):
        writer.writerow([at.isoformat(), *(line.points[number][1] for line in lines), *notes])
    return response


@require_GET
def chart_json(request: HttpRequest, slug: str) -> HttpResponse:
    """The data as JSON: ``null`` where nothing is known, with the reason."""
    state = asked(request)
    _, view, lines = _lines(state, slug)
    document = {
        "title": view.title,
        "unit": view.unit,
        "from": state.range.window.start.isoformat(),
        "to": state.range.window.end.isoformat(),
        "step_s": state.range.window.step_s,
        "series": [_document(line) for line in lines],
    }
    response = JsonResponse(document)
    response["Content-Disposition"] = f'attachment; filename="{slug}.json"'
    return response


def _lines(state: Asked, slug: str) -> tuple[Chart, View, list[Series]]:
    if slug not in CHARTS:
        raise Http404
    chart = CHARTS[slug]
    view = chart.view(state.query, state.kind)
    if view is None:
        raise Http404
    return chart, view, view.query(state.subject, state.range.window)


def _steps(lines: list[Series]) -> list[tuple[int, Any]]:
    return [(number, at) for number, (at, _) in enumerate(lines[0].points)] if lines else []


def _cell(line: Series, number: int, view: View) -> str:
    value = line.points[number][1]
    if value is not None:
        return figure_words(value, view.unit)
    return absence(line.states[number] if number < len(line.states) else PointState.UNKNOWN)


def _document(line: Series) -> dict[str, Any]:
    return {
        "label": line.label,
        "points": [[at.isoformat(), value] for at, value in line.points],
        "states": line.states,
        "note": line.note,
    }
