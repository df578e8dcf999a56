"""The file of DPO's reference: what cannot be one is refused by name before it is learnt from."""

import numpy as np
import pytest

from glm5.common.errors import TrainingError
from glm5.train.reference import Reference

KEYS, VALUES = np.zeros((2, 16), np.uint8), np.array([-1.0, -2.0])


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (KEYS, np.array([np.nan, 1.0])),
        (KEYS, np.array([np.inf, 1.0])),
        (KEYS, np.zeros((2, 2))),
        (KEYS, np.array(["a", "b"])),
        (KEYS[:, :4], VALUES),
        (KEYS.astype(np.float64), VALUES),
        (KEYS[:1], VALUES),
    ],
)
def test_a_file_that_is_no_reference_is_refused(tmp_path, keys, values):
    file = tmp_path / "reference-s.npz"
    np.savez(file, keys=KEYS, values=VALUES)
    Reference(file)
    np.savez(file, keys=keys, values=values)
    with pytest.raises(TrainingError, match=r"reference-s\.npz is damaged .*--restart begins the run anew"):
        Reference(file)
