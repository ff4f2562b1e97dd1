"""Commands in documents, and the test that executes each.

``make check`` fails for a command without an entry here and for an entry whose test does not exist.
"""

import re

from tests.contracts.documents.reading import ROOT, shown

EXECUTED_BY: dict[str, str] = {
    "make run": "tests/end_to_end/test_tour.py",
    "make test": "tests/contracts/documents/test_commands.py",  # this test run
    "make test-full": "tests/contracts/documents/test_commands.py",
    "make check": "tests/contracts/documents/test_commands.py",  # runs this file as a part of it
    "make bench": "tests/benchmarks/test_benchmarks.py",
    "python -m tests.benchmarks literature": "tests/benchmarks/test_literature.py",
    "python -m tests.benchmarks literature --write": "tests/benchmarks/test_literature.py",
    "make compile": "tests/compiled/test_wheel.py",
    "make build": "tests/compiled/test_wheel.py",
    "make images": "tests/end_to_end/test_images.py",
    "make audit": "tests/contracts/test_supply_chain.py",
    "make clients": "tests/contracts/test_clients_target.py",
    "make peers": "tests/benchmarks/test_comparison.py",
    "python -m tests.benchmarks peers --routers all": "tests/benchmarks/test_comparison.py",
    "python -m tests.benchmarks peers --record": "tests/benchmarks/test_comparison.py",
    "python -m pip install --require-hashes -r requirements/router.txt": "tests/compiled/test_wheel.py",
    "python -m pip install --no-deps --no-index --find-links dist warmpath": "tests/compiled/test_wheel.py",
    ".venv/bin/python -m tests.compiled tests/routing/balancing -n 2": "tests/compiled/test_routing.py",
    "make lock": "tests/contracts/test_lock.py",
    "python -m routing picker --config fleet.json --name picker-1": "tests/routing/picker/test_command.py",
    "python -m routing replica --port 9101": "tests/end_to_end/test_make_run.py",  # started by the stack
    ".venv/bin/python -m tests.end_to_end.screenshots": "tests/end_to_end/test_tour.py",
    "python -m routing play --router http://127.0.0.1:8080 --mix 1": "tests/end_to_end/test_make_run.py",
    "python -m routing play --router http://127.0.0.1:8080 --trace conversation_trace.jsonl.gz --time-scale 0.547"
    " --loop": "tests/routing/traffic/test_player.py",
    "python -m routing simulate --trace conversation_trace.jsonl.gz --policy policy.json --replicas 4 --blocks 4000"
    " --time-scale 0.547 --json": "tests/routing/replay/test_command.py",
    "WARMPATH_REPLICAS=http://gpu-1:8000,http://gpu-2:8000 make run": "tests/end_to_end/test_killed_processes.py",
    "WARMPATH_TRACE=trace.jsonl.gz make run": "tests/end_to_end/test_killed_processes.py",
}


def _session(readme: str) -> list[str]:
    """Lines of a README's only shell block, which a test executes as written."""
    return (ROOT / readme).read_text().partition("```sh\n")[2].partition("\n```")[0].splitlines()


def _compose() -> list[str]:
    """Commands that create the secrets and settings of the Compose file."""
    commands = shown((ROOT / "deploy/images/README.md").read_text())
    return [command for command in commands if re.search(r"deploy/(secrets|\.env)", command)]


EXECUTED_BY["python manage.py rotate_secrets"] = "tests/controlplane/test_secret_rotation.py"
EXECUTED_BY |= dict.fromkeys(_session("controlplane/api/README.md"), "tests/controlplane/api/test_readme.py")
EXECUTED_BY |= dict.fromkeys(_session("controlplane/cli/README.md"), "tests/controlplane/cli/test_readme.py")
EXECUTED_BY |= dict.fromkeys(
    shown((ROOT / "deploy/systemd/README.md").read_text()), "tests/end_to_end/production/test_installation.py"
)
EXECUTED_BY |= dict.fromkeys(
    shown((ROOT / "docs/runbook.md").read_text()), "tests/end_to_end/production/test_runbook.py"
)
EXECUTED_BY |= dict.fromkeys(shown((ROOT / "docs/scaling.md").read_text()), "tests/benchmarks/test_benchmarks.py")
EXECUTED_BY |= dict.fromkeys(_compose(), "tests/contracts/test_compose_file.py")
EXECUTED_BY |= dict.fromkeys(
    ["promtool check rules deploy/prometheus/rules.yaml", "promtool test rules deploy/prometheus/rules_test.yaml"],
    "tests/contracts/test_prometheus_files.py",
)
