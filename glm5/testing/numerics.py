"""How far two tensors are apart, in the one measure that tests and gates use.

    rel_rms(got, want) = sqrt( mean((got - want)^2) / mean(want^2) )            in float64

Unlike a maximum of relative errors it does not blow up where `want` crosses zero, and unlike an absolute one it does
not depend on the scale of the values.
"""

from torch import Tensor


def rel_rms(got: Tensor, want: Tensor) -> float:
    """Relative root-mean-square error; 0.0 for two empty tensors, inf where only `want` is all zeros.

    A NaN on either side gives NaN, which is below no budget. Raises ValueError where the shapes differ.
    """
    if got.shape != want.shape:
        raise ValueError(f"rel_rms: shapes differ, got {list(got.shape)}, want {list(want.shape)}")
    got, want = got.detach().double(), want.detach().double()
    wrong, size = (got - want).norm(), want.norm()
    if bool(wrong == 0):
        return 0.0
    return float(wrong / size)
