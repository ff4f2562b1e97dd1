"""``python -m routing simulate``, from the command line."""

from __future__ import annotations

import gzip
import json
import os
import pty
import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

import pytest

from routing.__main__ import main
from routing.balancing.strategies.registry import STRATEGIES

ROOT = Path(__file__).parents[3]
COMMAND = "python -m routing simulate"
Run = Callable[..., tuple[int, str, str]]


def row(at_ms: float, tokens: int, output: int, *ids: int) -> str:
    return json.dumps({"timestamp": at_ms, "input_length": tokens, "output_length": output, "hash_ids": ids})


ROWS = [row(0, 1100, 3, 0, 1, 2), row(0, 1100, 3, 0, 1, 2), row(60_000, 1600, 3, 0, 1, 9, 10), row(60_000, 400, 3, 0)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in a folder with a trace and policies; its status, output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text("\n".join(ROWS) + "\n")
    (tmp_path / "policy.json").write_text('{"strategy": "round_robin"}')

    def run(**options: object) -> tuple[int, str, str]:
        arguments = {"trace": "trace.jsonl", "policy": "policy.json", "replicas": 2, "blocks": 50} | options
        argv = ["simulate"]
        for name, value in arguments.items():
            for item in value if isinstance(value, list) else [value]:
                argv += [f"--{name.replace('_', '-')}", *([] if item is True else [str(item)])]
        try:
            status = main(argv)
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_one_policy_as_json_keeps_the_contract(run):
    status, out, err = run(json=True)

    assert (status, err) == (0, "")
    report = json.loads(out)
    assert {"requests", "token_hit_rate", "ttft_s", "load_max_over_mean"} <= report.keys()
    assert report["ttft_s"].keys() == {"mean", "p50", "p95", "p99"}
    assert report["requests"] == 4
    # round robin: each replica has one of the two pairs; its second request hits the system prompt and one more block
    assert report["token_hit_rate"] == pytest.approx(1024 / (1100 + 1100 + 1600 + 400))
    assert report["ttft_s"]["p50"] == pytest.approx(0.010 + (1600 - 1024) / 8000, rel=0.5)
    assert report["load_max_over_mean"] == 1.0
    assert report["reasons"] == {"round_robin": 4}
    assert (report["routers"], report["sharing"], report["arrivals"]) == (1, "none", "random")


def test_each_of_several_policies_has_a_row(run, tmp_path):
    (tmp_path / "other.json").write_text('{"strategy": "least_load"}')

    status, out, _ = run(policy=["policy.json", "other.json"])

    header, *lines = out.splitlines()
    assert status == 0
    assert header.split() == ["policy", "hit", "%", "mean", "s", "p50", "p95", "p99", "max/mean"]
    assert [line.split()[0] for line in lines] == ["policy.json", "other.json"]

    _, out, _ = run(policy=["policy.json", "other.json"], json=True)
    assert [report["strategy"] for report in json.loads(out)] == ["round_robin", "least_load"]


@pytest.mark.parametrize("strategy", sorted(kind.name for kind in STRATEGIES))
def test_every_strategy_can_be_simulated(run, tmp_path, strategy):
    (tmp_path / "policy.json").write_text(json.dumps({"strategy": strategy}))

    status, out, _ = run(json=True, replicas=3)

    report = json.loads(out)
    assert (status, report["strategy"], report["requests"]) == (0, strategy, 4)
    assert sum(report["reasons"].values()) == sum(replica["requests"] for replica in report["replicas"]) == 4


def test_a_time_scale_of_two_plays_twice_as_fast(run):
    slow, fast = (json.loads(run(time_scale=scale, json=True)[1]) for scale in (1, 2))

    # Row 4 comes half a gap after row 3, at 90 s.
    assert slow["ended_s"] - fast["ended_s"] == pytest.approx(45, rel=0.01)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("policy.json", '{"strategy": "nearest"}', "policy.json: .*nearest"),
        ("policy.json", '{"strategy": "prefix_hash", "slack_s": -1}', r"policy.json: \$.slack_s: .*>= 0"),
        ("policy.json", '{"strategy": "prefix_hash", "load_factor": 2.0}', "load_factor was removed; slack_s"),
        ("policy.json", '{"strategy": "prefix_hash", "boundary": "messages"}', "policy.json: .*no text"),
        ("policy.json", '{"strategy": "round_robin", "colour": 1}', "policy.json: .*colour"),
        ("policy.json", "round_robin", "policy.json: "),
        ("trace.jsonl", ROWS[0] + "\n" + row(-1, 1, 1, 0), r"trace.jsonl, line 2: .*\$.timestamp"),
        ("trace.jsonl", row(0, 1100, 3, 0), "trace.jsonl, line 1: 1 hash_ids for 3 blocks"),
        ("trace.jsonl", row(0, 400, 3, 2**64), "trace.jsonl, request 1: .*2\\*\\*64"),
        ("trace.jsonl", "\n\n", "trace.jsonl: the trace has no requests"),
        ("trace.jsonl", row(0, 30_000, 3, *range(59)), "request 1 needs 59 blocks of 512 tokens"),
    ],
)
def test_an_error_names_the_file_and_the_line_or_field(run, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)

    status, out, err = run(json=True)

    assert (status, out) == (2, "")
    assert re.match(f"simulate: .*{message}", err)
    assert err.count("\n") == 1


def test_an_error_names_a_missing_or_truncated_file(run, tmp_path):
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress("\n".join(ROWS).encode())[:-20])

    assert run(trace="nowhere.jsonl")[2] == "simulate: nowhere.jsonl: No such file or directory\n"
    assert run(policy="nowhere.json")[2] == "simulate: nowhere.json: No such file or directory\n"
    assert run(trace="torn.jsonl.gz")[2].startswith("simulate: torn.jsonl.gz: truncated or corrupt gzip file")


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("replicas", 0, "'0' is not a whole number from 1"),
        ("blocks", "many", "'many' is not a whole number"),
        ("time_scale", 0, "a number above 0"),
        ("step_s", -1, "'-1' is not a number from 0"),
        ("prefill_rate", "nan", "'nan' is not a number"),
        ("tier", "cpu", "'cpu' is not NAME:BLOCKS"),
        ("tier", "tape:100", "the name cpu or remote"),
        ("tier", "cpu:100:5", "NAME:BLOCKS:LATENCY_MS:GB_PER_S"),
        ("tier", "cpu:0", "'0' is not a whole number"),
        ("tier", "cpu:100:5:0", "a number above 0"),
        ("kv_bytes_per_token", 0, "'0' is not a whole number"),
        ("routers", 0, "'0' is not a whole number from 1 to 64"),
        ("routers", 65, "'65' is not a whole number from 1 to 64"),
        ("sharing", "gossip", "invalid choice: 'gossip' .*none.*events.*state"),
        ("arrivals", "best", "invalid choice: 'best' .*random.*worst"),
        ("delay_ms", -1, "'-1' is not a number from 0 to 1e9"),
    ],
)
def test_an_error_names_an_option_out_of_its_range(run, option, value, message):
    status, out, err = run(**{option: value})

    assert (status, out) == (2, "")
    assert re.search(f"--{option.replace('_', '-')}: .*{message}", err)


def test_cache_tiers_hold_what_the_gpu_evicts(run):
    rows = [row(10_000 * at, 1600, 3, first, first + 1, first + 2, first + 3) for at, first in enumerate((0, 9, 0))]
    Path("trace.jsonl").write_text("\n".join(rows))

    def replayed(*tiers: str) -> dict[str, Any]:
        return json.loads(run(replicas=1, blocks=4, json=True, tier=list(tiers))[1])

    assert replayed()["hit_tokens"] == {"gpu": 0}
    assert replayed("cpu:100")["hit_tokens"] == {"gpu": 0, "cpu": 1536}
    assert replayed("cpu:2:0:25", "remote:100:0:25")["hit_tokens"] == {"gpu": 0, "cpu": 1024, "remote": 512}
    assert replayed("cpu:100:1000:25")["hit_tokens"] == {"gpu": 0, "cpu": 0}  # slower than prefill
    assert replayed("cpu:100")["ttft_s"]["mean"] < replayed()["ttft_s"]["mean"]

    header, line = run(replicas=1, blocks=4, tier=["cpu:100"])[1].splitlines()
    assert header.split()[-2:] == ["cpu", "%"]
    assert float(line.split()[-1]) == pytest.approx(100 * 1536 / 4800, abs=0.01)
    assert (
        run(tier=["cpu:100", "cpu:200"])[2] == "simulate: --tier: a name is given twice; each tier has its own name\n"
    )


def test_the_command_in_the_readme_works(tmp_path, monkeypatch, capsys):
    document = (ROOT / "routing/replay/README.md").read_text()
    shown = re.search(rf"^{COMMAND} .*?[^\\]$", document, re.MULTILINE | re.DOTALL)
    policy = re.search(r"```json\n(.*?)```", document, re.DOTALL)
    assert shown
    assert policy
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conversation_trace.jsonl.gz").write_bytes(gzip.compress("\n".join(ROWS).encode()))
    (tmp_path / "policy.json").write_text(policy.group(1))

    assert main(shown.group().replace("\\\n", " ").split()[3:]) == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 4


def test_a_long_run_shows_its_progress_only_on_a_terminal(tmp_path):
    rows = [row(1000 * at, 400, 3, 0) for at in range(30_000)]
    (tmp_path / "trace.jsonl").write_text("\n".join(rows))
    (tmp_path / "policy.json").write_text('{"strategy": "round_robin"}')
    argv = [sys.executable, "-m", "routing", "simulate", "--replicas=1", "--blocks=9"]
    argv += [f"--trace={tmp_path / 'trace.jsonl'}", f"--policy={tmp_path / 'policy.json'}"]
    master_fd, slave_fd = pty.openpty()

    with Popen(argv, cwd=ROOT, stdout=DEVNULL, stderr=slave_fd) as process:  # closed by its end
        os.close(slave_fd)
        shown = b""
        try:
            while piece := os.read(master_fd, 65_536):
                shown += piece
        except OSError:  # reading from a terminal fails after its last writer has closed it
            pass
        finally:
            os.close(master_fd)

    assert process.returncode == 0
    assert b"reading" in shown
    assert shown.endswith(b"\r\x1b[K")


@pytest.mark.parametrize("sharing", ["events", "state"])
def test_several_routers_place_all_requests_and_are_named_in_the_report(run, tmp_path, sharing):
    (tmp_path / "policy.json").write_text('{"strategy": "lowest_cost"}')

    status, out, err = run(json=True, routers=3, sharing=sharing, arrivals="worst", delay_ms=500)

    report = json.loads(out)
    assert (status, err) == (0, "")
    assert (report["routers"], report["sharing"], report["arrivals"]) == (3, sharing, "worst")
    assert sum(report["reasons"].values()) == report["requests"] == 4
    counts = [replica["requests"] for replica in report["replicas"]]
    assert report["load_cv"] == pytest.approx(abs(counts[0] - counts[1]) / sum(counts))
