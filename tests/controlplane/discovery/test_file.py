"""File discovery."""

import json
import os
import threading

import msgspec
import pytest

from controlplane.discovery.file import FileKind, FileSettings
from controlplane.discovery.targets import PollError, PollLimits
from controlplane.egress import fleet_rules

GROUPS = [
    {"targets": ["10.0.0.1:8000", "10.0.0.2:8000"], "labels": {"rack": "a"}},
    {"targets": ["10.0.0.3:8000"], "labels": {"replica": "gpu-3", "__scheme__": "HTTPS"}},
]
YAML = """
# written by hand
- targets: ["10.0.0.1:8000", "10.0.0.2:8000"]
  labels: {rack: a}
- targets:
    - 10.0.0.3:8000
  labels:
    replica: gpu-3
    __scheme__: https
"""


@pytest.fixture
def folder(tmp_path, settings):
    directory = tmp_path / "targets"
    directory.mkdir()
    settings.DISCOVERY_DIR = str(directory)
    return directory


def poll(path="fleet.json", *, max_targets=100, **settings):
    settings = msgspec.convert({"path": path, **settings}, FileSettings)
    return FileKind().poll(settings, "", PollLimits(fleet_rules(), 5.0, max_targets))


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.mark.parametrize(("name", "content"), [("fleet.json", GROUPS), ("fleet.yml", YAML), ("fleet.yaml", YAML)])
def test_targets_are_read_with_their_labels(folder, name, content):
    write(folder / name, content)
    result = poll(name)
    assert [(target.key, target.url) for target in result.targets] == [
        ("10.0.0.1:8000", "http://10.0.0.1:8000"),
        ("10.0.0.2:8000", "http://10.0.0.2:8000"),
        ("gpu-3", "https://10.0.0.3:8000"),
    ]
    assert result.targets[0].labels == {"rack": "a"}


def test_a_host_in_upper_case_is_the_same_engine(folder):
    write(folder / "fleet.json", [{"targets": ["GPU-1:8000"]}, {"targets": ["gpu-1:8000"]}])
    result = poll()
    assert [target.url for target in result.targets] == ["http://gpu-1:8000"]
    assert len(result.rejections) == 1


def test_a_file_that_is_replaced_by_rename_is_always_read_whole(folder):
    """While a writer keeps replacing the file, each poll reads one complete version."""
    write(folder / "fleet.json", [{"targets": [f"10.0.1.{n}:8000" for n in range(1, 60)]}])
    stop = threading.Event()

    def keep_writing():
        version = 0
        while not stop.is_set():
            version += 1
            targets = [f"10.0.{version % 2}.{n}:8000" for n in range(1, 60)]
            (folder / "next").write_text(json.dumps([{"targets": targets}]))
            (folder / "next").replace(folder / "fleet.json")

    writer = threading.Thread(target=keep_writing)
    writer.start()
    try:
        for _ in range(200):
            keys = {target.key for target in poll().targets}
            assert len(keys) == 59
            assert len({key.rpartition(".")[0] for key in keys}) == 1
    finally:
        stop.set()
        writer.join(timeout=10)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("fleet.json", json.dumps(GROUPS)[:-20], "cannot be parsed"),  # truncated
        ("fleet.json", "", "cannot be parsed"),
        ("fleet.yml", "- targets: [", "cannot be parsed"),
        ("fleet.yml", "a: &a [*a, *a]", "Expected a list of groups"),
        ("fleet.yml", "!!python/object/apply:os.system ['true']", "cannot be parsed"),
        ("fleet.json", "[" * 100_000, "cannot be parsed"),
        ("fleet.json", '{"targets": []}', "Expected a list of groups"),
        ("fleet.json", '["10.0.0.1:8000"]', "Group 1: expected an object"),
        ("fleet.json", '[{"targets": "10.0.0.1:8000"}]', "Group 1: expected an object"),
        ("fleet.json", '[{"targets": [], "labels": 3}]', "Group 1: expected labels"),
        ("fleet.json", '[{"targets": ["10.0.0.1:8000/metrics?x", 7, null]}]', "No target is valid"),
        ("fleet.json", '[{"targets": ["169.254.169.254:80"]}]', "link-local"),
        ("fleet.json", "x" * (1 << 20) + "x", "longer than"),
    ],
)
def test_an_invalid_file_is_a_failed_poll_with_the_reason(folder, name, content, message):
    write(folder / name, content)
    with pytest.raises(PollError, match=message) as failed:
        poll(name)
    assert str(failed.value).isprintable()


def test_yaml_aliases_that_expand_beyond_the_limit_are_rejected(folder):
    group = "- &g {targets: [" + ",".join(f"10.0.0.{n}:8000" for n in range(50)) + "]}\n"
    write(folder / "fleet.yml", group + "- *g\n" * 5000)
    with pytest.raises(PollError, match="limit is 100"):
        poll("fleet.yml")


def test_more_targets_than_allowed_are_rejected(folder):
    write(folder / "fleet.json", [{"targets": [f"10.{n // 250}.{n % 250}.1:8000" for n in range(10_000)]}])
    with pytest.raises(PollError, match="limit is 100"):
        poll()


@pytest.mark.parametrize(
    "path", ["../secret.json", "a/../../secret.json", "link.json", "out/secret.json", "nowhere.json"]
)
def test_a_path_outside_the_folder_is_rejected(folder, path):
    write(folder.parent / "secret.json", GROUPS)
    (folder / "a").mkdir()
    (folder / "link.json").symlink_to(folder.parent / "secret.json")
    (folder / "out").symlink_to(folder.parent)
    with pytest.raises(PollError, match=r"outside WARMPATH_DISCOVERY_DIR|no such file"):
        poll(path)


def test_a_link_within_the_folder_is_followed_as_kubernetes_volumes_require(folder):
    (folder / "..2026").mkdir()
    write(folder / "..2026" / "fleet.json", GROUPS)
    (folder / "..data").symlink_to("..2026")
    (folder / "fleet.json").symlink_to("..data/fleet.json")
    assert len(poll().targets) == 3


def test_a_pipe_is_rejected_without_waiting(folder):
    os.mkfifo(folder / "fleet.json")
    with pytest.raises(PollError, match="not a regular file"):
        poll()


def test_no_file_is_read_without_a_configured_folder(settings):
    settings.DISCOVERY_DIR = ""
    with pytest.raises(PollError, match="WARMPATH_DISCOVERY_DIR"):
        poll()


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/x.json", "fleet.txt", "a\nb.json", ""])
def test_a_path_with_invalid_syntax_is_rejected_by_the_settings(path):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"path": path}, FileSettings)
