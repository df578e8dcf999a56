"""A key names a page together with everything before it; a fingerprint names what its bytes mean."""

import pytest

from glm5.engine.tiers.key import page_key
from glm5.engine.tiers.layout import PageLayout

# Of `page_key(page_key(None, [1, 2], b"s"), [3, 4], b"s")`. Files on disk carry such keys: they must not change.
GOLDEN = "42bbf87e485666136a0555147cf31b22"


def chain(*pages, salt=b"s"):
    key = None
    for page in pages:
        key = page_key(key, page, salt)
    return key


def test_keys_are_the_same_in_every_process():
    assert chain([1, 2], [3, 4]).digest.hex() == GOLDEN


def test_a_key_tells_apart_salt_prefix_and_tokens():
    pages = [[1, 2], [3, 4]], [[1, 9], [3, 4]], [[1, 2], [3, 9]], [[3, 4], [1, 2]], [[3, 4]], [[1, 2, 3, 4]]
    keys = [chain(*page, salt=salt) for page in pages for salt in (b"s", b"t", b"")]
    assert len({key.digest for key in keys}) == len(keys)
    assert chain([1, 2], [3, 4]) == chain((1, 2), (3, 4))


def test_salt_and_tokens_do_not_run_into_each_other():
    assert page_key(None, [0x61626364], b"").digest != page_key(None, [], b"abcd").digest


def test_a_new_salt_gives_new_keys_under_the_same_parent():
    parent = page_key(None, [1, 2], b"old")
    assert page_key(parent, [3, 4], b"new") != page_key(parent, [3, 4], b"old")


@pytest.mark.parametrize(
    "other",
    [
        PageLayout.of(8, {"a": 4, "b": 8}, {"weights": "x"}),
        PageLayout.of(4, {"b": 8, "a": 4}, {"weights": "x"}),
        PageLayout.of(4, {"a": 4, "b": 12}, {"weights": "x"}),
        PageLayout.of(4, {"a": 4, "b": 8}, {"weights": "y"}),
        PageLayout.of(4, {"a": 4, "b": 8}, {}),
    ],
)
def test_a_fingerprint_covers_parts_their_order_and_facts(other):
    layout = PageLayout.of(4, {"a": 4, "b": 8}, {"weights": "x"})
    assert layout.fingerprint != other.fingerprint
    assert layout == PageLayout.of(4, {"a": 4, "b": 8}, {"weights": "x"})
    assert layout.num_bytes == 12
