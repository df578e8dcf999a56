"""The table of tokens per verification: means over seeds with their range, by depth, way and number of drafts."""

from glm5.bench.drafts.__main__ import Measured, table


def test_the_table_has_a_line_for_each_depth_and_way():
    found = [
        Measured(depth, seed, steps, way, 5000 + seed, 1 + depth * steps / 10 + seed / 100)
        for depth in (1, 3)
        for seed in (0, 1, 2)
        for steps in (1, 2)
        for way in ("greedy", "sampled")
    ]
    head, *lines, foot = table(found).split("\n")
    assert head.split() == ["drafted", "1", "2"]
    assert [line[:16].strip() for line in lines] == [f"depth {n}, {w}" for n in (1, 3) for w in ("greedy", "sampled")]
    assert " 1.31 (1.30 to 1.32)" in lines[2]
    assert "at least 5,000" in foot
