"""URLs of telemetry's pages."""

from urllib.parse import unquote

from django.urls import path, register_converter

from telemetry.web.views import (
    alerts,
    channels,
    charts,
    events,
    lab,
    links,
    metrics_servers,
    overview,
    reports,
    requests,
    what_ifs,
)


class NameConverter:
    """A name as one part of a URL path. It may contain slashes, because routers and engines report any name: it is
    escaped twice, since servers undo one escape.
    """

    regex = "[^/]+"

    def to_python(self, value: str) -> str:
        return unquote(value)

    def to_url(self, value: str) -> str:
        return str(value).replace("%", "%25").replace("/", "%2F")


register_converter(NameConverter, "name")

app_name = "telemetry"
urlpatterns = [
    path("", overview.overview, name="overview"),
    path("live/", overview.overview_live, name="overview-live"),
    path("pools/<name:pool_name>/", overview.pool_detail, name="pool"),
    path("pools/<name:pool_name>/groups/<name:group_name>/", overview.group_detail, name="group"),
    path("pools/<name:pool_name>/groups/<name:group_name>/live/", overview.group_live, name="group-live"),
    path("replicas/<name:replica_name>/", overview.replica_detail, name="replica"),
    path("replicas/<name:replica_name>/live/", overview.replica_live, name="replica-live"),
    path("status/", alerts.status, name="status"),
    path("start/", links.start_page, name="start"),
    path("start/dismiss/", links.start_dismiss, name="start-dismiss"),
    path("search/", links.search_page, name="search"),
    path("charts/<slug:slug>/", charts.chart_table, name="chart-table"),
    path("charts/<slug:slug>/figure/", charts.chart_figure, name="chart-figure"),
    path("charts/<slug:slug>.csv", charts.chart_csv, name="chart-csv"),
    path("charts/<slug:slug>.json", charts.chart_json, name="chart-json"),
    path("links/", links.link_new, name="links"),
    path("links/<slug:code>/", links.link_page, name="link"),
    path("s/<slug:code>/", links.link_follow, name="link-follow"),
    path("views/", links.views, name="views"),
    path("views/<int:view_id>/remove/", links.view_remove, name="view-remove"),
    path("views/shared/<int:shared_id>/revoke/", links.shared_revoke, name="shared-revoke"),
    path("shared/<str:token>/", links.shared, name="shared"),
    path("shared/<str:token>/live/", links.shared, {"part": "live"}, name="shared-live"),
    path("shared/<str:token>/charts/<slug:part>/figure/", links.shared, name="shared-figure"),
    path("breakdown/", lab.breakdown, name="breakdown"),
    path("breakdown/figures/<slug:slug>/", lab.figure, name="breakdown-figure"),
    path("value/", reports.value_page, name="value"),
    path("value.csv", reports.value_csv, name="value-csv"),
    path("report/", reports.report_page, name="report"),
    path("capacity/", reports.capacity_page, name="capacity"),
    path("capacity/<name:pool_name>/sweep/", reports.capacity_sweep, name="capacity-sweep"),
    path("capacity/<name:pool_name>/figures/<slug:slug>/", reports.capacity_figure, name="capacity-figure"),
    path("what-if/", what_ifs.what_if_list, name="what-ifs"),
    path("what-if/drafts/<int:policy_id>/", what_ifs.what_if_draft, name="what-if-draft"),
    path("what-if/<int:what_if_id>/", what_ifs.what_if_page, name="what-if"),
    path("what-if/<int:what_if_id>/cancel/", what_ifs.what_if_cancel, name="what-if-cancel"),
    path("what-if/<int:what_if_id>/drafts/<int:number>/", what_ifs.what_if_make_draft, name="what-if-make-draft"),
    path("alerts/", alerts.alert_list, name="alerts"),
    path("alerts/<int:alert_id>/", alerts.alert_page, name="alert"),
    path("alerts/<int:alert_id>/acknowledge/", alerts.alert_acknowledge, name="alert-acknowledge"),
    path("alerts/<int:alert_id>/unacknowledge/", alerts.alert_unacknowledge, name="alert-unacknowledge"),
    path("alerts/rules/new/", alerts.rule_new, name="rule-new"),
    path("alerts/rules/<int:rule_id>/", alerts.rule_edit, name="rule"),
    path("alerts/rules/<int:rule_id>/remove/", alerts.rule_remove, name="rule-remove"),
    path("alerts/silences/", alerts.silence_list, name="silences"),
    path("alerts/silences/new/", alerts.silence_new, name="silence-new"),
    path("alerts/silences/<int:silence_id>/end/", alerts.silence_end, name="silence-end"),
    path("prompts/", lab.prompt_list, name="prompts"),
    path("channels/", channels.channel_list, name="channels"),
    path("channels/new/", channels.channel_new, name="channel-new"),
    path("channels/heartbeat/", channels.heartbeat_edit, name="heartbeat"),
    path("channels/heartbeat/remove/", channels.heartbeat_remove, name="heartbeat-remove"),
    path("channels/<int:channel_id>/", channels.channel_edit, name="channel"),
    path("channels/<int:channel_id>/rotate/", channels.channel_rotate, name="channel-rotate"),
    path("channels/<int:channel_id>/test/", channels.channel_test, name="channel-test"),
    path("channels/<int:channel_id>/switch/", channels.channel_switch, name="channel-switch"),
    path("channels/<int:channel_id>/remove/", channels.channel_remove, name="channel-remove"),
    path("metrics-servers/", metrics_servers.server_list, name="metrics-servers"),
    path("metrics-servers/new/", metrics_servers.server_new, name="metrics-server-new"),
    path("metrics-servers/<int:server_id>/", metrics_servers.server_edit, name="metrics-server"),
    path("metrics-servers/<int:server_id>/test/", metrics_servers.server_test, name="metrics-server-test"),
    path("metrics-servers/<int:server_id>/remove/", metrics_servers.server_remove, name="metrics-server-remove"),
    path("deliveries/", channels.delivery_list, name="deliveries"),
    path("deliveries/<uuid:notification_id>/", channels.delivery, name="delivery"),
    path("deliveries/<uuid:notification_id>/replay/", channels.delivery_replay, name="delivery-replay"),
    path("metrics", metrics_servers.metrics, name="metrics"),
    path("prefixes/", lab.prefixes, name="prefixes"),
    path("requests/", requests.request_list, name="requests"),
    path("requests/<name:place>/", requests.request_detail, name="request"),
    path("events/", events.event_list, name="events"),
    path("events.csv", events.event_csv, name="events-csv"),
]
