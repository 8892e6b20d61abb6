"""`kvd bench rpc`: what the protocol costs, against a bare msgpack echo over the same kind of socket, in one run.

Theory of operation. The protocol is asyncio and msgpack with checks: bounds, ids, one outbox a client, typed results.
Its floor is the same exchange with none of that: a server that decodes a message and answers, a client that encodes and
waits. So each figure is a ratio to a bare pair in the same run, in processes of their own like the real ones.

- *health*: round trips a second of one client against a real daemon, whose `health` answers from the event loop; the
  bare server echoes a message of the same length.
- *stream*: events a second of one call. A model would be what is measured, so the daemon's own server and sessions run
  with a service that emits as fast as it can; the bare server writes the same events.
- *gateway*: what an HTTP gateway in front of the daemon adds to the time to the first text (`kvd.bench.rpc_gateway`).
- *clients*: so many processes at once, each with a connection of its own and a turn of its own agent; all must be
  answered.

May import click, msgpack, kvd.bench, kvd.errors, kvd.model and kvd_client.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import msgpack

from kvd.bench.harness import DaemonProcess, scratch_folder
from kvd.bench.rpc_gateway import BAR_MS, GatewayTtft, gateway_ttft
from kvd.bench.rpc_peers import READ_BYTES
from kvd.cli_options import json_option, model_options
from kvd.errors import EnvironmentFault, KvdError
from kvd_client import AsyncClient
from kvd_client.stream import Text

BAR = 0.6
"""Least part of the bare exchange's rate."""

START_S = 30.0


@dataclass(frozen=True, slots=True)
class RpcReport:
    """All figures; rates are medians of `repeats` runs, kvd's and the bare one's in turn.

    Attributes:
        health_s, bare_s: round trips a second.
        health_ratio: of the two.
        stream_s, bare_stream_s: stream events a second.
        stream_ratio: of the two.
        gateway: times to the first text, direct and through a gateway.
        clients: processes at once.
        answered: of them, how many got their turn.
        errors: what the others got.
        clients_wall_s: from the first start to the last answer, start of the processes included.
    """

    model: str
    calls: int
    events: int
    repeats: int
    health_s: float
    bare_s: float
    health_ratio: float
    stream_s: float
    bare_stream_s: float
    stream_ratio: float
    gateway: GatewayTtft
    clients: int
    answered: int
    errors: tuple[str, ...]
    clients_wall_s: float

    def facts(self) -> dict[str, object]:
        """Plain data for `--json`, with what is met."""
        met = {
            "health": self.health_ratio >= BAR,
            "stream": self.stream_ratio >= BAR,
            "gateway": self.gateway.added_ms < BAR_MS,
            "clients": self.answered == self.clients,
        }
        return asdict(self) | {"bar": BAR, "gateway_bar_ms": BAR_MS, "met": met}


async def _bare_rates(path: str, calls: int, events: int, payload: Mapping[str, object]) -> tuple[float, float]:
    reader, writer = await asyncio.open_unix_connection(path)
    unpacker, packer = msgpack.Unpacker(), msgpack.Packer()

    async def exchange(number: int, params: Mapping[str, object]) -> int:
        writer.write(packer.pack([0, number, "echo", [params]]))
        heard = 0
        while True:
            unpacker.feed(await reader.read(READ_BYTES))
            for message in unpacker:
                if message[0] == 1:
                    return heard
                heard += 1

    rates = []
    began = time.perf_counter()
    for number in range(calls):
        await exchange(number, payload)
    rates.append(calls / (time.perf_counter() - began))
    began = time.perf_counter()
    heard = await exchange(calls, {"events": events})
    rates.append(heard / (time.perf_counter() - began))
    writer.close()
    await writer.wait_closed()
    if heard != events:
        raise EnvironmentFault(f"the bare pair lost {events - heard} of {events} events")
    return rates[0], rates[1]


async def _health_rate(socket: Path, calls: int) -> float:
    async with AsyncClient(socket) as client:
        await client.health()
        began = time.perf_counter()
        for _ in range(calls):
            await client.health()
        return calls / (time.perf_counter() - began)


async def _stream_rate(socket: Path, events: int) -> float:
    async with AsyncClient(socket) as client:
        await client.generate("warm", "", max_tokens=1)
        heard = 0
        began = time.perf_counter()
        async with client.generate_stream("rate", "", max_tokens=events) as stream:
            async for event in stream:
                # neighbouring texts are joined for a client that reads slowly: what counts is the words
                if isinstance(event, Text):
                    heard += event.text.count(" ")
        seconds = time.perf_counter() - began
    if heard != events:
        raise EnvironmentFault(f"the daemon's server lost {events - heard} of {events} events")
    return heard / seconds


def run_clients(socket: Path, clients: int) -> tuple[int, tuple[str, ...], float]:
    """So many client processes at once.

    Returns:
        How many were answered, what went wrong with the others, and the seconds it took.
    """
    began = time.monotonic()
    processes = [_peer("client", socket, str(number), reads=True) for number in range(clients)]
    answers = [process.communicate()[0].strip() for process in processes]
    codes = [process.returncode for process in processes]
    words = [answer or (f"exit code {code}" if code else "") for answer, code in zip(answers, codes, strict=True)]
    errors = tuple(word for word in words if word)
    return clients - len(errors), errors, time.monotonic() - began


# ---- the run --------------------------------------------------------------------------------------------------------


def _peer(kind: str, socket: Path, *more: str, reads: bool = False) -> subprocess.Popen[str]:
    """Start a process of `kvd.bench.rpc_peers`."""
    command = [sys.executable, "-m", "kvd.bench.rpc_peers", kind, os.fspath(socket), *more]
    out = subprocess.PIPE if reads else subprocess.DEVNULL
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, text=True)


@contextmanager
def _serving(kind: str, path: Path) -> Iterator[None]:
    """A server in a process of its own, listening."""
    process = _peer(kind, path)
    deadline = time.monotonic() + START_S
    try:
        while not path.exists():
            if time.monotonic() > deadline or process.poll() is not None:
                raise EnvironmentFault(f"the server at {path} did not start")
            time.sleep(0.01)
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def private_folder(path: Path) -> Iterator[Path]:
    """A new folder for a socket."""
    path.mkdir(mode=0o700)
    yield path


def run_rpc(
    *, model: str, calls: int, events: int, pairs: int, clients: int, repeats: int, tell: Callable[[str], None]
) -> RpcReport:
    """Measure everything.

    Args:
        model: what `kvd serve --model` gets.
        calls: round trips a run.
        events: stream events a run.
        pairs: calls through the gateway, and as many without it.
        clients: processes at once.
        repeats: runs; medians count.
        tell: progress, one line each.

    Raises:
        EnvironmentFault: a server did not start or lost something.
    """
    health, stream, bare, bare_stream = list[float](), list[float](), list[float](), list[float]()
    with (
        scratch_folder() as folder,
        _serving("bare", folder / "bare.sock"),
        private_folder(folder / "emit") as emit,
        _serving("emitter", emit / "kvd.sock"),
        DaemonProcess(folder / "data", model=model, options=("--max-queued", str(max(256, 2 * clients)))) as daemon,
    ):
        with daemon.client() as client:
            payload = dict(client.call("health"))
        for repeat in range(repeats):
            tell(f"run {repeat + 1} of {repeats}: {calls} round trips, {events} events")
            rates = asyncio.run(_bare_rates(os.fspath(folder / "bare.sock"), calls, events, payload))
            bare.append(rates[0])
            bare_stream.append(rates[1])
            health.append(asyncio.run(_health_rate(daemon.socket, calls)))
            stream.append(asyncio.run(_stream_rate(emit / "kvd.sock", events)))
        tell(f"{pairs} pairs of chats, direct and through a gateway")
        gateway = gateway_ttft(daemon.socket, pairs)
        tell(f"{clients} client processes at once")
        answered, errors, wall_s = run_clients(daemon.socket, clients)
    ratios = [
        statistics.median(ours / theirs for ours, theirs in zip(mine, bares, strict=True))
        for mine, bares in ((health, bare), (stream, bare_stream))
    ]
    return RpcReport(
        model=model,
        calls=calls,
        events=events,
        repeats=repeats,
        health_s=round(statistics.median(health)),
        bare_s=round(statistics.median(bare)),
        health_ratio=round(ratios[0], 3),
        stream_s=round(statistics.median(stream)),
        bare_stream_s=round(statistics.median(bare_stream)),
        stream_ratio=round(ratios[1], 3),
        gateway=gateway,
        clients=clients,
        answered=answered,
        errors=tuple(sorted(set(errors))),
        clients_wall_s=round(wall_s, 2),
    )


def table_lines(report: RpcReport) -> list[str]:
    """The report as people read it."""
    return [
        f"medians of {report.repeats}: {report.calls} round trips, {report.events} stream events",
        f"{'':22} {'kvd':>10} {'bare':>10}  ratio (bar {BAR:g})",
        f"{'health, round trips/s':22} {report.health_s:10.0f} {report.bare_s:10.0f}  {report.health_ratio:.2f}",
        f"{'stream, events/s':22} {report.stream_s:10.0f} {report.bare_stream_s:10.0f}  {report.stream_ratio:.2f}",
        f"first text: direct {report.gateway.direct_ms:.2f} ms, through a gateway {report.gateway.gateway_ms:.2f} ms; "
        f"it adds {report.gateway.added_ms:.2f} ms (bar {BAR_MS:g})",
        f"{report.clients} client processes at once: {report.answered} answered in {report.clients_wall_s:g} s",
        *(f"  {error}" for error in report.errors),
    ]


@click.command("rpc")
@click.option("--calls", type=click.IntRange(1), default=2000, show_default=True, help="Round trips a run.")
@click.option("--events", type=click.IntRange(1), default=20_000, show_default=True, help="Stream events a run.")
@click.option(
    "--pairs", type=click.IntRange(1), default=300, show_default=True, help="Chats with and without a gateway."
)
@click.option("--clients", type=click.IntRange(1, 256), default=64, show_default=True, help="Client processes at once.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Runs; medians count.")
@model_options
@json_option
def rpc(
    calls: int,
    events: int,
    pairs: int,
    clients: int,
    repeats: int,
    model_name: str,
    model_dir: Path | None,
    as_json: bool,
) -> None:
    """What the protocol costs: round trips and events against a bare echo, a gateway's part, many clients at once.

    Example: kvd bench rpc --json
    """
    from kvd.cli_common import fail
    from kvd.model.paths import model_dir as models
    from kvd.model.registry import resolve

    try:
        folder = resolve(model_name, models(model_dir)).path
        report = run_rpc(
            model=str(folder),
            calls=calls,
            events=events,
            pairs=pairs,
            clients=clients,
            repeats=repeats,
            tell=lambda line: click.echo(line, err=True),
        )
    except KvdError as error:
        fail(error)
    click.echo(json.dumps(report.facts()) if as_json else "\n".join(table_lines(report)))
    sys.exit(0 if report.answered == report.clients else 1)


__all__ = ["RpcReport", "rpc", "run_clients", "run_rpc", "table_lines"]
