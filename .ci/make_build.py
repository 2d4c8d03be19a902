"""Writes BUILD from the imports: python .ci/make_build.py.

tests/layering_test.py uses the same functions to hold BUILD equal to the imports.
"""

import ast
import pathlib
import sys

PACKAGE = "keras_dpopt"
ROOT = pathlib.Path(__file__).resolve().parent.parent

_HEADER = '''\
"""Bazel targets: one py_library a module, one py_test a test file.

Written by `make build-file` from the imports; tests/layering_test.py compares them.
Third-party packages come from the Python environment (see pyproject.toml).
"""

load("@rules_python//python:defs.bzl", "py_library", "py_test")

package(default_visibility = ["//visibility:public"])
'''


def module_files(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """The package's modules, {"engines/base": path, "__init__": path, ...}."""
    package = root / PACKAGE
    return {
        path.relative_to(package).with_suffix("").as_posix(): path
        for path in sorted(package.rglob("*.py"))
    }


def imported_names(tree: ast.AST, module: str = "") -> set[str]:
    """Every absolute dotted name that the source imports, wherever it does so.

    `from a import b` gives "a.b" (b may be a module or not). Relative imports are
    resolved against `module` ("engines/base" form). Imports inside functions and
    under TYPE_CHECKING count, as do import_module("...") and __import__("...").
    """
    # The module's own package: keras_dpopt[.engines].
    parents = [PACKAGE, *module.split("/")[:-1]]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            names.update(".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rsplit(".", 1)[-1]
            first = node.args[0]
            if (
                called in ("import_module", "__import__", "LazyLoader")
                and isinstance(first, ast.Constant)
                and isinstance(first.value, str)
            ):
                names.add(first.value)
    return names


def module_of(name: str, modules: dict[str, pathlib.Path]) -> str | None:
    """The module of the package that the dotted name stands for or lies in."""
    parts = name.split(".")
    if parts[0] != PACKAGE:
        return None
    for end in range(len(parts), 0, -1):
        path = "/".join(parts[1:end])
        for candidate in (path, f"{path}/__init__".lstrip("/")):
            if candidate in modules:
                return candidate
    return None


def intra_imports(root: pathlib.Path) -> dict[str, set[str]]:
    """For each module of the package the modules of the package that it imports."""
    modules = module_files(root)
    imports = {}
    for module, path in modules.items():
        names = imported_names(ast.parse(path.read_text("utf-8")), module)
        found = {module_of(name, modules) for name in names}
        imports[module] = {name for name in found if name is not None} - {module}
    return imports


def target(module: str) -> str:
    """The name of a module's py_library."""
    if module == "__init__":
        return PACKAGE
    return module.removesuffix("/__init__").replace("/", "_")


def _list(name: str, values: list[str]) -> str:
    if not values:
        return ""
    if len(values) == 1:
        return f'    {name} = ["{values[0]}"],\n'
    lines = "".join(f'        "{value}",\n' for value in values)
    return f"    {name} = [\n{lines}    ],\n"


def _rule(kind: str, name: str, *attributes: str) -> str:
    return f'\n{kind}(\n    name = "{name}",\n{"".join(attributes)})\n'


def _test_rules(root: pathlib.Path) -> str:
    modules = module_files(root)
    paths = sorted((root / "tests").glob("*.py"))
    tests = [path for path in paths if path.stem.endswith("_test")]
    helpers = {path.stem for path in paths} - {path.stem for path in tests}
    text = _rule(
        "py_library",
        "tests_support",
        "    testonly = True,\n",
        _list("srcs", [f"tests/{name}.py" for name in sorted(helpers)]),
        "    data = glob(\n"
        f'        ["{PACKAGE}/**", "examples/**", "tests/**", ".ci/**"],\n'
        '    ) + ["BUILD", "pyproject.toml"],\n',
        '    imports = ["tests"],\n',
        _list("deps", [f":{PACKAGE}"]),
    )
    for path in tests:
        names = imported_names(ast.parse(path.read_text("utf-8")))
        found = {module_of(name, modules) for name in names} - {None, "__init__"}
        deps = sorted({f":{target(name)}" for name in found if name})
        text += _rule(
            "py_test",
            path.stem,
            _list("srcs", [".ci/pytest_main.py", f"tests/{path.name}"]),
            f'    args = ["tests/{path.name}"],\n',
            '    main = ".ci/pytest_main.py",\n',
            _list("deps", [*deps, ":tests_support"]),
        )
    return text


def render(root: pathlib.Path) -> str:
    """The text of BUILD for the tree at root."""
    text = _HEADER
    for module, imports in sorted(intra_imports(root).items()):
        text += _rule(
            "py_library",
            target(module),
            _list("srcs", [f"{PACKAGE}/{module}.py"]),
            '    data = ["keras_dpopt/py.typed"],\n' if module == "__init__" else "",
            _list("deps", sorted(f":{target(name)}" for name in imports)),
        )
    return text + (_test_rules(root) if (root / "tests").is_dir() else "")


def parse(text: str) -> dict[str, dict[str, list[str]]]:
    """The rules of a BUILD file: {name: {"srcs": [...], "deps": [...]}}."""
    rules = {}
    for node in ast.parse(text).body:
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call):
            continue
        if ast.unparse(call.func) not in ("py_library", "py_test"):
            continue
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        name = ast.literal_eval(given["name"])
        if name in rules:
            raise ValueError(f"BUILD has two rules of the name {name}")
        rules[name] = {
            key: sorted(ast.literal_eval(given[key])) if key in given else []
            for key in ("srcs", "deps")
        }
    return rules


if __name__ == "__main__":
    (ROOT / "BUILD").write_text(render(ROOT), encoding="utf-8")
    sys.stdout.write("BUILD written\n")
