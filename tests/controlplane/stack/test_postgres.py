"""Binaries that the server's account cannot access are copied to a directory that it can access."""

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from controlplane.stack import servers


@pytest.fixture
def inaccessible_binaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


COMPLETE_COPY = {"a_wheel.libs/libpq", "a_wheel/pginstall/bin/postgres", "a_wheel/pginstall/share/last", "lock"}


def test_binaries_and_libraries_are_copied_with_their_relative_paths(inaccessible_binaries, tmp_path):
    assert servers._accessible_binaries(inaccessible_binaries) == tmp_path / "copies/a_wheel/pginstall/bin"
    assert files_below(tmp_path / "copies") == COMPLETE_COPY


def test_a_stack_that_starts_during_a_copy_waits_for_its_end(inaccessible_binaries, tmp_path, monkeypatch):
    copying, resume = threading.Event(), threading.Event()
    original_copytree = shutil.copytree

    def paused_copy(source, target, *more, **options):
        if Path(source).name == "pginstall":
            original_copytree(Path(source) / "bin", Path(target) / "bin")
            copying.set()
            assert resume.wait(timeout=20)
        return original_copytree(source, target, *more, **options)

    monkeypatch.setattr(servers.shutil, "copytree", paused_copy)
    with ThreadPoolExecutor(2) as stacks:
        first = stacks.submit(servers._accessible_binaries, inaccessible_binaries)
        assert copying.wait(timeout=20)
        second = stacks.submit(lambda: files_below(servers._accessible_binaries(inaccessible_binaries).parent))
        assert not second.done()
        resume.set()
        first.result(timeout=20)
        assert second.result(timeout=20) == {"bin/postgres", "share/last"}


def test_an_interrupted_copy_is_repeated(inaccessible_binaries, tmp_path, monkeypatch):
    original_copytree = shutil.copytree

    def failing_copy(source, target, *more, **options):
        if Path(source).name != "pginstall":
            return original_copytree(source, target, *more, **options)
        original_copytree(Path(source) / "bin", Path(target) / "bin")
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(servers.shutil, "copytree", failing_copy)
        with pytest.raises(OSError, match="no space left"):
            servers._accessible_binaries(inaccessible_binaries)
    servers._accessible_binaries(inaccessible_binaries)
    assert files_below(tmp_path / "copies") == COMPLETE_COPY
