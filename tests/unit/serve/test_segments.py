"""Events of the parser as a row of segments."""

from glm5.chat.events import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from glm5.serve.generation.segments import SegmentDelta, SegmentEnd, Segments, SegmentStart

CALL = ToolCallStart(0, "call_1", "f")


def read(*events, is_complete=True):
    segments = Segments()
    return [*segments.read(events), *segments.finish(is_complete=is_complete)]


def test_stretches_of_one_kind_are_one_segment():
    events = [ReasoningDelta("a"), ReasoningDelta("b"), ContentDelta("c"), CALL, ToolCallArguments(0, "{}")]
    assert read(*events, ToolCallEnd(0), ContentDelta("d")) == [
        SegmentStart(0, "reasoning"), SegmentDelta(0, "reasoning", "a"), SegmentDelta(0, "reasoning", "b"),
        SegmentEnd(0, "reasoning", "ab", None, is_complete=True),
        SegmentStart(1, "text"), SegmentDelta(1, "text", "c"), SegmentEnd(1, "text", "c", None, is_complete=True),
        SegmentStart(2, "call", CALL), SegmentDelta(2, "call", "{}"),
        SegmentEnd(2, "call", "{}", CALL, is_complete=True),
        SegmentStart(3, "text"), SegmentDelta(3, "text", "d"), SegmentEnd(3, "text", "d", None, is_complete=True),
    ]  # fmt: skip


def test_white_space_between_calls_is_nothing():
    call = [CALL, ToolCallEnd(0)]
    kinds = [segment.kind for segment in read(*call, ContentDelta("\n"), *call) if isinstance(segment, SegmentStart)]
    assert kinds == ["call", "call"]
    assert read(*call, ContentDelta("\n"), ContentDelta(" x"))[-1] == SegmentEnd(
        1, "text", "\n x", None, is_complete=True
    )
    assert read(ContentDelta("a"), ContentDelta("\n"))[-1].text == "a\n"


def test_what_is_cut_off_is_not_whole():
    assert not read(CALL, ToolCallArguments(0, "{"))[-1].is_complete
    assert not read(ContentDelta("a"), is_complete=False)[-1].is_complete
    assert read() == []
