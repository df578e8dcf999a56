"""Many streaming clients of one server, in a process of their own: `python -m tests.support.streaming_crowd`.

stdin has a `Load` as JSON, stdout gets a `CrowdReport`. Of each ten clients, one leaves half-way through every answer
and one reads slowly; all ask again and again until the time is over, and compare what they get with what they must get.
They speak HTTP/1.0 over bare sockets: what is measured should not be a client library.
"""

import asyncio
import json
import random
import socket
import sys
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

PATIENCE_S = 300.0  # for one answer, with all others before it in the queue
RECEIVE_BYTES = 4096  # of the kernel, for a slow reader
READ_BYTES, PAUSE_S = 4096, 0.3
EVERY = 10
MAX_COMPLAINTS = 5
SHARED = "the quick brown fox jumps over the lazy dog " * 2  # more than a page of the cache


@dataclass(frozen=True)
class Load:
    """`answers`: the text of each question's answer, by the question's number."""

    url: str
    seconds: float
    num_clients: int
    max_tokens: int
    answers: list[str]


@dataclass
class CrowdReport:
    """`most_open`: requests open at the same time. `complaints`: the first of what was not right."""

    whole: int = 0
    slow: int = 0
    left: int = 0
    wrong: int = 0
    most_open: int = 0
    complaints: list[str] = field(default_factory=list)


def body_of(question: int, max_tokens: int, *, verbose: bool = False) -> dict[str, object]:
    """A request whose answer is always the same. `verbose`: in so many bytes that a slow reader holds them up."""
    return {
        "prompt": f"{SHARED}question {question}: ",
        "seed": question,
        "temperature": 0.8,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | ({"logprobs": 20} if verbose else {})


class Crowd:
    def __init__(self, load: Load):
        self.load, self.reported, self.num_open = load, CrowdReport(), 0
        address = urlsplit(load.url)
        self.host, self.port = address.hostname or "", address.port or 80
        self.deadline = 0.0

    async def run(self) -> CrowdReport:
        self.deadline = asyncio.get_running_loop().time() + self.load.seconds
        await asyncio.gather(*(self._client(number) for number in range(self.load.num_clients)))
        return self.reported

    async def _client(self, number: int) -> None:
        rng, loop = random.Random(number), asyncio.get_running_loop()
        ask = {0: self._leaves, 1: self._reads_slowly}.get(number % EVERY, self._reads)
        while loop.time() < self.deadline:
            question = rng.randrange(len(self.load.answers))
            self.num_open += 1
            self.reported.most_open = max(self.reported.most_open, self.num_open)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await ask(question, rng)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is told
                self._complain(f"client {number}, question {question}: {type(error).__name__}: {error}")
            finally:
                self.num_open -= 1

    async def _reads(self, question: int, rng: random.Random) -> None:
        reader, writer = await self._ask(question)
        received = await reader.read(-1)
        writer.close()
        self.reported.whole += 1
        self._check(received, question)

    async def _reads_slowly(self, question: int, rng: random.Random) -> None:
        reader, writer = await self._ask(question, is_slow=True)
        received = bytearray()
        while piece := await reader.read(READ_BYTES):
            received += piece
            await asyncio.sleep(PAUSE_S)
        writer.close()
        self.reported.slow += 1
        self._check(bytes(received), question)

    async def _leaves(self, question: int, rng: random.Random) -> None:
        reader, writer = await self._ask(question)
        received, num_events = b"", rng.randrange(self.load.max_tokens)
        while received.count(b"data: ") < num_events and (piece := await reader.read(READ_BYTES)):
            received += piece
        if rng.random() < 0.5:
            writer.transport.abort()
        else:
            writer.close()
        self.reported.left += 1

    async def _ask(self, question: int, *, is_slow: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        sock = socket.socket()
        if is_slow:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (self.host, self.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=READ_BYTES if is_slow else 1 << 16)
        body = json.dumps(body_of(question, self.load.max_tokens, verbose=is_slow)).encode()
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return reader, writer

    def _check(self, received: bytes, question: int) -> None:
        status, events = events_of(received)
        if status != 200 or not events or events[-1] != "[DONE]":
            self._complain(f"question {question}: {status}, ends with {received[-200:]!r}")
            return
        chunks = [json.loads(event) for event in events[:-1]]
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        tokens = chunks[-1]["usage"]["completion_tokens"]
        if (text, tokens) != (self.load.answers[question], self.load.max_tokens):
            self._complain(f"question {question}: {tokens} tokens, {text!r} for {self.load.answers[question]!r}")

    def _complain(self, what: str) -> None:
        self.reported.wrong += 1
        if len(self.reported.complaints) < MAX_COMPLAINTS:
            self.reported.complaints.append(what)


def events_of(received: bytes) -> tuple[int, list[str]]:
    """Status, and the data of the events, of a whole response."""
    head, _, body = received.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1]) if head else 0
    return status, [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]


if __name__ == "__main__":
    json.dump(asdict(asyncio.run(Crowd(Load(**json.load(sys.stdin))).run())), sys.stdout)
