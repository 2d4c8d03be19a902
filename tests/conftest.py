"""Set up for all tests: quiet TensorFlow, a fair share of the cores, real data."""

import gc
import os
import pathlib

# Before TensorFlow is imported: each pytest-xdist worker takes its share of cores.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    _threads = str(max(1, (os.cpu_count() or 1) // _workers))
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", _threads)
    os.environ.setdefault("OMP_NUM_THREADS", _threads)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

# For the tests of tf.distribute; others run on the first of them.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 4,
)
_gpus = tf.config.list_physical_devices("GPU")
if _gpus:
    # Tests compare with float32, and products in TF32 have three digits.
    tf.config.experimental.enable_tensor_float_32_execution(False)
if len(_gpus) == 1:  # it stands for several; MiB, because each has to have a limit
    tf.config.set_logical_device_configuration(
        _gpus[0], [tf.config.LogicalDeviceConfiguration(memory_limit=2048)] * 4
    )

# No deadline: the first example of a test traces a TensorFlow graph.
hypothesis.settings.register_profile(
    "keras_dpopt", deadline=None, derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("keras_dpopt")

_DATA_VARIABLE = "KERAS_DPOPT_DATA_DIR"
_NO_DATA = "real data is missing"


def pytest_collection_finish():
    """Takes a tenth off the tests: the collector looks at what is imported no more.

    What a test leaves behind it still collects, in larger portions.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_addoption(parser):
    parser.addoption(
        "--data-dir",
        default=os.environ.get(_DATA_VARIABLE),
        help="folder of prepared TFDS data sets (mnist, ...) for the tests on real "
        f"data; default: the environment variable {_DATA_VARIABLE}",
    )


@pytest.fixture(scope="session")
def data_dir(pytestconfig) -> pathlib.Path:
    """The TFDS data_dir with real data; a test that asks for it is skipped without."""
    given = pytestconfig.getoption("--data-dir")
    if not given:
        pytest.skip(f"{_NO_DATA}: set {_DATA_VARIABLE} or give --data-dir")
    path = pathlib.Path(given)
    if not path.is_dir():
        pytest.fail(f"--data-dir / {_DATA_VARIABLE}: there is no folder {path}")
    return path


def pytest_terminal_summary(terminalreporter):
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if _NO_DATA in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.section("real data", sep="!")
        terminalreporter.write_line(
            f"{len(skipped)} tests on real data did NOT run: set {_DATA_VARIABLE} "
            "(or give --data-dir) to a folder of prepared TFDS data sets."
        )
