import pytest

from controlplane.services.fleet.pools import create_pool
from telemetry.models import Alert, AlertRule, AlertState
from telemetry.services.alerts import create_rule, ensure_default_rules
from tests.fleet_history import drop_alert


def test_an_open_alert_says_how_far_where_and_what_changed_last(visitor, fleet, noon):
    drop_alert(fleet, noon)

    text = visitor.get("/alerts/").text

    assert "31.0 %, 33.0 points below its baseline" in text
    assert "396,000" in text  # tokens computed anew
    assert "Last change before it" in text
    assert "gpu-1:" in text
    assert "summaries:" in text
    assert '<span class="badge bad">firing</span>' in text


def test_every_page_counts_what_fires(visitor, fleet, noon):
    assert "firing</span></span>" not in visitor.get("/fleet/").text
    drop_alert(fleet, noon)
    assert "firing</span></span>" in visitor.get("/fleet/").text


def test_a_refresh_is_the_part_that_changes(visitor, fleet, noon):
    drop_alert(fleet, noon)

    text = visitor.get("/alerts/", headers={"HX-Request": "true"}).text

    assert "points below" in text
    assert "<html" not in text


def test_without_rules_the_page_says_the_next_step(visitor):
    assert "Add a pool" in visitor.get("/alerts/").text
    create_pool("chat")
    assert "Add a rule" in visitor.get("/alerts/").text


def test_the_list_costs_the_same_whatever_its_length(visitor, fleet, noon, django_assert_num_queries):
    drop_alert(fleet, noon)
    for number in range(5):
        create_rule(fleet, name=f"rule {number}")

    with django_assert_num_queries(7):
        visitor.get("/alerts/")


def test_a_rule_is_added_and_changed(visitor, noon):
    pool = create_pool("chat")
    visitor.post("/alerts/rules/new/", {"name": "Big drop", "pool": pool.pk, "enabled": "on", "drop_points": "30"})
    rule = AlertRule.objects.get(name="Big drop")
    assert (rule.settings, rule.enabled) == ({"drop_points": 30.0}, True)

    visitor.post(f"/alerts/rules/{rule.pk}/", {"name": "Bigger drop", "drop_points": "40"})
    rule.refresh_from_db()
    assert (rule.name, rule.settings, rule.enabled) == ("Bigger drop", {"drop_points": 40.0}, False)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("drop_points", "200", "of at most 100"),
        ("window_s", "soon", "Expected a number."),
        ("baseline_s", "61", "at least 3 times window_s"),
    ],
)
def test_a_setting_that_no_rule_can_have_is_refused_beside_its_field(visitor, field, value, words):
    rule = ensure_default_rules(create_pool("chat"))

    answer = visitor.post(f"/alerts/rules/{rule.pk}/", {"name": "x", field: value})

    assert answer.status_code == 422
    error = answer.text.split(f'id="id_{field}_error">')[1].split("<")[0]
    assert words in error


def test_removing_a_rule_says_first_that_nobody_is_told_any_more(visitor, fleet, noon):
    alert = drop_alert(fleet, noon)
    path = f"/alerts/rules/{alert.rule_id}/remove/"

    assert "Nobody is told any more" in visitor.get(path).text
    assert Alert.objects.get().state == AlertState.FIRING
    visitor.post(path)

    assert not AlertRule.objects.filter(pk=alert.rule_id).exists()
