"""The binaries of a wheel in a closed folder are copied to where the server's account can start them."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from controlplane.stack import servers


@pytest.fixture
def closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ``bin`` folder of a wheel's installation that the server's account cannot reach."""
    binaries = tmp_path / "site-packages/a_wheel/pginstall/bin"
    for file in (binaries / "postgres", binaries.parent / "share/last", tmp_path / "site-packages/a_wheel.libs/libpq"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(file.name)
    monkeypatch.setattr(servers, "COPIED_BINARIES", tmp_path / "copies")
    monkeypatch.setattr(servers.paths, "can_reach", lambda _path: False)
    return binaries


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


WHOLE = {"a_wheel.libs/libpq", "a_wheel/pginstall/bin/postgres", "a_wheel/pginstall/share/last", "lock"}


def test_the_copy_lies_to_its_libraries_as_the_wheel_does(closed, tmp_path):
    assert servers._accessible(closed) == tmp_path / "copies/a_wheel/pginstall/bin"
    assert files_below(tmp_path / "copies") == WHOLE


def test_a_stack_that_starts_meanwhile_waits_for_the_whole_copy(closed, tmp_path, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    whole_copy = shutil.copytree

    def halting_copy(source, target, *more, **options):
        if Path(source).name == "pginstall":
            whole_copy(Path(source) / "bin", Path(target) / "bin")
            begun.set()
            assert go_on.wait(timeout=20)
        return whole_copy(source, target, *more, **options)

    monkeypatch.setattr(servers.shutil, "copytree", halting_copy)
    with ThreadPoolExecutor(2) as stacks:
        first = stacks.submit(servers._accessible, closed)
        assert begun.wait(timeout=20)
        second = stacks.submit(lambda: files_below(servers._accessible(closed).parent))
        assert not second.done()
        go_on.set()
        first.result(timeout=20)
        assert second.result(timeout=20) == {"bin/postgres", "share/last"}


def test_a_copy_that_was_cut_short_is_made_again(closed, tmp_path, monkeypatch):
    whole_copy = shutil.copytree

    def broken_copy(source, target, *more, **options):
        if Path(source).name != "pginstall":
            return whole_copy(source, target, *more, **options)
        whole_copy(Path(source) / "bin", Path(target) / "bin")
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(servers.shutil, "copytree", broken_copy)
        with pytest.raises(OSError, match="no space left"):
            servers._accessible(closed)
    servers._accessible(closed)
    assert files_below(tmp_path / "copies") == WHOLE
