"""Blocks in host memory: who holds one keeps it, the least recently used goes first, and none is lost."""

import pytest
import torch

from glm5.common.errors import ConfigError
from glm5.engine.tiers.host import HostTier
from glm5.engine.tiers.key import PageKey
from tests.unit.engine.tiers.pages import LAYOUT, content_of, key_of


def tier(num_blocks: int) -> HostTier:
    return HostTier(num_blocks * LAYOUT.num_bytes, LAYOUT)


def put(host: HostTier, number: int) -> bool:
    block = host.claim(key_of(number))
    if block is None:
        return False
    block.content.copy_(content_of(number))
    host.publish(block)
    host.release(block)
    return True


def has(host: HostTier, number: int) -> bool:
    block = host.lease(key_of(number))
    if block is None:
        return False
    assert torch.equal(block.content, content_of(number))
    host.release(block)
    return True


def test_a_page_comes_back_as_it_was():
    host = tier(3)
    assert all(put(host, i) for i in range(3))
    assert all(has(host, i) for i in range(3))
    assert not has(host, 3)
    assert len(host) == 3


def test_the_least_recently_used_goes_first():
    host = tier(3)
    for i in range(3):
        put(host, i)
    assert has(host, 0)
    put(host, 3)
    assert [has(host, i) for i in range(4)] == [True, False, True, True]
    assert list(host.dropped) == [key_of(1).digest]
    assert host.num_evicted == 1


def test_capacity_is_a_bound_and_rounds_down():
    host = HostTier(3 * LAYOUT.num_bytes - 1, LAYOUT)
    for i in range(9):
        put(host, i)
    assert host.num_blocks == len(host) == 2


def test_a_leased_block_is_not_evicted_and_when_all_are_there_is_none():
    host = tier(2)
    put(host, 0)
    put(host, 1)
    blocks = [host.lease(key_of(i)) for i in range(2)]
    assert not put(host, 2)
    host.release(blocks[1])
    assert put(host, 2)
    assert torch.equal(blocks[0].content, content_of(0))
    host.release(blocks[0])
    assert host.num_leased == 0


def test_a_claimed_block_is_seen_by_nobody_and_free_again_unless_published():
    host = tier(1)
    block = host.claim(key_of(0))
    assert not has(host, 0)
    assert key_of(0) not in host
    host.release(block)
    assert put(host, 1)
    assert len(host) == 1


def test_the_first_of_two_blocks_of_one_key_stays():
    host = tier(2)
    first, second = host.claim(key_of(0)), host.claim(key_of(0))
    first.content.copy_(content_of(0))
    for block in (first, second):
        host.publish(block)
        host.release(block)
    assert has(host, 0)
    assert len(host) == 1
    assert put(host, 1)
    assert len(host) == 2


def test_a_colliding_digest_is_a_miss():
    host = tier(1)
    put(host, 0)
    collision = PageKey(key_of(0).digest, key_of(1).tokens)
    assert collision not in host
    assert host.lease(collision) is None


def test_clear_drops_all_and_leased_blocks_when_they_are_released():
    host = tier(2)
    put(host, 0)
    put(host, 1)
    block = host.lease(key_of(0))
    host.clear()
    assert len(host) == 0
    assert torch.equal(block.content, content_of(0))
    host.release(block)
    assert put(host, 2)
    assert put(host, 3)
    assert has(host, 2)


def test_too_little_memory_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=f"got 10 bytes, but one page takes {LAYOUT.num_bytes}"):
        HostTier(10, LAYOUT)


@pytest.mark.parametrize("num_blocks", [1, 3, 8])
def test_no_block_is_lost_or_given_twice_in_random_use(num_blocks, rng):
    host, held = tier(num_blocks), []
    for _ in range(2000):
        action, number = rng.choice(["claim", "lease", "release", "release", "drop", "clear"]), rng.randrange(12)
        if action == "claim" and (block := host.claim(key_of(number))):
            assert all(block is not other for other in held)
            block.content.copy_(content_of(number))
            if rng.random() < 0.8:
                host.publish(block)
            held.append(block)
        elif action == "lease" and (block := host.lease(key_of(number))):
            held.append(block)
        elif action == "drop" and held and rng.random() < 0.2:
            host.drop(rng.choice(held))
        elif action == "clear" and rng.random() < 0.02:
            host.clear()
        elif action == "release" and held:
            host.release(held.pop(rng.randrange(len(held))))
        by_digest = {key_of(i).digest: i for i in range(12)}
        assert all(torch.equal(block.content, content_of(by_digest[block.key.digest])) for block in held)
        assert host.num_leased == len({id(block) for block in held})
    for block in held:
        host.release(block)
    assert host.num_leased == 0
    assert sum(put(host, 100 + i) for i in range(num_blocks)) == num_blocks
    assert len(host) == num_blocks
