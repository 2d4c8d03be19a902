"""The documentation: its code runs, and its tables say what the classes say."""

import ast
import dataclasses
import inspect
import math
import pathlib
import re

import helpers
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dpopt
from keras_dpopt import mechanisms
from keras_dpopt.queries import StepState

ROOT = pathlib.Path(__file__).parent.parent
DOCS = {path.name: path.read_text("utf-8") for path in sorted(ROOT.glob("docs/*.md"))}
README = (ROOT / "README.md").read_text("utf-8")
METHODS = DOCS["methods.md"]
OWN = "write_your_own_optimizer.md"
PRIVATE = {"l2_norm_clip": 1.0, "noise_multiplier": 1.1, "expected_batch_size": 4}
# Filled by the classes: no arguments of theirs.
SLOTS = {"query", "mechanism", "filter", "rule", "noise_correction", "learning_rate"}

every_optimizer = pytest.mark.parametrize("name", helpers.OPTIMIZERS)


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run_blocks(name):
    """Runs a page's Python, block after block, as one program."""
    names: dict = {"__name__": "docs"}
    for i, code in enumerate(blocks(DOCS[name])):
        exec(compile(code, f"docs/{name}, block {i + 1}", "exec"), names)
    return names


def rows(text, heading):
    """The tables whose first column has this heading: {first cell: other cells}."""
    found: dict = {}
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [
            [cell.strip() for cell in line.strip("|").split(" |")]
            for line in table.splitlines()
        ]
        if lines[0][0] == heading:
            for first, *others in lines[2:]:
                assert first not in found, f"{first} has two rows"
                found[first] = dict(zip(lines[0][1:], others, strict=True))
    return found


def arguments_of(cell):
    """The arguments and defaults that a cell states."""
    pairs = re.findall(r"`(\w+)` \((.*?)\)(?=, `|$)", cell)
    return {name: value_of(text) for name, text in pairs}


def value_of(text):
    return math.inf if text == "inf" else ast.literal_eval(text)


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def built(name):
    optimizer = helpers.OPTIMIZERS[name](**PRIVATE)
    optimizer.build([keras.Variable(np.zeros(3), dtype="float32")])
    return optimizer


def passes(optimizer):
    """How often the optimizer's query asks for the gradient of one record."""
    calls = []

    def gradient(weights, report=True):
        del report
        calls.append(weights)
        return [tf.ones(3)]

    weights = (tf.zeros(3),)
    read = {name: weights for name in (*optimizer.query.slots, *optimizer.query.reads)}
    key, number = tf.constant(1, tf.int64), tf.constant(0, tf.int64)
    for stage in range(optimizer.query.stages):
        state = StepState(
            weights, read, key, number, tf.constant(9.0), [weights] * stage
        )
        optimizer.query.record(gradient, optimizer.query.points(state))
    return len(calls)


# -------------------------------------------------------------------------------- code


@pytest.mark.parametrize("name", [n for n, text in DOCS.items() if blocks(text)])
def test_the_code_runs(name):
    run_blocks(name)


def test_the_parts_of_the_page_do_what_they_say():
    names = run_blocks(OWN)
    # The filter's noise variance: 1/4, then 1/2; 1/2 from the start if steady.
    filter_ = names["PairFilter"]()
    for steady, want in ((False, [0.25, 0.5, 0.5]), (True, [0.5, 0.5, 0.5])):
        scalars, variances = dict(filter_.scalars), []
        for step in (1, 2, 3):
            _, variance, scalars = filter_.begin(scalars, step, 1.0, steady)
            variances.append(float(variance))
        assert variances == want

    class OwnAscent(keras_dpopt.DPOptimizer):
        def __init__(self, **kwargs):
            super().__init__(
                0.5,
                query=names["OwnAscentQuery"](0.1),
                mechanism=None,
                filter=names["PairFilter"](),
                rule=names["SignMomentum"](0.0),
                noise_correction=None,
                **kwargs,
            )

    x, y, start = names["x"], names["y"], np.full((3, 1), 0.2)
    gradients = 2.0 * (x @ start - y) * x
    raised = start.T + 0.1 * np.sign(gradients)
    errors = np.sum(x * raised, axis=1, keepdims=True) - y
    mean = np.sum(2.0 * errors * x, axis=0)[:, None]
    for engine in helpers.ENGINES:
        optimizer = OwnAscent(
            l2_norm_clip=1e6,
            noise_multiplier=0.0,
            expected_batch_size=6,
            gradient_engine=engine,
        )
        model = names["linear_model"](optimizer)
        model.set_weights([start])
        model.train_on_batch(x, y)
        (after,) = model.get_weights()
        np.testing.assert_allclose(after, start - 0.5 * np.sign(mean), atol=1e-6)


@pytest.mark.parametrize("name", sorted(DOCS))
def test_names_and_files_exist(name):
    for attribute in set(re.findall(r"keras_dpopt\.([a-zA-Z]\w+)\b", DOCS[name])):
        module = ROOT / "keras_dpopt" / attribute
        assert (
            hasattr(keras_dpopt, attribute)
            or module.is_dir()
            or module.with_suffix(".py").is_file()
        ), attribute
    for file in re.findall(r"`((?:tests|docs|examples)/\w+\.\w+)`", DOCS[name]):
        assert (ROOT / file).is_file(), file


def test_links_of_the_readme_exist():
    for file in re.findall(r"\]\((\w[\w/]*\.\w+)\)", README):
        assert (ROOT / file).is_file(), file


# ------------------------------------------------------------------------------ tables


@pytest.mark.parametrize("page", ["README.md", "methods.md"])
def test_every_optimizer_has_a_row(page):
    text = README if page == "README.md" else METHODS
    assert set(rows(text, "class")) == {f"`{name}`" for name in helpers.OPTIMIZERS}


@every_optimizer
@pytest.mark.parametrize("page", ["README.md", "methods.md"])
def test_passes_and_slots(page, name):
    row = rows(README if page == "README.md" else METHODS, "class")[f"`{name}`"]
    optimizer = built(name)
    assert int(row["passes"]) == passes(optimizer)
    slots = [v for v in optimizer.named_variables() if v.endswith(".0")]
    assert int(row["slots"]) == len([v for v in slots if not v.startswith("mechanism")])


@every_optimizer
def test_defaults_are_those_of_the_class(name):
    own = defaults(helpers.OPTIMIZERS[name].__init__)
    own = {k: v for k, v in own.items() if k not in PRIVATE}
    stated = arguments_of(rows(METHODS, "class")[f"`{name}`"]["arguments (default)"])
    assert stated == own
    assert list(map(type, stated.values())) == [type(own[k]) for k in stated]
    short = arguments_of(rows(README, "class")[f"`{name}`"]["own arguments (default)"])
    assert short and short.items() <= own.items()


def test_arguments_of_every_optimizer():
    common = defaults(keras_dpopt.DPOptimizer.__init__)
    table = rows(METHODS, "argument")
    stated = {k.strip("`"): value_of(v["default"]) for k, v in table.items()}
    assert stated == {k: v for k, v in common.items() if k not in SLOTS}
    methods = README[README.index("## Methods") : README.index("## Accounting")]
    for name in stated:
        assert f"`{name}`" in methods or f"`{name}=" in methods, name


def test_clipping_styles():
    for name, row in rows(METHODS, "`clipping`").items():
        style = mechanisms.resolve_clipping(value_of(name))
        assert arguments_of(row["arguments (default)"]) == dataclasses.asdict(style)
    assert set(map(value_of, rows(METHODS, "`clipping`"))) == set(mechanisms._STYLES)


def test_what_correlated_noise_keeps():
    for name, want in (("MFDPFTRL", 3), ("DPFTRL", 0)):
        state = built(name)._state.secrets()
        assert sum(v.shape[0] for v in state.values() if v.shape.rank) == want, name
    assert "(3 at the default)" in METHODS
