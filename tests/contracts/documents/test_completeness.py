"""Every setting, command and package is documented."""

import re
import tomllib
from functools import cache

import pytest

from tests.contracts.documents.reading import DOCUMENTS, ROOT, sources

ALL_TEXT = "\n".join(path.read_text() for path in DOCUMENTS)
PACKAGES = ("controlplane", "routing", "telemetry")


def variables() -> set[str]:
    """Every ``WARMPATH_`` variable that the code reads, directly or through ``settings/env.py``, without ``_FILE``."""
    return {name for name in named_variables() if not name.endswith("_FILE")}


@cache
def named_variables() -> frozenset[str]:
    """The same with variables of paths, whose names end in ``_FILE``."""
    names: set[str] = set()
    for path in sources(*PACKAGES):
        text = path.read_text()
        names |= set(re.findall(r"\bWARMPATH_[A-Z_]+[A-Z]\b", text))
        names |= {f"WARMPATH_{name}" for name in re.findall(r"\b(?:env\.\w+|_port)\(\s*\"([A-Z_]+)\"", text)}
    return frozenset(names)


def is_variable(name: str) -> bool:
    """Whether a program reads this variable, or its ``_FILE`` variant."""
    return name in named_variables() or name.removesuffix("_FILE") in named_variables()


@pytest.mark.parametrize("variable", sorted(variables()))
def test_every_environment_variable_is_documented(variable):
    assert f"`{variable}`" in ALL_TEXT


def commands() -> list[str]:
    return [
        path.stem
        for package in PACKAGES
        for path in (ROOT / package).glob("management/commands/*.py")
        if path.stem != "__init__"
    ]


@pytest.mark.parametrize("command", commands())
def test_every_management_command_is_documented(command):
    assert re.search(rf"\b{command}\b", ALL_TEXT)


@pytest.mark.parametrize("package", [*PACKAGES, "routing/balancing", "routing/balancing/strategies", "routing/proxy"])
def test_every_package_has_a_readme(package):
    assert (ROOT / package / "README.md").is_file()


def test_package_readmes_are_short():
    """At most 120 lines: what a package does and its contract. Reasons stand in docstrings, reference in docs/."""
    readmes = [path for path in DOCUMENTS if path.name == "README.md" and path.parent != ROOT]
    assert [str(path) for path in readmes if len(path.read_text().splitlines()) > 120] == []


def test_every_dependency_has_a_comment_with_its_purpose():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    declared = [line for line in lines if re.match(r'^    "[a-z0-9-]+(\[[a-z,-]+\])?[><=]', line)]
    assert len(declared) >= 20
    assert [line for line in declared if "#" not in line] == []


@pytest.mark.parametrize("lock", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.name)
def test_no_lock_file_contains_a_url(lock):
    text = lock.read_text()
    assert "://" not in text
    assert "--hash=sha256:" in text
    assert "--index-url" not in text


def test_vllm_and_torch_are_in_no_lock_file():
    for lock in (ROOT / "requirements").glob("*.txt"):
        assert not re.search(r"^(vllm|torch)==", lock.read_text(), re.MULTILINE)


def test_the_router_alone_needs_no_django():
    router = (ROOT / "requirements/router.txt").read_text()
    assert not re.search(r"^(django|celery|psycopg)", router, re.MULTILINE)


def test_pre_commit_runs_what_make_check_runs():
    assert "entry: make check" in (ROOT / ".pre-commit-config.yaml").read_text()


def test_lock_files_contain_all_dependencies_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["controlplane"]]
    base = (ROOT / "requirements/base.txt").read_text()
    for requirement in requirements:
        name = re.match(r"[a-z0-9-]+", requirement).group()
        assert re.search(rf"^{name}(\[[^\]]*\])?==", base, re.MULTILINE), f"{name}: run `make lock`"
