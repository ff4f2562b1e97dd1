"""The next release migrates and is rolled back while this release's pages and REST answer."""

from tests.reliability.migrating import EVENTS
from tests.reliability.outages import ENDPOINTS, PAGES, RECOVERS_S, Polling

ROWS = 50_000
NEXT = "tests.reliability.next_release.settings"
COLUMNS = "select count(*) from information_schema.columns where column_name in ('next_note', 'next_figure')"


def test_pages_and_rest_respond_while_the_next_release_migrates_and_is_rolled_back(stand, rest, browser):
    with stand.sql() as server:
        server.execute(EVENTS.insert_many.format(rows=ROWS))
    start, columns = len(stand.worker.lines), []
    with Polling(rest, browser) as polling:
        for target in ("0001", "zero"):
            stand.manage("migrate", "--skip-checks", "next_release", target, DJANGO_SETTINGS_MODULE=NEXT)
            stand.until_ticks_resume(RECOVERS_S)
            columns.append(stand.query(COLUMNS) > 0)
    with stand.sql() as server:
        server.execute("delete from controlplane_event where summary = 'x'")

    assert columns == [True, False]
    assert set(polling.statuses) == {200}
    assert polling.addresses(200) == {*PAGES, *ENDPOINTS}
    assert stand.worker.log_lines("Traceback|Error:", since=start) == []
