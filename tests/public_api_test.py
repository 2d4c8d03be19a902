"""The public names: what `import keras_dpopt` offers, and nothing by accident."""

import inspect
import pathlib
import subprocess
import sys

import pytest

import keras_dpopt

PUBLIC = {
    "AdaptiveClipping",
    "AutomaticClipping",
    "BAM",
    "BackupAndRestore",
    "DOPPLER",
    "DPAdam",
    "DPAdamBC",
    "DPAdamW",
    "DPAdamWBC",
    "DPBayesByBackprop",
    "DPFTRL",
    "DPIVON",
    "DPModel",
    "DPOptimizer",
    "DPRMSprop",
    "DPSAM",
    "DPSAT",
    "DPSGD",
    "DPSGLD",
    "DPSequential",
    "DiSK",
    "FiBeR",
    "FixedSizeSampler",
    "MFDPFTRL",
    "PerLayerClipping",
    "PoissonSampler",
    "PosteriorPrediction",
    "PosteriorSamples",
    "PrivacyBudget",
    "PrivacyStatement",
    "PrivateModel",
    "UnsupportedModelError",
    "calibration",
    "check_engine",
    "diagnostics",
    "layers",
    "epsilon",
    "make_private",
    "noise_multiplier",
    "posterior_predict",
}


def test_public_names_are_the_listed_ones():
    assert set(keras_dpopt.__all__) == PUBLIC
    assert keras_dpopt.__all__ == sorted(keras_dpopt.__all__, key=str)


def test_dir_has_the_public_names_alone():
    names = {name for name in dir(keras_dpopt) if not name.startswith("_")}
    assert names == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_names_say_what_they_are(name):
    public = getattr(keras_dpopt, name)
    documented = inspect.getdoc(public)
    assert documented
    results = ("PosteriorPrediction", "PrivacyStatement")
    if name not in ("DPOptimizer", "PrivateModel", "UnsupportedModelError", *results):
        assert ">>>" in documented or inspect.ismodule(public), "no example"


@pytest.mark.parametrize("name", ["calibration", "diagnostics", "layers"])
def test_public_modules_list_or_document_what_they_offer(name):
    module = getattr(keras_dpopt, name)
    for public in getattr(module, "__all__", ["calibration_report"]):
        assert inspect.getdoc(getattr(module, public)), public


def test_import_leaves_the_keras_2_half_of_tf_privacy_alone():
    code = (
        "import sys, keras_dpopt;"
        "print([m for m in sys.modules if m.startswith('tensorflow_privacy.')"
        " and ('v1' in m or 'optimizers' in m or 'estimators' in m)])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip().splitlines()[-1] == "[]"


def test_package_is_typed():
    assert (pathlib.Path(keras_dpopt.__file__).parent / "py.typed").exists()
