"""R22: the next release migrates and is rolled back while this release's pages and REST answer."""

import pytest

from tests.reliability.asking import ENDPOINTS, PAGES, Asking
from tests.reliability.database import RECOVERS_S
from tests.reliability.migrating import EVENTS

pytestmark = pytest.mark.timeout(300)
ROWS = 50_000
NEXT = "tests.reliability.next_release.settings"
COLUMNS = "select count(*) from information_schema.columns where column_name in ('next_note', 'next_figure')"


def test_pages_and_rest_answer_while_the_next_release_migrates_and_is_taken_back(stand, rest, person):
    with stand.sql() as server:
        server.execute(EVENTS.many.format(rows=ROWS))
    begun, columns = len(stand.worker.lines), []
    with Asking(rest, person) as asking:
        for target in ("0001", "zero"):
            stand.manage("migrate", "next_release", target, DJANGO_SETTINGS_MODULE=NEXT)
            stand.until_ticks_resume(RECOVERS_S)
            columns.append(stand.ask(COLUMNS) > 0)
    with stand.sql() as server:
        server.execute("delete from controlplane_event where summary = 'x'")

    assert columns == [True, False]
    assert set(asking.statuses) == {200}
    assert asking.addresses(200) == {*PAGES, *ENDPOINTS}
    assert stand.worker.said("Traceback|Error:", since=begun) == []
