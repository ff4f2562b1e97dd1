"""``python -m routing picker`` as a process, and its settings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from routing.settings import SettingsError, read_picker_settings, read_settings
from tests.routing.picker.streams import EnvoyStream, connected, health, replicas
from tests.routing.proxy.harness import config
from tests.routing.workers.harness import serving

CONFIG = ["--config", "fleet.json", "--name", "picker-1"]  # of the README's command


def test_the_port_and_the_number_of_fallbacks_have_variables_of_their_own():
    defaults = read_picker_settings(CONFIG, {})
    environ = {"WARMPATH_PICKER_PORT": "9100", "WARMPATH_PICKER_FALLBACKS": "0", "WARMPATH_ROUTER_PORT": "1"}
    settings = read_picker_settings(CONFIG, environ)

    assert (defaults.port, defaults.fallbacks, defaults.workers) == (9002, 2, 1)
    assert (settings.port, settings.fallbacks) == (9100, 0)
    assert read_settings(CONFIG, environ).port == 1
    with pytest.raises(SettingsError, match="WARMPATH_PICKER_FALLBACKS: expected a number of endpoints from 0 to 8"):
        read_picker_settings(CONFIG, {"WARMPATH_PICKER_FALLBACKS": "9"})


def test_a_router_has_no_fallbacks_and_a_picker_no_workers(capsys):
    for read, option in ((read_settings, "--fallbacks"), (read_picker_settings, "--workers")):
        with pytest.raises(SystemExit):
            read([*CONFIG, option, "1"], {})
        assert f"unrecognized arguments: {option}" in capsys.readouterr().err


async def test_the_command_serves_until_a_signal(tmp_path):
    async with serving(tmp_path, config(replicas(1)), subcommand="picker") as picker:
        async with connected(picker.port) as channel:
            assert await health(channel, "readiness") == 1
            assert (await EnvoyStream(channel).request()).endpoints == ["127.0.0.1:1"]
        assert await picker.end() == 0


def test_without_its_packages_the_command_names_the_extra(tmp_path):
    (tmp_path / "grpc.py").write_text("raise ImportError('no grpc')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"}
    command = [sys.executable, "-m", "routing", "picker", *CONFIG]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    assert process.returncode == 2
    assert "warmpath[picker]" in process.stderr
