"""``make compile`` with and without a C compiler."""

import ast
import os
import shutil
import subprocess
import sys

from tests.compiled.__main__ import EXCLUDED
from tests.compiled.package import ROOT, named_modules

UNSUITABLE = {
    "Struct": "msgspec.Struct classes crash when compiled",
    "runtime_checkable": "isinstance of a protocol is slow and does not see native attributes",
    "cached_property": "a native object has no __dict__ for the cached value",
}


def test_without_a_c_compiler_an_error_names_the_packages_to_install(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE", "deploy", "requirements"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    (tmp_path / "empty").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    process = subprocess.run(
        [sys.executable, "deploy/bootstrap.py", "compile"],
        cwd=tmp_path,
        env=environment | {"PATH": str(tmp_path / "empty")},
        capture_output=True,
        text=True,
        check=False,
    )

    assert process.returncode == 3
    assert process.stderr.count("\n") == 1
    assert "needs a C compiler" in process.stderr
    assert "apt-get install gcc libc6-dev" in process.stderr
    assert not (tmp_path / "dist").exists()


def test_the_excluded_test_files_exist():
    assert [path for path in EXCLUDED if not (ROOT / path).is_file()] == []


def test_no_native_module_is_in_the_source_folder():
    assert list((ROOT / "routing").rglob("*.so")) == []


def test_compiled_modules_use_no_unsuitable_constructs():
    """Checks CONTRIBUTING.md's rules by syntax tree, which is faster than compiling."""
    violations = [
        f"{module}:{node.lineno}: {name}: {UNSUITABLE[name]}"
        for module in named_modules()
        for node in ast.walk(ast.parse((ROOT / module).read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        for name in UNSUITABLE.keys() & names_of([*node.decorator_list, *getattr(node, "bases", ())])
    ]
    assert violations == []


def test_no_property_of_a_compiled_module_returns_a_function():
    """mypyc drops a call of a property's value: ``relay.sink(data)`` did nothing."""
    trees = {module: ast.parse((ROOT / module).read_text()) for module in named_modules()}
    aliases = {"Callable"} | {
        target.id
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and "Callable[" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    properties = [
        (
            f"{module}:{node.lineno}: {node.name}",
            {name.id for name in ast.walk(node.returns) if isinstance(name, ast.Name)},
        )
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and "property" in names_of(node.decorator_list)
    ]

    assert "BodySink" in aliases
    assert len(properties) > 20
    assert [place for place, types in properties if types & aliases] == []


def test_except_clauses_of_different_types_bind_different_names():
    """mypyc types a name by its first use in a function."""
    violations = [
        f"{module}:{function.lineno}: {name} is {' and '.join(sorted(kinds))}"
        for module in named_modules()
        for function in ast.walk(ast.parse((ROOT / module).read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for name, kinds in caught_in(function).items()
        if len(kinds) > 1
    ]
    assert violations == []


def test_no_generator_expression_is_expected_to_be_lazy():
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
    parts = [part for expression in expressions for part in ast.walk(expression)]
    return {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in parts}
