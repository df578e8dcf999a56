"""One torch thread unless asked for more, as many processes share the machine; every randomised test prints its seed.

Where there is no GPU, Triton kernels run under Triton's interpreter, on the CPU.
"""

import gc
import logging
import os
import random
import signal
import zlib

import pytest


def pytest_addoption(parser):
    parser.addoption("--torch-threads", type=int, default=1, help="threads of torch in the tests' process")


def pytest_configure():
    """Triton looks when it is first imported, which any package may do, and when a kernel is defined."""
    gc.disable()  # until all is imported and collected: it took a quarter of that time, and found nothing
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_ignore_collect(collection_path, config):
    """`-m slow` and `-m long` import no file that has no such test."""
    chosen = config.option.markexpr.partition(" ")[0]
    if chosen in ("slow", "long") and collection_path.suffix == ".py":
        return f"mark.{chosen}" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_finish():
    """What is there by now stays, so that no garbage collection of a test visits it."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure():
    """Extensions complain of what is not collected in the end."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def torch_threads(request):
    import torch

    torch.set_num_threads(request.config.getoption("torch_threads"))


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_interrupts():
    """Also in a shell's background, where processes start with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logging_as_before():
    """A command that a test runs in this process sets up logging, for that test alone."""
    loggers = [logging.getLogger(name) for name in ("glm5", "uvicorn")]
    before = [(logger.handlers[:], logger.level) for logger in loggers]
    yield
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)


@pytest.fixture
def seed(request) -> int:
    """A seed of the test's own: the same in every run, and shown when the test fails."""
    value = zlib.crc32(request.node.nodeid.encode()) % 2**31
    print(f"seed {value} of {request.node.nodeid}")
    return value


@pytest.fixture
def rng(seed) -> random.Random:
    return random.Random(seed)


def pytest_collection_modifyitems(items):
    """Tests of what is not here are skipped, with the reason."""
    _skip_without(items, "gpu", _has_gpu, "needs a CUDA device")
    _skip_without(items, "compiler", _has_compiler, "needs a C++ compiler")


def _skip_without(items, marker: str, is_here, reason: str):
    """`is_here` is asked only where a test has the marker."""
    marked = [item for item in items if item.get_closest_marker(marker)]
    if marked and not is_here():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_compiler() -> bool:
    from glm5.kernels.native_code import find_compiler

    return find_compiler() is not None
