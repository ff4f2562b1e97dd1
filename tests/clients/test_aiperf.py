"""AIPerf, a load generator, replays a trace in Mooncake's format through the router."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.clients.servers import KEY, MODEL, Servers

REVISION = "0" * 40
REQUESTS = 10
SHARED_BLOCKS = [0, 1]  # of 512 tokens
TIMEOUT_S = 110


def write_tokenizer(cache: Path) -> None:
    """Write a byte-level tokenizer as a Hugging Face cache, the only local format that all parts of AIPerf read."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox " * 10], trainer)
    repository = cache / "hub" / "models--tests--tiny"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    tokenizer.save(str(snapshot / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[0], "bos_token": special[0]}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(settings))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)


def write_trace(file: Path) -> None:
    rows = (
        {
            "timestamp": 100 * number,
            "input_length": 1100 + 10 * number,
            "output_length": 8,
            "hash_ids": [*SHARED_BLOCKS, 10 + number],
        }
        for number in range(REQUESTS)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_trace_is_replayed_without_an_error(servers: Servers, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "cache")
    write_trace(tmp_path / "trace.jsonl")
    options = {
        "--model": MODEL,
        "--url": servers.router,
        "--api-key": KEY,
        "--endpoint-type": "chat",
        "--input-file": tmp_path / "trace.jsonl",
        "--custom-dataset-type": "mooncake_trace",
        "--tokenizer": "tests/tiny",
        "--artifact-dir": tmp_path,
        "--ui": "none",
    }
    flags = ["--streaming", "--fixed-schedule", "--no-gpu-telemetry", "--no-server-metrics"]
    command = [Path(sys.executable).with_name("aiperf"), "profile", *flags]
    command += [part for option in options.items() for part in option]
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )

    assert process.returncode == 0, process.stdout + process.stderr
    records = [json.loads(line) for line in (tmp_path / "profile_export.jsonl").read_text().splitlines()]
    assert len(records) == REQUESTS
    assert not [record["error"] for record in records if record.get("error")]
    assert all(record["metrics"]["time_to_first_token"]["value"] > 0 for record in records)
    hits, queries = (
        sum(replica.metric(f"vllm:prefix_cache_{kind}_total") for replica in servers.replicas)
        for kind in ("hits", "queries")
    )
    assert hits > 0.5 * queries * (REQUESTS - 1) / REQUESTS
