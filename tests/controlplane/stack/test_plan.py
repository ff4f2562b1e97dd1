"""Which processes the local stack has, by its environment variables."""

import pytest

from controlplane.stack import plan
from controlplane.stack.plan import StackSettings

URL = "http://gpu-1:8000"


@pytest.fixture
def settings_of(tmp_path, monkeypatch):
    """Settings from environment variables without their prefix."""

    def read(**variables: str) -> StackSettings:
        for name, value in variables.items():
            monkeypatch.setenv(f"WARMPATH_{name}", value)
        return StackSettings.from_environment(tmp_path)

    return read


def test_named_replicas_take_the_place_of_stand_ins_and_get_no_generated_traffic(settings_of):
    settings = settings_of(REPLICAS=URL)

    assert plan.standins(settings) == plan.traffic_player(settings) == []
    assert plan.preparation(settings).command[-2:] == ["--replica", URL]


def test_named_replicas_get_the_traffic_of_a_trace(settings_of, tmp_path):
    (tmp_path / "trace.jsonl").touch()
    (player,) = plan.traffic_player(settings_of(REPLICAS=URL, TRACE=str(tmp_path / "trace.jsonl")))

    assert player.command[-2:] == ["--trace", str(tmp_path / "trace.jsonl")]


def test_stand_ins_that_serve_a_trace_hold_its_blocks_and_get_it_at_a_rate_they_can_serve(settings_of, tmp_path):
    (tmp_path / "trace.jsonl").touch()
    settings = settings_of(DEMO_REPLICAS="2", TRACE=str(tmp_path / "trace.jsonl"))
    (player,) = plan.traffic_player(settings)

    assert [child.command[-2:] for child in plan.standins(settings)] == [["--blocks", "128001"]] * 2
    assert player.command[-2:] == ["--tokens-per-s", "11200.0"]
    assert plan.preparation(settings).command[-1] == "--demo"


def test_the_router_is_imported_from_the_folder_of_the_compiled_one(settings_of):
    *_, plain = plan.control_plane(settings_of())
    *_, compiled = plan.control_plane(settings_of(COMPILED="/compiled"))

    assert "PYTHONPATH" not in plain.environment
    assert compiled.environment["PYTHONPATH"] == "/compiled"
    assert compiled.environment["PYTHONSAFEPATH"] == "1"
