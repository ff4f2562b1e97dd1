from controlplane.models import EventKind
from controlplane.services.events import record_event
from controlplane.services.pools import create_pool


def test_events_page_by_plain_links_in_a_fixed_number_of_queries(visitor, django_assert_num_queries):
    for number in range(120):
        record_event(EventKind.REPLICA_UP, f"event number {number}.")

    with django_assert_num_queries(5):
        first = visitor.get("/events/").text

    assert "event number 119." in first
    assert "event number 69." not in first
    older = first[first.index("?before=") :].split('"')[0]
    second = visitor.get(f"/events/{older}").text
    assert "event number 69." in second
    assert "event number 70." not in second


def test_events_are_filtered_by_kind_and_pool(visitor):
    pool = create_pool("chat")
    record_event(EventKind.REPLICA_DOWN, "gpu-1 is down.", pool=pool)
    record_event(EventKind.REPLICA_DOWN, "gpu-9 is down.")

    text = visitor.get("/events/?kind=replica_down&pool=chat").text

    assert "gpu-1 is down." in text
    assert "gpu-9 is down." not in text
    assert "was created" not in text


def test_an_empty_list_says_the_next_step(visitor):
    assert "Nothing happened yet" in visitor.get("/events/").text
    assert "No event matches" in visitor.get("/events/?kind=replica_up").text


def test_a_page_mark_that_is_no_number_is_no_error(visitor):
    assert visitor.get("/events/?before=%27;--").status_code == 200


def test_a_filter_that_the_database_could_not_take_finds_nothing(visitor):
    assert "No event matches" in visitor.get("/events/?pool=a%00b").text
