"""The names of weight versions, which an operator gives when they are loaded."""

MAX_NAMES = 1000  # the oldest are dropped: no request runs through so many updates


class WeightNames:
    """`known`: names by version."""

    def __init__(self) -> None:
        self.known: dict[int, str] = {}

    def of(self, version: int) -> str:
        """The name of a version: the one given when it was loaded, else its number."""
        return self.known.get(version, str(version))

    def set(self, version: int, name: str | None) -> None:
        """Set the name of a version that was just loaded; None: its number is its name."""
        self.known.pop(version, None)  # may be left from an engine that has died
        if name is not None:
            self.known[version] = name
        while len(self.known) > MAX_NAMES:
            del self.known[next(iter(self.known))]
