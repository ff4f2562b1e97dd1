"""Telemetry's pages."""

from django.urls import path

from telemetry.web.views import charts, events, overview

app_name = "telemetry"
urlpatterns = [
    path("", overview.overview, name="overview"),
    path("live/", overview.overview_live, name="overview-live"),
    path("charts/<slug:slug>/", charts.chart_table, name="chart-table"),
    path("charts/<slug:slug>/figure/", charts.chart_figure, name="chart-figure"),
    path("charts/<slug:slug>.csv", charts.chart_csv, name="chart-csv"),
    path("charts/<slug:slug>.json", charts.chart_json, name="chart-json"),
    path("events/", events.event_list, name="events"),
]
