"""Telemetry's pages."""

from django.urls import path

from telemetry.web.views import (
    alerts,
    channels,
    charts,
    events,
    groups,
    metrics,
    metrics_servers,
    overview,
    pools,
    replicas,
)

app_name = "telemetry"
urlpatterns = [
    path("", overview.overview, name="overview"),
    path("live/", overview.overview_live, name="overview-live"),
    path("pools/<str:pool_name>/", pools.pool_detail, name="pool"),
    path("pools/<str:pool_name>/live/", pools.pool_live, name="pool-live"),
    path("pools/<str:pool_name>/groups/<str:group_name>/", groups.group_detail, name="group"),
    path("pools/<str:pool_name>/groups/<str:group_name>/live/", groups.group_live, name="group-live"),
    path("replicas/<str:replica_name>/", replicas.replica_detail, name="replica"),
    path("replicas/<str:replica_name>/live/", replicas.replica_live, name="replica-live"),
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
