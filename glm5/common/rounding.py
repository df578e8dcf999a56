"""Sizes rounded up, so that there are few of them."""


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count` and 1."""
    return 1 << max(0, count - 1).bit_length()
