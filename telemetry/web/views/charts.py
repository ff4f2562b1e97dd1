"""A chart's figure, and its data as a table, CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_GET

from controlplane.web.base import csv_response
from telemetry.metrics.windows import PointState, Series
from telemetry.services.figures.groups import policy_periods
from telemetry.services.figures.replicas import cold_periods, events_of
from telemetry.web.charts import CHARTS, Chart, View, absence, figure_text, notes_of, why_empty
from telemetry.web.figures import build_figure, markers
from telemetry.web.pages import frame, live_part
from telemetry.web.ranges import PageState, page_state, path_of


@live_part
def chart_figure(request: HttpRequest, slug: str) -> HttpResponse:
    """The figure that charts.js draws."""
    state = page_state(request)
    _, view, lines = _chart(state, slug)
    window = state.range.window
    pools = state.pools if state.subject.pool is None else [state.subject.pool]
    periods = policy_periods(pools[0], state.subject.group, window) if len(pools) == 1 else []
    marks = markers(events_of(state.subject, window), window, named=not periods)
    cold = cold_periods(state.subject, window)
    return JsonResponse(build_figure(view, lines, marks, window, cold=cold, periods=periods))


@require_GET
def chart_table(request: HttpRequest, slug: str) -> HttpResponse:
    """A chart at full size, and its data as a table, also for users without scripts."""
    state = page_state(request)
    _, view, lines = _chart(state, slug)
    context = {
        **frame(state, [slug]),
        "view": view,
        "page_state": state,
        "back": f"{path_of(state.subject)}?{state.urlencoded}",
        "labels": [line.label for line in lines],
        "notes": notes_of(lines),
        "empty": why_empty(view, lines),
        "rows": [(at, [_cell(line, step, view) for line in lines]) for step, at in _since_first_value(lines)],
        "one_day": state.range.window.start.date() == state.range.window.end.date(),
    }
    return render(request, "telemetry/chart.html", context)


@require_GET
def chart_csv(request: HttpRequest, slug: str) -> HttpResponseBase:
    """The data as CSV: one column per line, empty if unknown, and the notes in the last column."""
    _, view, lines = _chart(page_state(request), slug)
    notes = [" ".join(notes_of(lines))] if notes_of(lines) else []

    def rows() -> Iterator[list[Any]]:
        yield ["time", *(f"{line.label} ({view.figure.unit_text})" for line in lines), *(["notes"] if notes else [])]
        for step, at in _steps(lines):
            yield [at.isoformat(), *(line.points[step][1] for line in lines), *notes]

    return csv_response(f"{slug}.csv", rows(), stream=False)


@require_GET
def chart_json(request: HttpRequest, slug: str) -> HttpResponse:
    """The data as JSON: null if unknown, with the reason in ``states``."""
    state = page_state(request)
    _, view, lines = _chart(state, slug)
    window = state.range.window
    document = {
        "title": view.title,
        "unit": view.figure.unit,
        "from": window.start.isoformat(),
        "to": window.end.isoformat(),
        "step_s": window.step_s,
        "series": [
            {
                "label": line.label,
                "points": [[at.isoformat(), value] for at, value in line.points],
                "states": line.states,
                "note": line.note,
            }
            for line in lines
        ],
    }
    return JsonResponse(document, headers={"Content-Disposition": f'attachment; filename="{slug}.json"'})


def _chart(state: PageState, slug: str) -> tuple[Chart, View, list[Series]]:
    chart = CHARTS.get(slug)
    view = chart.view(state.query, state.kind) if chart else None
    if chart is None or view is None:
        raise Http404
    return chart, view, view.figure.query(state.subject, state.range.window)


def _steps(lines: list[Series]) -> list[tuple[int, Any]]:
    return [(step, at) for step, (at, _) in enumerate(lines[0].points)] if lines else []


def _since_first_value(lines: list[Series]) -> list[tuple[int, Any]]:
    """The steps without those before anything was measured."""
    steps = _steps(lines)
    first = next((step for step, _ in steps if any(line.points[step][1] is not None for line in lines)), 0)
    return steps[first:]


def _cell(line: Series, step: int, view: View) -> str:
    value = line.points[step][1]
    if value is not None:
        return figure_text(value, view.figure.unit)
    return absence(line.states[step] if step < len(line.states) else PointState.UNKNOWN)
