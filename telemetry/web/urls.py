"""Telemetry's pages."""

from django.urls import path

from telemetry.web.views import alerts, channels, charts, events, metrics, metrics_servers, overview

app_name = "telemetry"
urlpatterns = [
    path("", overview.overview, name="overview"),
    path("live/", overview.overview_live, name="overview-live"),
    path("charts/<slug:slug>/", charts.chart_table, name="chart-table"),
    path("charts/<slug:slug>/figure/", charts.chart_figure, name="chart-figure"),
    path("charts/<slug:slug>.csv", charts.chart_csv, name="chart-csv"),
    path("charts/<slug:slug>.json", charts.chart_json, name="chart-json"),
    path("alerts/", alerts.alert_list, name="alerts"),
    path("alerts/rules/new/", alerts.rule_new, name="rule-new"),
    path("alerts/rules/<int:rule_id>/", alerts.rule_edit, name="rule"),
    path("alerts/rules/<int:rule_id>/remove/", alerts.rule_remove, name="rule-remove"),
    path("channels/", channels.channel_list, name="channels"),
    path("channels/new/", channels.channel_new, name="channel-new"),
    path("channels/<int:channel_id>/test/", channels.channel_test, name="channel-test"),
    path("channels/<int:channel_id>/switch/", channels.channel_switch, name="channel-switch"),
    path("channels/<int:channel_id>/remove/", channels.channel_remove, name="channel-remove"),
    path("deliveries/<uuid:notification_id>/replay/", channels.delivery_replay, name="delivery-replay"),
    path("metrics-servers/", metrics_servers.server_list, name="metrics-servers"),
    path("metrics-servers/new/", metrics_servers.server_new, name="metrics-server-new"),
    path("metrics-servers/<int:server_id>/", metrics_servers.server_edit, name="metrics-server"),
    path("metrics-servers/<int:server_id>/try/", metrics_servers.server_try, name="metrics-server-try"),
    path("metrics-servers/<int:server_id>/remove/", metrics_servers.server_remove, name="metrics-server-remove"),
    path("metrics", metrics.metrics, name="metrics"),
    path("events/", events.event_list, name="events"),
    path("events.csv", events.event_csv, name="events-csv"),
]
