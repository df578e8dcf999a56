"""What a checkpoint's generation_config.json says is what requests begin with."""

import json
import logging

from glm5.engine.defaults import read_defaults


def test_a_repetition_penalty_counts(tmp_path, caplog):
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.3, "temperature": 0.5}))
    with caplog.at_level(logging.WARNING):
        params = read_defaults("auto", tmp_path).params()
    assert (params.repetition_penalty, params.temperature) == (1.3, 0.5)
    assert not caplog.messages
