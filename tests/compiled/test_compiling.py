"""``make compile`` with and without a C compiler."""

import ast
import os
import shutil
import subprocess
import sys

from tests.compiled.__main__ import LEFT_OUT
from tests.compiled.package import ROOT, named_modules

UNFIT = {
    "Struct": "msgspec lays its structs out by itself, and crashes on native ones",
    "runtime_checkable": "asking for a protocol is slow and knows no native attribute",
    "cached_property": "a native object has no dictionary to keep it in",
}


def test_without_a_c_compiler_it_says_in_a_sentence_what_to_install(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE", "deploy", "requirements"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    (tmp_path / "nothing").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    done = subprocess.run(
        [sys.executable, "deploy/bootstrap.py", "compile"],
        cwd=tmp_path,
        env=environment | {"PATH": str(tmp_path / "nothing")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "needs a C compiler" in done.stderr
    assert "apt-get install gcc libc6-dev" in done.stderr
    assert not (tmp_path / "dist").exists()


def test_what_is_left_out_of_the_run_on_the_compiled_router_is_there():
    assert [path for path in LEFT_OUT if not (ROOT / path).is_file()] == []


def test_no_native_module_lies_where_the_plain_router_would_run_it():
    assert list((ROOT / "routing").rglob("*.so")) == []


def test_what_is_compiled_keeps_to_what_compiles_well():
    """Checks CONTRIBUTING.md's rules by syntax tree, which is faster than compiling."""
    found = [
        f"{module}:{node.lineno}: {name}: {UNFIT[name]}"
        for module in named_modules()
        for node in ast.walk(ast.parse((ROOT / module).read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        for name in UNFIT.keys() & names_of([*node.decorator_list, *getattr(node, "bases", ())])
    ]
    assert found == []


def test_what_is_compiled_calls_errors_of_two_kinds_by_two_names():
    """mypyc types a name by its first use in a function."""
    found = [
        f"{module}:{function.lineno}: {name} is {' and '.join(sorted(kinds))}"
        for module in named_modules()
        for function in ast.walk(ast.parse((ROOT / module).read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for name, kinds in caught_in(function).items()
        if len(kinds) > 1
    ]
    assert found == []


def test_what_is_compiled_expects_no_generator_expression_to_be_lazy():
    """mypyc compiles a generator expression as a list."""
    eager = [
        f"{module}:{node.lineno}: {ast.unparse(expression)}"
        for module in named_modules()
        for node in ast.walk(ast.parse((ROOT / module).read_text()))
        if (expression := expected_lazy(node)) is not None
    ]
    assert eager == []


def expected_lazy(node: ast.AST) -> ast.GeneratorExp | None:
    """The generator expression that a statement binds or returns, or that is passed to ``islice``."""
    match node:
        case ast.Assign(targets=[ast.Name()], value=ast.GeneratorExp() as expression):
            return expression
        case ast.Return(value=ast.GeneratorExp() as expression):
            return expression
        case ast.Call(func=ast.Name(id="islice"), args=[ast.GeneratorExp() as expression, *_]):
            return expression
    return None


def caught_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, set[str]]:
    """Names bound by a function's ``except`` clauses, with their error types."""
    caught: dict[str, set[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.ExceptHandler) and node.name and node.type:
            caught.setdefault(node.name, set()).add(ast.unparse(node.type))
    return caught


def names_of(expressions: list[ast.expr]) -> set[str]:
    """Last components of decorator and base names."""
    within = [part for expression in expressions for part in ast.walk(expression)]
    return {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in within}
