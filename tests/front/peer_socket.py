"""A client made of a plain socket and msgpack, as one would write it in another language."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgpack


class RawPeer:
    """Sends what it is told, correct or not, and reads messages one at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unpacker = msgpack.Unpacker(max_buffer_size=1 << 27)
        self.messages: list[list[Any]] = []

    async def __aenter__(self) -> Self:
        self.reader, self.writer = await asyncio.open_unix_connection(str(self._path), limit=1 << 16)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()

    def send(self, *messages: object) -> None:
        """Write messages without waiting."""
        self.writer.write(b"".join(msgpack.packb(message) for message in messages))

    def send_bytes(self, data: bytes) -> None:
        """Write bytes without waiting."""
        self.writer.write(data)

    async def next(self) -> list[Any] | None:
        """The next message; None at the end of the stream."""
        while True:
            for message in self._unpacker:
                self.messages.append(message)
                return message
            data = await asyncio.wait_for(self.reader.read(1 << 16), 20)
            if not data:
                return None
            self._unpacker.feed(data)

    async def rest(self) -> list[list[Any]]:
        """All messages up to the end of the stream."""
        rest = []
        try:
            while (message := await self.next()) is not None:
                rest.append(message)
        except (ConnectionResetError, BrokenPipeError):  # the loops tell it differently
            pass
        return rest

    async def response(self, request_id: int) -> list[Any]:
        """The next response to `request_id`; what comes before is in `messages`."""
        while (message := await self.next()) is not None:
            if message[0] == 1 and message[1] == request_id:
                return message
        raise AssertionError(f"the stream ended without a response to {request_id}")

    def events(self, request_id: int) -> list[dict[str, Any]]:
        """Stream events of a call read so far."""
        return [m[2][1] for m in self.messages if m[0] == 2 and m[1] == "stream" and m[2][0] == request_id]
