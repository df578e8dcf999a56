"""What front ends share, in one event loop: two ends of each connection, and what is given back when one closes."""

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress

import pytest

from glm5.common.watching import Silence
from glm5.serve.coordination.coordinator import Coordinator, Member
from glm5.serve.coordination.messages import Abort, Heartbeat, NameWeights, Report, ToFrontEnd, ToMain
from glm5.serve.coordination.peer import Peer
from glm5.serve.coordination.remote import Remote, beat
from glm5.serve.http.call import Call
from glm5.serve.http.errors import ApiError
from glm5.serve.http.keys import Tenant
from glm5.serve.http.limits import Limits
from glm5.serve.metrics.prometheus import Page, merge
from glm5.serve.service.response_store import MAX_BYTES, Stored
from glm5.serve.service.state import ServerState

SECONDS = 20  # an upper limit for what takes a moment


class FrontEnd:
    """A front end without HTTP: what the main process tells it is noted, and answered."""

    def __init__(self, coordinator, client):
        self.member, self.coordinator = Member(client, Silence(SECONDS, SECONDS)), coordinator
        self.page, self.num_active, self.told, self.is_silent = Page({}), 0, [], False
        self.served = self.page.counter("served_total", "Served.", "code")
        self.seconds = self.page.histogram("seconds", "Seconds.", [1, 10])

    async def connect(self):
        ours, theirs = socket.socketpair()
        self.member.peer = await Peer.on(ours, ToMain, lambda message: self.coordinator.handle(self.member, message))
        self.peer = await Peer.on(theirs, ToFrontEnd, self.handle)
        self.remote = Remote(self.peer)
        self.coordinator.members.add(self.member)
        self.running = asyncio.ensure_future(self.peer.run())
        self.watching = asyncio.ensure_future(self.watch())

    async def watch(self):
        await self.member.peer.run()
        self.coordinator.leave(self.member)

    async def die(self):
        self.peer._writer.close()
        await self.watching
        await self.running

    def beat(self):
        self.peer.send(Heartbeat(self.page.totals(), self.num_active))

    def handle(self, message):
        self.told.append(message)
        match message:
            case Report():
                if self.is_silent:
                    return asyncio.Event().wait()
                self.beat()
            case Abort():
                return 2
        return None


@asynccontextmanager
async def front_ends(limits=None, num=2):
    coordinator = Coordinator(limits or Limits())
    found = [FrontEnd(coordinator, client) for client in range(1, num + 1)]
    for each in found:
        await each.connect()
    try:
        async with asyncio.timeout(SECONDS):
            yield coordinator, *found
    finally:
        for each in found:
            await each.die()


def stored(name, text="", *, status="completed", earlier=()):
    response = {"id": name, "status": status, "output": [{"id": f"m{name}", "text": text}]}
    return Stored(response, [{"id": f"i{name}"}], list(earlier), len(json.dumps(response)))


async def refused(waits) -> str | None:
    with pytest.raises(ApiError) as caught:
        await waits
    return caught.value.code


def test_limits_hold_for_all_together_and_places_come_back():
    async def main():
        limits = Limits(3, max_concurrency=2)
        async with front_ends(limits) as (_, a, b):
            alice, bob = Tenant("alice"), Tenant("bob", max_concurrency=9)
            first, second, third = Call("1", alice), Call("2", alice), Call("3", alice)
            await a.remote.enter(first)
            await b.remote.enter(second)
            with pytest.raises(ApiError, match="this key has 2 running requests; allowed: 2") as caught:
                await a.remote.enter(third)
            error = caught.value
            assert (error.status, error.code, error.retry_after) == (429, "concurrency_limit_exceeded", 1)
            a.remote.leave(third)  # as every request does, refused or not
            a.remote.leave(first)
            a.remote.leave(first)
            await a.remote.enter(third)
            other = Call("4", bob)
            await b.remote.enter(other)
            assert await refused(b.remote.enter(Call("5", bob))) == "queue_full"
            await b.remote.grow(other, 1)  # its own place
            assert await refused(b.remote.grow(other, 1)) == "queue_full"
            a.remote.leave(third)
            await b.remote.grow(other, 1)
            assert (other.places, other.num_answers, limits.num_places) == (2, 2, 3)
            with pytest.raises(ApiError, match="asks for 5 answers; allowed: 3") as caught:
                await b.remote.grow(other, 3)
            assert (caught.value.status, caught.value.param) == (400, "n")
            await b.die()
            assert limits.num_places == 0
            assert await refused(_twice_more(a, alice)) == "concurrency_limit_exceeded"

    async def _twice_more(a, tenant):
        for number in range(3):
            await a.remote.enter(Call(str(number), tenant))

    asyncio.run(main())


def test_rates_are_counted_over_all():
    async def main():
        async with front_ends(Limits(requests_per_minute=3)) as (_, a, b):
            for each in (a, b, a):
                await each.remote.enter(Call("1", Tenant("a")))
            assert await refused(b.remote.enter(Call("2", Tenant("a")))) == "rate_limit_exceeded"
            await b.remote.enter(Call("3", Tenant("b", requests_per_minute=1)))

    asyncio.run(main())


def test_whoever_stops_waiting_for_a_place_leaves_none_behind():
    async def main():
        limits = Limits(5)
        async with front_ends(limits, num=1) as (_, a):
            for _ in range(10):
                call = Call("1")
                entering = asyncio.ensure_future(a.remote.enter(call))
                await asyncio.sleep(0)
                entering.cancel()
                a.remote.leave(call)
            await a.remote.enter(Call("2"))  # everything before it has been read
            assert limits.num_places == 1

    asyncio.run(main())


def test_places_whatever_happens(rng):
    """Random requests of three front ends, of which one dies now and then: places are those of what runs."""

    async def main():
        limits = Limits(12, max_concurrency=5)
        async with front_ends(limits, num=3) as (coordinator, *found):
            running: dict[FrontEnd, list[Call]] = {each: [] for each in found}
            for step in range(300):
                each = rng.choice(list(running))
                await act(each, running, coordinator, step)
                for one in running:
                    await one.remote.find("", "")  # what was sent before has been read
                calls = [call for calls in running.values() for call in calls]
                assert limits.num_places == sum(call.places for call in calls) <= 12
                for name in "abc":
                    assert sum(call.tenant.name == name for call in calls) <= 5
            for each in list(running):
                await each.die()
            assert limits.num_places == 0

    async def act(each, running, coordinator, step):
        calls = running[each]
        with suppress(ApiError):
            match rng.randrange(12):
                case 0:
                    await each.die()
                    del running[each]
                    another = FrontEnd(coordinator, 10 + step)
                    await another.connect()
                    running[another] = []
                case 1 | 2 | 3 | 4 if calls:
                    each.remote.leave(calls.pop(rng.randrange(len(calls))))
                case 5 | 6 if calls:
                    await each.remote.grow(rng.choice(calls), rng.randrange(1, 4))
                case _:
                    call = Call(str(step), Tenant(rng.choice("abc")))
                    await each.remote.enter(call)
                    calls.append(call)

    asyncio.run(main())


def test_stored_responses_are_everybodys():
    async def main():
        async with front_ends() as (_, a, b):
            odd = {"text": "\ud800", "big": 10**40}  # JSON has both, MessagePack neither
            await a.remote.keep("t", stored("one", "x", earlier=[odd]))
            found = await b.remote.find("t", "one")
            assert found == stored("one", "x", earlier=[odd])
            assert found.items[0] == odd
            assert await b.remote.find("u", "one") is None
            await b.remote.keep("t", stored("two", "y", earlier=found.items))
            assert await a.remote.items("t", {"mone", "itwo", "no"}) == {
                "mone": {"id": "mone", "text": "x"},
                "itwo": {"id": "itwo"},
            }
            assert await b.remote.drop("t", "one")
            assert not await a.remote.drop("t", "one")
            await a.remote.replace("t", stored("one", "z"))  # it was deleted meanwhile
            assert await a.remote.find("t", "one") is None
            assert (await a.remote.find("t", "two")).items[2]["text"] == "x"
            huge = Stored(stored("huge").response, [], [], MAX_BYTES + 1)
            await a.remote.keep("t", huge)
            assert await b.remote.find("t", "huge") is None

    asyncio.run(main())


def test_responses_in_progress_go_with_their_front_end():
    async def main():
        async with front_ends() as (_, a, b):
            await a.remote.keep("t", stored("done", status="in_progress"))
            await a.remote.replace("t", stored("done"))
            await a.remote.keep("t", stored("running", status="in_progress"))
            a.remote.discard("t", "nothing")
            assert (await b.remote.find("t", "running")).is_running
            await a.die()
            assert await b.remote.find("t", "running") is None
            assert await b.remote.find("t", "done") == stored("done")

    asyncio.run(main())


def test_what_concerns_all_is_told_to_the_others():
    async def main():
        async with front_ends(num=3) as (coordinator, a, b, c):
            assert await a.remote.abort_elsewhere("t", "r") == 4
            await b.remote.name_weights_elsewhere(3, "new")
            assert a.told == [NameWeights(3, "new")]
            assert b.told == [Abort("t", "r")]
            assert c.told == [Abort("t", "r"), NameWeights(3, "new")]
            assert coordinator.weight_names.of(3) == "new"

    asyncio.run(main())


def test_metrics_are_summed_and_never_go_back(monkeypatch):
    monkeypatch.setattr("glm5.serve.coordination.coordinator.ASK_SECONDS", 0.05)

    async def main():
        async with front_ends(num=3) as (_, a, b, c):

            async def page(of):
                figures = await of.remote.figures(of.page.totals(), of.num_active, stats.pop(of, None))
                assert figures.stats == last_stats
                return of.page.text(figures.totals), figures.num_active

            stats = {a: {"steps": 1}}
            last_stats = {"steps": 1}

            a.served.add(1, "200")
            b.served.add(2, "200")
            c.served.add(3, "404")
            for each, value in ((a, 0.5), (b, 5), (c, 50)):
                each.seconds.observe(value)
            a.num_active, b.num_active = 1, 2
            for each in (a, b, c):
                text, num_active = await page(each)
                assert num_active == 3
                for line in (
                    'served_total{code="200"} 3', 'served_total{code="404"} 3', 'seconds_bucket{le="1"} 1',
                    'seconds_bucket{le="10"} 2', 'seconds_bucket{le="+Inf"} 3', "seconds_sum 55.5", "seconds_count 3",
                ):  # fmt: skip
                    assert line in text.splitlines(), text
            c.is_silent = True  # it hangs: its last figures count
            a.served.add(1, "200")
            assert 'served_total{code="200"} 4' in (await page(b))[0]
            assert 'served_total{code="404"} 3' in (await page(b))[0]
            await c.die()
            await a.die()
            text, num_active = await page(b)
            assert num_active == 2
            assert {'served_total{code="200"} 4', 'served_total{code="404"} 3', "seconds_count 3"} <= {
                *text.splitlines()
            }

    asyncio.run(main())


def test_all_that_a_scrape_has_shown_is_kept_when_every_front_end_dies_at_once():
    """Also what the one that answers has counted while it waited for the figures of the others."""

    async def main():
        async with front_ends() as (coordinator, a, b):
            a.served.add(1, "200")
            b.served.add(2, "200")
            asking = asyncio.ensure_future(a.remote.figures(a.page.totals(), 0, None))
            await asyncio.sleep(0)  # it is sent
            a.served.add(5, "200")
            shown = a.page.text((await asking).totals)
            assert 'served_total{code="200"} 3' in shown.splitlines()
            b.served.add(4, "404")
            b.beat()  # one second before its end, say
            await a.remote.find("t", "x")
            for each in (a, b):
                await each.die()
            c = FrontEnd(coordinator, 3)
            await c.connect()
            after = c.page.text((await c.remote.figures(c.page.totals(), 0, None)).totals).splitlines()
            assert {'served_total{code="200"} 3', 'served_total{code="404"} 4'} <= {*after}
            await c.die()

    asyncio.run(main())


def test_what_is_told_by_one_process_is_not_summed():
    page = Page({})
    gauge, counter, own = page.gauge("g", "G."), page.counter("c", "C."), page.counter("d", "D.", "x")
    gauge.set(5)
    counter.set_total(7)
    own.add(1, "a")
    totals = {"g": {(): [1.0]}, "c": {(): [9.0]}, "d": {("b",): [2.0]}}
    assert page.totals() == {"d": {("a",): [1.0]}}
    merge(totals, page.totals())
    lines = [line for line in page.text(totals).splitlines() if not line.startswith("#")]
    assert lines == ["g 5", "c 7", 'd{x="b"} 2', 'd{x="a"} 1']
    merge(totals, {"d": {("b",): [1.0], ("c",): [4.0]}})
    assert totals["d"] == {("b",): [3.0], ("a",): [1.0], ("c",): [4.0]}


def test_a_main_process_that_hangs_is_told_of_within_a_bounded_time(monkeypatch, caplog):
    monkeypatch.setattr("glm5.serve.coordination.remote.BEAT_SECONDS", 0.01)
    monkeypatch.setattr("glm5.serve.coordination.remote.SILENT_SECONDS", 0.05)

    async def main():
        async with front_ends() as (coordinator, a, _):
            state, may_answer, handle = ServerState(), asyncio.Event(), coordinator.handle

            async def late(member, message):
                await may_answer.wait()
                return handle(member, message)

            monkeypatch.setattr(coordinator, "handle", late)
            beating = asyncio.ensure_future(beat(a.peer, state, lambda: Heartbeat({}, 3)))
            call = Call("1", Tenant("t"))
            with pytest.raises(ApiError) as caught:  # a request that came before
                await a.remote.enter(call)
            assert caught.value.code == "main_process_silent"
            assert state.is_main_silent
            a.remote.leave(call)
            may_answer.set()
            async with asyncio.timeout(SECONDS):
                while state.is_main_silent:
                    await asyncio.sleep(0)
            assert a.member.heartbeat.num_active == 3
            assert coordinator.limits.num_places == 0
            beating.cancel()

    asyncio.run(main())
    assert [line.rpartition(" process ")[2] for line in caplog.messages] == ["does not answer", "answers again"]


def test_calls_of_a_peer_that_has_gone_fail():
    async def main():
        async with front_ends() as (_, a, b):
            b.is_silent = True
            asking = asyncio.ensure_future(b.member.peer.call(Report(), None))
            await asyncio.sleep(0)
            await b.die()
            with pytest.raises(ConnectionError):
                await asking
            with pytest.raises(ConnectionError):
                await b.remote.find("t", "x")
            assert await b.member.ask(Report(), None) is None
            # A bug on the other side is an error, not silence.
            with pytest.raises(ApiError, match="KeyError") as caught:
                await a.remote.grow(Call("1", places=1, number=99), 2)
            assert caught.value.code == "internal_error"

    asyncio.run(main())
