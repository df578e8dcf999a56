"""The server's end of a WebSocket (RFC 6455) over asyncio's streams: text messages of a bounded size, no extensions."""

import asyncio
import base64
import hashlib
from contextlib import suppress

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_MORE, _TEXT, _CLOSE, _PING, _PONG = 0, 1, 8, 9, 10
NORMAL, WRONG_FRAME, NO_TEXT, NOT_UTF8, TOO_LARGE = 1000, 1002, 1003, 1007, 1009
"""Codes of a close."""


class WebSocket:
    """A connection whose head has been read. A task reads on, so that pings are answered while a message is worked on.
    Call `close` at the end; the streams are the caller's. `key`: the client's Sec-WebSocket-Key. `max_size`: bytes of a
    message."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, max_size: int) -> None:
        self._reader, self._writer, self._max_size = reader, writer, max_size
        proof = base64.b64encode(hashlib.sha1(key.encode() + _GUID).digest()).decode()
        head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        self._writer.write(f"{head}Sec-WebSocket-Accept: {proof}\r\n\r\n".encode())
        self._messages: asyncio.Queue[str | None] = asyncio.Queue(1)
        self._code = NORMAL
        self._reading = asyncio.create_task(self._read())

    async def receive(self) -> str | None:
        """The next message; None once the client has gone or has sent what is none."""
        return await self._messages.get()

    async def send(self, text: str) -> None:
        """Raises OSError where the client has gone."""
        await self._send(_TEXT, text.encode())

    def close(self) -> None:
        self._reading.cancel()
        self._write(_CLOSE, self._code.to_bytes(2, "big"))

    async def _read(self) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            self._code = await self._read_all()
        await self._messages.put(None)

    async def _read_all(self) -> int:
        """Hand out messages; returns the code with which to close."""
        message = bytearray()
        while True:
            first, second = await self._reader.readexactly(2)
            kind, size = first & 15, second & 127
            if first & 0x70 or not second & 128 or (kind >= _CLOSE and (size > 125 or not first & 128)):
                return WRONG_FRAME
            if size > 125:
                size = int.from_bytes(await self._reader.readexactly(2 if size == 126 else 8), "big")
            if len(message) + size > self._max_size:
                return TOO_LARGE
            data = _masked(await self._reader.readexactly(4), await self._reader.readexactly(size))
            if kind == _CLOSE:
                return NORMAL
            if kind == _PING:
                await self._send(_PONG, data)
            elif kind in (_MORE, _TEXT):
                message += data
                if first & 128:
                    try:
                        await self._messages.put(message.decode())
                    except UnicodeDecodeError:
                        return NOT_UTF8
                    message.clear()
            elif kind != _PONG:
                return NO_TEXT

    async def _send(self, kind: int, data: bytes) -> None:
        self._write(kind, data)
        await self._writer.drain()

    def _write(self, kind: int, data: bytes) -> None:
        head, size = bytes([128 | kind]), len(data)
        if size < 126:
            head += bytes([size])
        else:
            head += b"\x7e" + size.to_bytes(2, "big") if size < 2**16 else b"\x7f" + size.to_bytes(8, "big")
        self._writer.write(head + data)


def _masked(mask: bytes, data: bytes) -> bytes:
    size = len(data)
    whole = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "big") ^ int.from_bytes(whole, "big")).to_bytes(size, "big")
