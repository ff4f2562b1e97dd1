"""What a router keeps on disk is whole, whatever happens while it is written."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from routing.proxy.last_known_good import CURRENT, PREVIOUS, LastKnownGood

PIPES = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
WRITER = """
import sys
from pathlib import Path
from routing.proxy.last_known_good import LastKnownGood
files = LastKnownGood(Path(sys.argv[1]))
number = int(sys.argv[2])
print("ready", flush=True)
while len(sys.argv) == 3 or sys.stdin.readline():
    number += 1
    files.save(b"%d:" % number + b"x" * (number * 37 % 9000))
    print(number, flush=True)
"""


def test_a_full_disk_leaves_what_was_kept(tmp_path: Path) -> None:
    files = LastKnownGood(tmp_path)
    files.save(b"first")
    files.save(b"second")
    fresh = tmp_path / f"{CURRENT}.new"
    fresh.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        files.save(b"third")
    assert files.load() == [b"second", b"first"]
    fresh.unlink()
    files.save(b"third")
    assert files.load() == [b"third", b"second"]


def test_processes_that_share_a_folder_leave_whole_documents(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), number, "asked"], text=True, **PIPES)
        for number in ("1000000", "2000000")
    ]
    files, seen = LastKnownGood(tmp_path), 0
    for _ in range(100):
        for writer in writers:
            assert writer.stdout.readline(), writer.communicate(timeout=10)[1]
            writer.stdin.write("\n")
            writer.stdin.flush()
        for document in files.load():
            number, _, text = document.partition(b":")
            assert text == b"x" * (int(number) * 37 % 9000)
            seen += 1
    for writer in writers:
        assert writer.communicate(timeout=10) == (writer.args[-2].replace("000000", "000100\n"), "")
    assert seen > 100
    assert len(files.load()) == 2


@pytest.mark.parametrize("damage", ["torn", "flipped", "emptied", "missing"])
def test_a_damaged_file_is_passed_over_for_the_one_before(damage: str, tmp_path: Path) -> None:
    files = LastKnownGood(tmp_path)
    assert files.load() == []
    files.save(b"first")
    files.save(b"second")
    assert files.load() == [b"second", b"first"]
    current = tmp_path / CURRENT
    data = current.read_bytes()
    if damage == "missing":
        current.unlink()
    else:
        current.write_bytes({"torn": data[:-1], "flipped": data[:-1] + b"X", "emptied": b""}[damage])
    assert files.load() == [b"first"]
    files.save(b"third")
    assert files.load() == [b"third", b"first"]
    (tmp_path / PREVIOUS).write_bytes(b"")
    current.write_bytes(b"")
    assert files.load() == []


def test_a_document_that_has_its_name_stays_though_the_folder_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files, really_flush = LastKnownGood(tmp_path), os.fsync
    files.save(b"first")

    def flush(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        really_flush(handle)

    monkeypatch.setattr(os, "fsync", flush)
    files.save(b"second")
    assert files.load() == [b"second", b"first"]
    assert "not_flushed" in caplog.text


def test_killing_the_writer_at_any_moment_leaves_a_whole_document(tmp_path: Path) -> None:
    """R2 in short."""
    chance = random.Random(5)
    files, saved = LastKnownGood(tmp_path), 0
    for _ in range(40):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(saved)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout
        assert writer.stdout.readline() == "ready\n"
        for _ in range(chance.randrange(1, 8)):
            saved = int(writer.stdout.readline())
        for _ in range(chance.randrange(20_000)):
            pass  # somewhere inside a write
        writer.send_signal(signal.SIGKILL)
        reported = writer.stdout.read().split()  # what was read ahead too, which communicate() passes over
        writer.stdout.close()
        writer.wait(timeout=10)
        saved = int(reported[-1]) if reported else saved
        documents = files.load()
        numbers = [int(document.partition(b":")[0]) for document in documents]
        assert numbers[0] in {saved, saved + 1}
        assert all(
            document.partition(b":")[2] == b"x" * (n * 37 % 9000)
            for document, n in zip(documents, numbers, strict=True)
        )
        saved = numbers[0]


def test_a_torn_file_is_passed_over_with_a_word_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = LastKnownGood(tmp_path)
    files.save(b"one")
    files.save(b"two")
    assert files.load() == [b"two", b"one"]
    assert caplog.text == ""
    (tmp_path / "config").write_bytes((tmp_path / "config").read_bytes()[:-1])
    assert files.load() == [b"one"]
    assert "last_known_good_corrupt file=config" in caplog.text
