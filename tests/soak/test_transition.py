"""The transition in miniature does what it is to show, at one seed: dense attention to 16 of 256 keys."""

import json
from pathlib import Path

import pytest

from glm5.cli.main import main

pytestmark = pytest.mark.long

RECIPE = Path(__file__).parents[2] / "recipes" / "needle-dsa.toml"


def test_selected_keys_do_what_all_do_and_windows_do_not(tmp_path):
    assert main(["bench", "transition", str(RECIPE), "--seeds", "0", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "transition.json").read_text())
    assert found["verdicts"]
    assert all(found["verdicts"].values()), found["verdicts"]
