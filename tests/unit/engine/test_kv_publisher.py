"""The publisher of KV events: frames on the wire, replay, addresses, and a model whose cache a subscriber follows."""

import struct
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from glm5 import LLM, SamplingParams
from glm5.cli.flags import read
from glm5.cli.main import parse
from glm5.common.errors import ConfigError, UsageError
from glm5.config.engine import EngineConfig
from glm5.config.keywords import engine_config
from glm5.config.kv_events import KvEventsConfig
from glm5.config.presets import preset
from glm5.config.serve import ServeConfig
from glm5.engine.cache.changes import Cleared, Removed, Stored
from glm5.engine.transport.kv_events import KvEventPublisher, events_of
from tests.support.kv_events import RouterView
from tests.support.models import random_model

PATIENCE_MS = 20_000
LOCAL = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}
A, B, C = bytes(15) + b"\1", bytes(15) + b"\2", b"\3" + bytes(14) + b"\3"


@contextmanager
def publisher(**more):
    made = KvEventPublisher(KvEventsConfig.model_validate(LOCAL | more), 2)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def sockets(source, topic=b""):
    """A subscriber, and a client for replay."""
    # Not REQ, which takes one answer only: DEALER with REQ's empty frame.
    with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as dealer:
        for socket in (sub, dealer):
            socket.set(zmq.RCVTIMEO, PATIENCE_MS)
            socket.set(zmq.LINGER, 0)
        sub.set(zmq.SUBSCRIBE, topic)
        sub.connect(source.endpoint)
        dealer.connect(source.replay_endpoint)
        yield sub, dealer


def replayed(dealer, first: int) -> list[tuple[int, list]]:
    dealer.send_multipart([b"", struct.pack(">q", first)])
    found = []
    while True:
        empty, number, payload = dealer.recv_multipart()
        assert empty == b""
        if struct.unpack(">q", number) == (-1,):
            assert payload == b""
            return found
        found.append((struct.unpack(">q", number)[0], msgspec.msgpack.decode(payload)))


def test_the_form_of_events():
    changes = [
        Stored("device", A, None, (1, 2)),
        Stored("device", B, A, (3, 4)),
        Stored("host", B, A, (3, 4)),
        Removed("device", B),
        Removed("device", A),
        Removed("host", B),
        Cleared(),
    ]
    stored = {"type": "BlockStored", "block_size": 2, "lora_id": None, "lora_name": None}
    assert msgspec.to_builtins(events_of(changes, 2)) == [
        stored | {"block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "medium": "GPU"},
        stored | {"block_hashes": [2], "parent_block_hash": 1, "token_ids": [3, 4], "medium": "CPU"},
        {"type": "BlockRemoved", "block_hashes": [2, 1], "medium": "GPU"},
        {"type": "BlockRemoved", "block_hashes": [2], "medium": "CPU"},
        {"type": "AllBlocksCleared"},
    ]
    # Names are the last 64 bits.
    assert events_of([Stored("disk", C, None, (1, 2))], 2)[0].block_hashes == [3]


def test_frames_and_replay():
    with publisher(topic="kv@host@model", buffer_steps=3) as made, sockets(made.source, b"kv@") as (sub, dealer):
        assert [number for number, _ in replayed(dealer, 0)] == [0]
        sequence, topic, payload = 0, b"", b""
        last = 0  # published at the start
        while sequence == 0:  # a subscriber's first messages may be lost while it connects; replay finds them
            made.publish([Stored("device", A, None, (1, 2))])
            last += 1
            if sub.poll(50):
                topic, number, payload = sub.recv_multipart()
                (sequence,) = struct.unpack(">q", number)
        assert topic == b"kv@host@model"
        assert sequence >= 1
        time, events, rank = msgspec.msgpack.decode(payload)
        assert time > 1.7e9
        assert rank == 0
        assert [event["type"] for event in events] == ["BlockStored"]
        for _ in range(5):
            made.publish([Removed("device", A)])
        made.publish([Cleared()])
        last += 6
        while sequence < last:
            (sequence,) = struct.unpack(">q", sub.recv_multipart()[1])
        kept = replayed(dealer, 0)
        assert [number for number, _ in kept] == [last - 2, last - 1, last], "only the last three are kept"
        assert [event["type"] for event in kept[-1][1][1]] == ["AllBlocksCleared"]
        assert replayed(dealer, last + 1) == []
        dealer.send_multipart([b"", b"short"])  # ignored
        assert len(replayed(dealer, last)) == 1


def test_an_address_in_use_is_refused():
    with publisher() as made, pytest.raises(ConfigError, match=r"kv_events_config\.endpoint: got 'tcp://\*:\d+'; "):
        port = made.source.endpoint.rpartition(":")[2]
        KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://*:{port}"), 2)


def test_an_address_of_others_is_connected_to():
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.set(zmq.RCVTIMEO, PATIENCE_MS)
        sub.set(zmq.SUBSCRIBE, b"")
        port = sub.bind_to_random_port("tcp://127.0.0.1")
        made = KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{port}"), 2)
        while not sub.poll(50):
            made.publish([Cleared()])
        assert msgspec.msgpack.decode(sub.recv_multipart()[2])[1] == [{"type": "AllBlocksCleared"}]
        made.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"endpont": "tcp://*:1"}, r"kv_events_config: got 'endpont'; allowed: the keys .*; did you mean endpoint\?"),
        ({"endpoint": "tcp://*:1"}, "kv_events_config.enable_kv_cache_events: got None; allowed: true, to publish"),
        ({"enable_kv_cache_events": True, "endpoint": "5557"}, r"kv_events_config\.endpoint: got '5557'; allowed: an "),
        ({"enable_kv_cache_events": True, "publisher": "nats"}, r"kv_events_config\.publisher: got 'nats'; allowed: "),
    ],
)  # fmt: skip
def test_wrong_settings(given, message):
    with pytest.raises(ConfigError, match=message):
        engine_config({"kv_events_config": given})


def test_the_flag_names_the_nearest_key():
    args = parse(["serve", "model", "--kv-events-config", '{"enable_kv_cache_event": true}'])
    with pytest.raises(UsageError, match=r"--kv-events-config: got 'enable_kv_cache_event'; .* mean enable_kv_"):
        read(ServeConfig, args)
    args = parse(["serve", "model", "--kv-events-config.endpoint", "tcp://*:5557"])
    with pytest.raises(UsageError, match=r"--kv-events-config.enable_kv_cache_events: got None; allowed: true, to"):
        read(ServeConfig, args)


def test_events_need_a_prefix_cache():
    with pytest.raises(ConfigError, match=r"kv_events_config.* false without enable_prefix_caching"):
        engine_config({"kv_events_config": {"enable_kv_cache_events": True}, "enable_prefix_caching": False})
    off = {"enable_kv_cache_events": False}
    assert engine_config({"kv_events_config": off, "enable_prefix_caching": False}).kv_events_config is not None
    assert not KvEventsConfig(enable_kv_cache_events=True, publisher="null").is_on
    assert EngineConfig().kv_events_config is None


def test_a_subscriber_follows_a_model_s_cache(rng):
    """Forks, evictions, a reset and a sleep of a small model; what is missed is replayed."""
    settings = {"max_num_seqs": 4, "num_gpu_blocks_override": 12, "max_model_len": 400, "num_speculative_tokens": 0}
    llm = LLM(random_model(11, preset("tiny")), kv_events_config=LOCAL, **settings)
    core = llm.client.link.core
    shared = [rng.randrange(256) for _ in range(200)]
    with llm, sockets(llm.client.info.kv_events) as (_, dealer):
        for turn in range(5):
            prompts = [shared[: rng.randrange(1, 200)] + [rng.randrange(256) for _ in range(70)] for _ in range(2)]
            llm.generate(prompts, SamplingParams(max_tokens=rng.randint(1, 40), n=rng.choice([1, 2])), use_tqdm=False)
            if turn == 1:
                llm.reset_prefix_cache()
            if turn == 3:
                llm.sleep(1)
                llm.wake_up()
        view = RouterView(64)
        while core.has_work:
            core.step()
        batches = replayed(dealer, 0)
        assert [number for number, _ in batches] == list(range(len(batches)))
        for _, (_, events, _) in batches:
            for event in events:
                view.apply(event)
        view.check(core.scheduler.page_manager)
        assert view.blocks["GPU"]
