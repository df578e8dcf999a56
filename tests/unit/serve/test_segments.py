"""Events of the parser as a row of segments."""

from glm5.chat.events import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from glm5.serve.generation.segments import Begun, Ended, Grown, Segments

CALL = ToolCallStart(0, "call_1", "f")


def read(*events, is_whole=True):
    segments = Segments()
    return [*segments.read(events), *segments.finish(is_whole=is_whole)]


def test_stretches_of_one_kind_are_one_segment():
    events = [ReasoningDelta("a"), ReasoningDelta("b"), ContentDelta("c"), CALL, ToolCallArguments(0, "{}")]
    assert read(*events, ToolCallEnd(0), ContentDelta("d")) == [
        Begun(0, "reasoning"), Grown(0, "reasoning", "a"), Grown(0, "reasoning", "b"),
        Ended(0, "reasoning", "ab", None, is_whole=True),
        Begun(1, "text"), Grown(1, "text", "c"), Ended(1, "text", "c", None, is_whole=True),
        Begun(2, "call", CALL), Grown(2, "call", "{}"), Ended(2, "call", "{}", CALL, is_whole=True),
        Begun(3, "text"), Grown(3, "text", "d"), Ended(3, "text", "d", None, is_whole=True),
    ]  # fmt: skip


def test_white_space_between_calls_is_nothing():
    call = [CALL, ToolCallEnd(0)]
    kinds = [segment.kind for segment in read(*call, ContentDelta("\n"), *call) if isinstance(segment, Begun)]
    assert kinds == ["call", "call"]
    assert read(*call, ContentDelta("\n"), ContentDelta(" x"))[-1] == Ended(1, "text", "\n x", None, is_whole=True)
    assert read(ContentDelta("a"), ContentDelta("\n"))[-1].text == "a\n"


def test_what_is_cut_off_is_not_whole():
    assert not read(CALL, ToolCallArguments(0, "{"))[-1].is_whole
    assert not read(ContentDelta("a"), is_whole=False)[-1].is_whole
    assert read() == []
