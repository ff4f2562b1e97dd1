"""Links between documents point to existing files and headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contracts.documents.reading import DOCUMENTS, ROOT

BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?:\]\((?!https?:|mailto:)|src(?:set)?=\")([^)\"\s]+)[)\"]")


def headings(document: Path) -> set[str]:
    """Heading anchors of a document."""
    texts = re.findall(r"^#+ (.*)$", BLOCK.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_points_to_an_existing_file_and_heading(document: Path) -> None:
    broken = []
    for link in LINK.findall(BLOCK.sub("", document.read_text())):
        path, _, heading = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (heading and heading not in headings(target)):
            broken.append(link)

    assert broken == []
