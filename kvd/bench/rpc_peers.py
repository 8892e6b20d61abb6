"""The other ends of `kvd bench rpc`, each a process of its own: `python -m kvd.bench.rpc_peers KIND SOCKET [NUMBER]`.

`bare`: asyncio and msgpack and nothing else. `emitter`: the daemon's own server and sessions over a service that emits
as fast as it can. `client`: one turn of one agent; prints what went wrong, or nothing.

May import msgpack, kvd.front, kvd.ops and kvd_client.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from kvd.front.server import RpcServer
from kvd.ops.logs import setup_logging
from kvd_client import Client, KvdClientError

READ_BYTES = 1 << 16
CALL_S = 300.0


async def _bare_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Echo a message, or send as many events as it asks for and then answer."""
    unpacker, packer = msgpack.Unpacker(), msgpack.Packer()
    while data := await reader.read(READ_BYTES):
        unpacker.feed(data)
        for message in unpacker:
            events = message[3][0].get("events", 0)
            for number in range(events):
                event = {"type": "text", "text": f" word{number}"}
                writer.write(packer.pack([2, "stream", [message[1], event]]))
                if number % 64 == 63:
                    await writer.drain()
            writer.write(packer.pack([1, message[1], None, message[3][0]]))
            await writer.drain()
    writer.close()


async def _serve_bare(path: str) -> None:
    server = await asyncio.start_unix_server(_bare_connection, path)
    async with server:
        await server.serve_forever()


class EmitsEvents:
    """A `kvd.front.api.Service` whose `generate` streams `max_tokens` events at once."""

    def at_once(self, method: str) -> None:
        """See `Service.at_once`: nothing is."""

    async def call(self, method: str, params: Mapping[str, object], context: Any) -> object:  # noqa: ANN401
        """See `Service.call`."""
        events = params.get("max_tokens", 0)
        assert isinstance(events, int)
        for number in range(events):
            context.emit({"type": "text", "text": f" word{number}"})
            if number % 64 == 63:
                await asyncio.sleep(0)  # as the engine's steps reach the loop: in batches
        return {"text": "", "completion_tokens": events}


async def _serve_emitter(path: str) -> None:
    server = RpcServer(EmitsEvents(), socket_path=Path(path))
    await server.start()
    await asyncio.Event().wait()


def _one_client(socket: str, number: int) -> str:
    """One turn; returns what went wrong, or nothing."""
    try:
        with Client(socket, timeout_s=CALL_S) as client:
            client.health()
            result = client.generate(f"client-{number}", f"Client {number} says", max_tokens=2)
            return "" if result.agent == f"client-{number}" else f"an answer for {result.agent}"
    except KvdClientError as error:
        return f"{type(error).__name__}: {error.message}"


def main(kind: str, socket: str, number: str = "0") -> None:
    """Be one of them, until killed or done."""
    match kind:
        case "bare":
            asyncio.run(_serve_bare(socket))
        case "emitter":
            with setup_logging(level="error"):
                asyncio.run(_serve_emitter(socket))
        case "client":
            print(_one_client(socket, int(number)))
        case _:
            sys.exit(f"no such peer: {kind}; there are bare, emitter and client")


if __name__ == "__main__":
    main(*sys.argv[1:])
