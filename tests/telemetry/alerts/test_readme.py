"""README.md lists the kinds, settings and inhibitions that the code has."""

from controlplane.schema_fields import settings_of
from telemetry.alerts.kinds import KINDS
from tests.contracts.documents.reading import ROOT

README = ROOT / "telemetry/alerts/README.md"


def shown(value):
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def tables():
    """What stands between the marks: rewrite it with this where the test says that it differs."""
    lines = []
    for kind in KINDS.values():
        whom = "pool or task group" if kind.group_sources is not None else "pool"
        sources = ", ".join(f"`{source.value}`" for source in kind.inhibited_by)
        inhibited = f" Inhibited by {sources}." if sources else ""
        lines += [f"### `{kind.name}`", "", f"{kind.about} Of a {whom}.{inhibited}", ""]
        lines += ["| setting | default | range | meaning |", "| --- | --- | --- | --- |"]
        for info in settings_of(kind.settings):
            span = f"{info.low:.15g} to {info.high:.15g}"
            unit = f" ({info.unit})" if info.unit else ""
            lines.append(f"| `{info.field}`{unit} | {shown(info.default)} | {span} | {info.help} |")
        lines.append("")
    return "\n".join(lines)


def test_readme_tables_match_the_settings_of_each_kind():
    text = README.read_text()
    stands = text.split("<!-- kinds -->\n")[1].split("<!-- /kinds -->")[0]
    assert stands.strip() == tables().strip()
