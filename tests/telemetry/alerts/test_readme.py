"""README.md lists the kinds, default settings and inhibitions that the code has."""

from controlplane.schema_fields import settings_of
from telemetry.alerts.kinds import KINDS
from tests.contracts.documents.reading import ROOT

README = ROOT / "telemetry/alerts/README.md"
COMMON = ("for_s", "keep_firing_s")


def shown(value):
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def table():
    """The text between the marks."""
    lines = ["| kind | of | settings | `for_s`, `keep_firing_s` | inhibited by |", "| --- | --- | --- | --- | --- |"]
    for kind in KINDS.values():
        whom = "pool or task group" if kind.group_sources is not None else "pool"
        defaults = {info.field: shown(info.default) for info in settings_of(kind.settings)}
        common = ", ".join(defaults.pop(name) for name in COMMON)
        own = ", ".join(f"`{name}` {value}" for name, value in defaults.items())
        inhibited = ", ".join(f"`{source.value}`" for source in kind.inhibited_by)
        lines.append(f"| `{kind.name}` | {whom} | {own} | {common} | {inhibited} |")
    return "\n".join(lines)


def test_the_readme_s_table_matches_the_kinds():
    text = README.read_text()
    before, _, rest = text.partition("<!-- kinds -->\n")
    after = rest.partition("<!-- /kinds -->")[2]
    expected = f"{before}<!-- kinds -->\n{table()}\n<!-- /kinds -->{after}"
    assert text == expected, f"the table of telemetry/alerts/README.md should be:\n{table()}"
