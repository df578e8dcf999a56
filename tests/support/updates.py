"""What a message says of each answer, whichever way it is written."""

from collections.abc import Iterator

from glm5.engine.transport.wire import Update, Updates


def updates_of(message: Updates) -> Iterator[Update]:
    """The updates of a message; those of its `growth` first."""
    if message.growth is not None:
        yield from message.growth.updates()
    yield from message.updates
