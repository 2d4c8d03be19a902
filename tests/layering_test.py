"""Holds the package's layers: who may import whom, and BUILD equal to the imports.

Reads the sources with `ast` and imports nothing of the library. Each rule is a
function of a source tree that returns complaints, so each is tried on a small tree
with a planted violation too: a rule that sees nothing cannot pass.
"""

import ast
import importlib.util
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_SPEC = importlib.util.spec_from_file_location(
    "make_build", _ROOT / ".ci" / "make_build.py"
)
if _SPEC is None or _SPEC.loader is None:
    raise ImportError("cannot load .ci/make_build.py")
make_build = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(make_build)

_MAX_LINES = 350

# A module imports only modules of strictly lower rank. "folder/*" stands for the
# modules of the folder that have no line of their own.
_RANKS = {
    # Leaves: facts and types, and the two doors to foreign internals.
    "_version": (0, 0),
    "argument_names": (0, 0),
    "calibration_checks": (0, 0),
    "digest": (0, 0),
    "journal": (0, 0),
    "keras_compat": (0, 0),
    "layers": (0, 0),
    "prng": (0, 0),
    "tensorflow_compat": (0, 0),
    "tf_privacy": (0, 0),
    "types": (0, 0),
    "validation": (0, 0),
    "arguments": (0, 1),
    # Plain computations on values: accounting, the clip, the keys.
    "clipping": (1, 0),
    "calibration": (1, 0),
    "dp_events": (1, 0),
    "keys": (1, 0),
    "noise_plan": (1, 0),
    "noise_search": (1, 0),
    "toeplitz": (1, 0),
    "renyi": (1, 1),
    "composition": (1, 2),
    "accounting": (1, 3),
    # The parts of a step; no part knows another, but a mechanism its sampler.
    "filters": (2, 0),
    "queries": (2, 0),
    "ascent_queries": (2, 1),
    "posterior_queries": (2, 1),
    "update_rules": (2, 0),
    "posterior_rules": (2, 1),
    "clipping_styles": (2, 0),
    "noise_streams": (2, 0),
    "run_plan": (2, 0),
    "sampling": (2, 0),
    "gaussian_noise": (2, 0),
    "adaptive_clipping": (2, 1),
    "gaussian_mechanism": (2, 2),
    "foreign_mechanism": (2, 2),
    "adaptive_mechanism": (2, 3),
    "planned_mechanism": (2, 3),
    "correlated_mechanism": (2, 4),
    "langevin_mechanism": (2, 4),
    "matrix_mechanism": (2, 5),
    "mechanisms": (2, 4),
    # What runs the parts, and what remembers that they ran.
    "loss_reduction": (3, 0),
    "losses": (3, 1),
    "optimizer_saving": (3, 0),
    "partial_sum": (2, 0),
    "optimizer_state": (3, 0),
    "step_interface": (3, 0),
    "budget": (3, 0),
    "phase": (3, 0),
    "engines/notes": (3, 0),
    "engines/base": (3, 1),
    "engines/matmul_converter": (3, 0),
    "engines/mapping": (3, 1),
    "engines/rounding": (3, 0),
    "engines/record_axis": (3, 0),
    "engines/left_factors": (3, 1),
    "engines/terms": (3, 2),
    "engines/weight_uses": (3, 1),
    "post_processing": (3, 1),
    "ledger_saving": (3, 1),
    "ledger_text": (3, 1),
    "statement_words": (3, 1),
    "ledger": (3, 2),
    "release_count": (3, 1),
    "engines/*": (3, 3),
    "engines/loops": (3, 4),
    "engines/trial": (3, 4),
    "engines/layout": (3, 2),
    "engines/layout_moves": (3, 3),
    "engines/layout_rules": (3, 4),
    "engines/shape_values": (3, 4),
    "engines/separation": (3, 5),
    "engines/bookkeeping": (3, 6),
    "budget_words": (3, 3),
    "planned_fit": (3, 3),
    "statement": (3, 3),
    "engines/__init__": (3, 7),
    # The step, as a function and as an optimizer; the data; the ledger of a model.
    "preprocessing": (3, 5),
    "data": (3, 6),
    "dp_optimizer": (4, 0),
    "fingerprint": (4, 0),
    "model_ledger": (4, 0),
    "microbatch": (4, 0),
    "distribution": (3, 7),
    "private_step": (4, 1),
    "training_hooks": (4, 1),
    "step_checks": (3, 0),
    "weights_watch": (3, 0),
    "saving": (4, 0),
    "fit_arguments": (4, 1),
    "tried_rows": (4, 1),
    "engine_report": (4, 2),
    "sources": (4, 2),
    "fit_run": (4, 3),
    "optimizers/*": (5, 0),
    "optimizers/__init__": (5, 1),
    "training": (6, 0),
    "models": (6, 1),
    # What is put on top of a model.
    "auditing": (7, 0),
    "backup": (7, 0),
    "callbacks": (7, 0),
    "diagnostics_private": (7, 0),
    "diagnostics_audit": (7, 1),
    "diagnostics_records": (7, 1),
    "diagnostics_raw": (7, 2),
    "diagnostics": (7, 3),
    "posterior_samples": (7, 0),
    "posterior_sources": (7, 1),
    "posterior": (7, 2),
    "__init__": (8, 0),
}


def _rank(module):
    folder = f"{module.rpartition('/')[0]}/*"
    return _RANKS.get(module, _RANKS.get(folder))


def _trees(root):
    return {
        module: ast.parse(path.read_text("utf-8"))
        for module, path in make_build.module_files(root).items()
    }


def _is_within(name, package):
    return name == package or name.startswith(f"{package}.")


def unranked_modules(root):
    return [
        f"keras_dpopt/{module}.py has no rank: add it to _RANKS in "
        "tests/layering_test.py, above all that it imports"
        for module in make_build.module_files(root)
        if _rank(module) is None
    ]


def upward_imports(root):
    complaints = []
    for module, imports in make_build.intra_imports(root).items():
        for other in sorted(imports):
            mine, theirs = _rank(module), _rank(other)
            if mine and theirs and theirs >= mine:
                complaints.append(
                    f"keras_dpopt/{module}.py (rank {mine}) imports "
                    f"keras_dpopt/{other}.py (rank {theirs}): imports go down only"
                )
    return complaints


def foreign_imports(root, package, only_in):
    """Imports of `package` anywhere but in the module `only_in`."""
    return [
        f"keras_dpopt/{module}.py imports {package}: only {only_in}.py may"
        for module, tree in _trees(root).items()
        if module != only_in
        and any(
            _is_within(name, package)
            for name in make_build.imported_names(tree, module)
        )
    ]


def keras_internals(root):
    """Uses of keras.src, imported or reached as an attribute."""
    complaints = foreign_imports(root, "keras.src", "keras_compat")
    for module, tree in _trees(root).items():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and ast.unparse(node).endswith("keras.src")
                and module != "keras_compat"
            ):
                complaints.append(
                    f"keras_dpopt/{module}.py:{node.lineno} reaches keras.src: only "
                    "keras_compat.py may"
                )
    return complaints


def frameworks_behind(root, module):
    """How `module` comes to import Keras or TensorFlow, itself or through others."""
    trees, imports = _trees(root), make_build.intra_imports(root)
    seen, complaints = {module}, []
    queue: list[tuple[str, ...]] = [(module,)]
    while queue:
        way = queue.pop()
        for name in sorted(make_build.imported_names(trees[way[-1]], way[-1])):
            if name.partition(".")[0] in ("keras", "tensorflow", "tensorflow_privacy"):
                complaints.append(f"{' -> '.join(way)} imports {name}")
        for other in sorted(imports[way[-1]] - seen):
            seen.add(other)
            queue.append((*way, other))
    return complaints


def long_files(root):
    complaints = []
    for module, path in make_build.module_files(root).items():
        lines = len(path.read_text("utf-8").splitlines())
        if lines > _MAX_LINES:
            complaints.append(
                f"keras_dpopt/{module}.py has {lines} lines, more than {_MAX_LINES}: "
                "split it"
            )
    return complaints


def assert_statements(root):
    return [
        f"keras_dpopt/{module}.py:{node.lineno}: `assert` vanishes under python -O: "
        "raise an error"
        for module, tree in _trees(root).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]


def crowded_optimizers(root):
    complaints = []
    for module, tree in _trees(root).items():
        if not module.startswith("optimizers/") or module.endswith("__init__"):
            continue
        public = [
            node.name
            for node in tree.body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        ]
        if len(public) != 1:
            complaints.append(
                f"keras_dpopt/{module}.py has the public classes {public}: it must be "
                "exactly one"
            )
    return complaints


def stale_build(root):
    path = root / "BUILD"
    text = path.read_text("utf-8") if path.exists() else ""
    wanted = make_build.render(root)
    have, want = make_build.parse(text), make_build.parse(wanted)
    return [
        f"BUILD: {name} is {have.get(name, 'missing')} and should be "
        f"{want.get(name, 'absent')}"
        for name in sorted(have.keys() | want.keys())
        if have.get(name) != want.get(name)
    ]


def _check(complaints, advice=""):
    if complaints:
        pytest.fail("\n".join([*complaints, advice]), pytrace=False)


def test_package_is_found():
    modules = make_build.module_files(_ROOT)
    assert "__init__" in modules and len(modules) > 10


def test_each_module_has_a_rank():
    _check(unranked_modules(_ROOT))


def test_imports_go_down_only():
    _check(upward_imports(_ROOT))


def test_tensorflow_privacy_has_one_door():
    _check(foreign_imports(_ROOT, "tensorflow_privacy", "tf_privacy"))


def test_keras_internals_have_one_door():
    _check(keras_internals(_ROOT))


@pytest.mark.parametrize("module", ["accounting", "calibration"])
def test_numbers_need_no_framework(module):
    assert module in make_build.module_files(_ROOT)
    _check(frameworks_behind(_ROOT, module))


def test_files_are_short():
    _check(long_files(_ROOT))


def test_no_assert_statements():
    _check(assert_statements(_ROOT))


def test_one_public_class_an_optimizer_file():
    _check(crowded_optimizers(_ROOT))


def test_build_equals_the_imports():
    complaints = stale_build(_ROOT)
    if complaints:
        print("The whole BUILD as it should be:\n\n" + make_build.render(_ROOT))
    _check(complaints, "`make build-file` writes BUILD anew.")


# The rules on small trees: nothing to say about a clean one, and one complaint about
# each planted violation.

_CLEAN = {
    "__init__": "from keras_dpopt.models import DPModel",
    "types": "import dataclasses",
    "tf_privacy": "from tensorflow_privacy.privacy.dp_query import dp_query",
    "keras_compat": "from keras.src.trainers import trainer",
    "accounting": "import dp_accounting\nfrom keras_dpopt import validation",
    "validation": "import math",
    "clipping": "import tensorflow as tf\nfrom keras_dpopt.types import ClippedSum",
    "queries": "from . import types, clipping",
    "engines/__init__": "from keras_dpopt.engines import base, loop",
    "engines/base": "from ..types import ClippedSum",
    "engines/loop": "from . import base",
    "dp_optimizer": "from keras_dpopt import types",
    "optimizers/__init__": "from .dpsgd import DPSGD",
    "optimizers/dpsgd": "from ..dp_optimizer import X\nclass _A: ...\nclass DPSGD: ...",
    "models": "import keras\nimport keras_dpopt.types as t\nimport keras_dpopt.engines",
}

_RULES = {
    "rank": unranked_modules,
    "down": upward_imports,
    "tf_privacy": lambda root: foreign_imports(
        root, "tensorflow_privacy", "tf_privacy"
    ),
    "keras": keras_internals,
    "accounting": lambda root: frameworks_behind(root, "accounting"),
    "long": long_files,
    "assert": assert_statements,
    "class": crowded_optimizers,
    "build": stale_build,
}


def _write(root, sources, build=True):
    for module, text in sources.items():
        path = root / "keras_dpopt" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", "utf-8")
    if build:
        (root / "BUILD").write_text(make_build.render(root), "utf-8")


@pytest.mark.parametrize("rule", _RULES)
def test_rules_accept_a_clean_tree(rule, tmp_path):
    _write(tmp_path, _CLEAN)
    assert _RULES[rule](tmp_path) == []


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [
        ("rank", "surprise", ""),
        ("rank", "layers/surprise", ""),
        # Upward, sideways, in every spelling of an import.
        ("down", "types", "import keras_dpopt.models"),
        ("down", "types", "from keras_dpopt.models import DPModel"),
        ("down", "types", "from keras_dpopt import models"),
        ("down", "types", "from keras_dpopt import DPModel"),
        ("down", "types", "import keras_dpopt"),
        ("down", "types", "from . import models"),
        ("down", "types", "from .models import DPModel"),
        ("down", "types", "def f():\n  from keras_dpopt import models"),
        ("down", "types", "if TYPE_CHECKING:\n  from keras_dpopt import models"),
        ("down", "types", "importlib.import_module('keras_dpopt.models')"),
        ("down", "types", "from keras_dpopt import validation"),
        ("down", "filters", "from keras_dpopt import queries"),
        ("down", "engines/base", "from . import loop"),
        ("down", "engines/loop", "from keras_dpopt.engines import select"),
        ("down", "engines/loop", "from .. import models"),
        ("down", "optimizers/fiber", "from .dpsgd import DPSGD\nclass FiBeR: ..."),
        ("tf_privacy", "queries", "import tensorflow_privacy"),
        ("tf_privacy", "queries", "def f():\n  from tensorflow_privacy import privacy"),
        ("tf_privacy", "queries", "__import__('tensorflow_privacy')"),
        ("keras", "models", "from keras.src import backend"),
        ("keras", "models", "from keras import src"),
        ("keras", "models", "import keras.src.trainers.trainer as t"),
        ("keras", "models", "import keras\nx = keras.src.backend"),
        ("keras", "models", "x = tf.keras.src.backend"),
        ("accounting", "accounting", "import tensorflow as tf"),
        ("accounting", "accounting", "def f():\n  from keras import ops"),
        ("accounting", "validation", "import keras"),
        ("accounting", "accounting", "from keras_dpopt import tf_privacy"),
        ("long", "types", "\n" * _MAX_LINES),
        ("assert", "types", "def f(x):\n  assert x > 0"),
        ("class", "optimizers/dpsgd", "class DPSGD: ...\nclass DPAdam: ..."),
        ("class", "optimizers/dpsgd", "class _DPSGD: ..."),
    ],
)
def test_rules_see_a_planted_violation(rule, module, source, tmp_path):
    _write(tmp_path, _CLEAN | {module: source})
    assert _RULES[rule](tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('deps = [":types"]', 'deps = [":queries"]'),  # A wrong dependency,
        ('    deps = [":types"],\n', ""),  # a missing one,
        ('srcs = ["keras_dpopt/types.py"]', 'srcs = ["types.py"]'),  # a wrong file,
        ('name = "validation"', 'name = "validations"'),  # a wrong name,
        ('deps = [":types"]', 'deps = [":types", ":types"]'),  # a double one.
    ],
)
def test_build_rule_sees_a_stale_file(old, new, tmp_path):
    _write(tmp_path, _CLEAN)
    text = (tmp_path / "BUILD").read_text("utf-8")
    assert old in text
    (tmp_path / "BUILD").write_text(text.replace(old, new, 1), "utf-8")
    assert stale_build(tmp_path)


def test_build_rule_sees_new_modules_and_no_file(tmp_path):
    _write(tmp_path, _CLEAN, build=False)
    assert len(stale_build(tmp_path)) == len(_CLEAN)
    _write(tmp_path, _CLEAN)
    _write(tmp_path, {"filters": ""}, build=False)
    assert len(stale_build(tmp_path)) == 1


def test_build_names_the_imports(tmp_path):
    _write(tmp_path, _CLEAN)
    rules = make_build.parse((tmp_path / "BUILD").read_text("utf-8"))
    assert rules["queries"]["deps"] == [":clipping", ":types"]
    assert rules["engines"]["deps"] == [":engines_base", ":engines_loop"]
    assert rules["models"]["deps"] == [":engines", ":types"]
    assert rules["keras_dpopt"] == {
        "srcs": ["keras_dpopt/__init__.py"],
        "deps": [":models"],
    }
