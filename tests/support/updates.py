"""What a message says of each answer, whichever way it is written."""

from collections.abc import Iterator

from glm5.engine.transport.wire import Update, Updates


def updates_of(message: Updates) -> Iterator[Update]:
    """The updates of a message; those of its `growth` first."""
    growth = message.growth
    if growth is not None:
        start = 0
        for seq_id, count in zip(growth.seq_ids, growth.counts or [1] * len(growth.seq_ids), strict=True):
            yield Update(seq_id, growth.token_ids[start : start + count], growth.version)
            start += count
        assert start == len(growth.token_ids)
    yield from message.updates
