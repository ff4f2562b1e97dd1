"""The document of each kind of channel lists its declared settings."""

import re
from pathlib import Path

import pytest

from telemetry import channels
from telemetry.channels import KINDS
from telemetry.web.forms import RESERVED_NAMES

FOLDER = Path(channels.__file__).parent


def row(field):
    default = f" Default: `{field.default}`." if field.default is not None else ""
    words = ["yes" if one else "no" for one in (field.required, field.secret)]
    meaning = f"{field.help}{default}".replace("|", "\\|")
    return f"| `{field.name}` | {words[0]} | {words[1]} | {meaning} |"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_readme_lists_the_declared_settings(kind):
    path, rows = FOLDER / f"{kind.name}.md", [row(field) for field in kind.fields]
    text = path.read_text() if path.exists() else ""

    listed = [line for line in text.splitlines() if re.match(r"\| `\w+` \| (yes|no) \|", line)]
    assert listed == rows, "\n".join([f"the rows of {path.name}:", *rows])


def test_the_readme_lists_every_kind():
    text = (FOLDER / "README.md").read_text()

    missing = [name for name in KINDS if not (f"| `{name}` | " in text and f"({name}.md)" in text)]
    assert missing == [], "a row of the table in telemetry/channels/README.md"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_setting_has_the_name_of_something_that_every_channel_has(kind):
    assert not RESERVED_NAMES & {field.name for field in kind.fields}
