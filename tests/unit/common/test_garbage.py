"""Objects that a serving process exempts from collections are collected again when it ends."""

import gc
import subprocess
import sys

import pytest

from glm5.common.garbage import settled

ENDED = "import atexit, gc; from glm5.common.garbage import settle; settle(); print(gc.get_freeze_count() > 0)"


def test_nothing_is_exempt_when_the_interpreter_ends():
    program = f"{ENDED}; atexit._run_exitfuncs(); print(gc.get_freeze_count())"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.split() == ["True", "0"]


def test_collections_are_as_before_after_a_run():
    before = gc.get_threshold()
    with pytest.raises(KeyboardInterrupt), settled():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() != before
        raise KeyboardInterrupt
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
