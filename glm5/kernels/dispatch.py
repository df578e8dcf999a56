"""What every op's front door shares: the error for an implementation name that does not exist."""


def unknown_impl(op: str, impl: str, allowed: tuple[str, ...]) -> ValueError:
    """The error to raise when `impl` is not one of `allowed`."""
    return ValueError(f"{op}: unknown impl {impl!r}, expected one of {', '.join(('auto', *allowed))}")
