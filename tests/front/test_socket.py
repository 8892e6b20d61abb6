"""The socket file, its folder, and who may come in."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
import sys
from pathlib import Path

import pytest

from kvd.errors import KvdError
from kvd.front import FrontLimits, PeerCredentials, PeerRefused, RpcServer, SocketInUse, SocketRefused, peer_credentials
from kvd.front.listen import listen
from kvd.front.peer import parse_xucred
from kvd_client.paths import socket_path_limit_bytes
from tests.front.peer_socket import RawPeer
from tests.front.service import FakeService, RecordingLog
from tests.front.test_server import on_loop, running, until


@pytest.fixture
def path(short_tmp: Path) -> Path:
    """A socket path in a folder that does not exist yet."""
    return short_tmp / "run" / "s"


@on_loop
async def test_the_socket_is_for_its_user_only(path: Path) -> None:
    """P37: the socket has mode 0600 in a folder of mode 0700, whatever the umask."""
    before = os.umask(0)
    try:
        async with running(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert stat.S_ISSOCK(path.stat().st_mode)
    finally:
        os.umask(before)
    assert not path.exists()


@on_loop
async def test_another_user_is_closed_before_a_byte_is_read(path: Path) -> None:
    """P37: a peer of another user id gets nothing, its request is never seen, and the log names it."""
    stranger = PeerCredentials(uid=os.getuid() + 1, pid=4242)
    async with running(path, credentials=lambda _: stranger) as (server, service, log), RawPeer(path) as peer:
        peer.send([0, 1, "test.echo", [{"value": 1}]])
        assert await peer.rest() == []
        await until(lambda: server.statistics().refused_peers == 1)
        assert service.calls == []
        assert log.named("peer_refused")[0]["uid"] == stranger.uid
        assert log.named("peer_refused")[0]["pid"] == 4242


@on_loop
async def test_a_peer_nobody_can_name_is_closed(path: Path) -> None:
    """Where the platform does not tell who connected, nobody is served."""

    def unknown(_connection: socket.socket) -> PeerCredentials:
        raise PeerRefused("no way to tell")

    async with running(path, credentials=unknown) as (server, _, _), RawPeer(path) as peer:
        assert await peer.rest() == []
        await until(lambda: server.statistics().refused_peers == 1)


@on_loop
async def test_the_service_learns_who_calls(path: Path) -> None:
    """The context names the peer's process, user and connection."""
    async with running(path) as (_, service, _), RawPeer(path) as peer:
        peer.send([0, 1, "health", []])
        await peer.response(1)
        info = service.contexts[0].peer
        assert info.uid == os.getuid()
        assert info.connection == 1
        if sys.platform in ("linux", "darwin"):
            assert info.pid == os.getpid()


def test_credentials_of_a_real_socket() -> None:
    """The kernel tells this process's own ids on both ends of a pair."""
    left, right = socket.socketpair(socket.AF_UNIX)
    with left, right:
        assert peer_credentials(left).uid == os.getuid()
    with pytest.raises(PeerRefused):
        peer_credentials(left)


def test_the_macos_structure_is_read_at_its_offsets() -> None:
    """`struct xucred` starts with its version and the user id."""
    raw = struct.pack("=IIh2x16I", 0, 501, 1, *range(16))
    assert len(raw) == 76
    assert parse_xucred(raw) == 501
    with pytest.raises(struct.error):
        parse_xucred(raw[:5])


@on_loop
async def test_a_stale_socket_is_replaced(path: Path) -> None:
    """A socket file whose daemon was killed is no obstacle."""
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()
    async with running(path), RawPeer(path) as peer:
        peer.send([0, 1, "test.echo", [{"value": 1}]])
        assert (await peer.response(1))[3] == 1


@on_loop
async def test_a_live_socket_is_refused_and_unharmed(path: Path) -> None:
    """A second daemon on the same path gets SocketInUse; the first goes on."""
    async with running(path), RawPeer(path) as peer:
        second = RpcServer(FakeService(), socket_path=path, logger=RecordingLog())
        with pytest.raises(SocketInUse, match="already"):
            await second.start()
        await second.close(0.0)
        peer.send([0, 1, "test.echo", [{"value": 1}]])
        assert (await peer.response(1))[3] == 1
        async with RawPeer(path):
            pass


@on_loop
async def test_only_the_own_file_is_unlinked(path: Path) -> None:
    """A file that has taken the path meanwhile is left alone."""
    async with running(path):
        path.unlink()
        path.write_text("somebody else's")
    assert path.read_text() == "somebody else's"
    with pytest.raises(SocketRefused, match="no socket"):
        listen(path, backlog_connections=1)


@on_loop
async def test_an_inherited_socket_is_served_and_kept(path: Path) -> None:
    """A socket made by launchd or systemd is served as it is; closing the server leaves its file."""
    path.parent.mkdir(mode=0o755)
    inherited = socket.socket(socket.AF_UNIX)
    inherited.bind(str(path))
    inherited.listen()
    server = RpcServer(FakeService(), socket_path=None, sock=inherited, logger=RecordingLog())
    await server.start()
    async with RawPeer(path) as peer:
        peer.send([0, 1, "test.echo", [{"value": 1}]])
        assert (await peer.response(1))[3] == 1
    await server.close(0.0)
    assert path.exists()


def test_a_path_over_the_platform_limit_is_refused_with_the_limit(tmp_path: Path) -> None:
    """The error names the path's length and the limit, and no folder was made."""
    limit = socket_path_limit_bytes()
    path = tmp_path / ("d" * limit) / "s"
    with pytest.raises(SocketRefused, match=str(limit)) as error:
        listen(path, backlog_connections=1)
    assert error.value.data["limit_bytes"] == limit
    assert not path.parent.exists()


def test_the_longest_path_works(short_tmp: Path) -> None:
    """A path of exactly the limit can be bound and connected to."""
    folder = Path(os.path.realpath(short_tmp))
    name = "s" * (socket_path_limit_bytes() - len(os.fsencode(folder)) - 1)
    listener = listen(folder / name, backlog_connections=1)
    with listener.socket, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(folder / name))
    listener.unlink()
    listener.unlink()
    assert not (folder / name).exists()


def test_an_open_folder_is_refused(tmp_path: Path) -> None:
    """P37: a folder that lets other users in is refused with the command that closes it, and not changed."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(SocketRefused, match="chmod 700"):
        listen(folder / "s", backlog_connections=1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert list(folder.iterdir()) == []


def test_somebody_elses_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of another user, as one could be planted under the temporary folder, is refused."""
    tmp_path.chmod(0o700)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(SocketRefused, match="belongs to user"):
        listen(tmp_path / "s", backlog_connections=1)


def test_socket_errors_are_typed() -> None:
    """What can go wrong at start is a KvdError the daemon can show; without any socket it is a mistake in the code."""
    assert issubclass(SocketRefused, KvdError)
    assert issubclass(SocketInUse, KvdError)
    with pytest.raises(ValueError, match="socket"):
        RpcServer(FakeService(), socket_path=None, limits=FrontLimits())


def test_two_starters_make_one_socket(short_tmp: Path) -> None:
    """Of two daemons that start at a time on a stale path one wins and the other is refused."""
    path = short_tmp / "run" / "s"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    async def start() -> list[object]:
        return await asyncio.gather(
            *(asyncio.to_thread(listen, path, backlog_connections=4) for _ in range(4)), return_exceptions=True
        )

    outcomes = asyncio.run(start())
    winners = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert len(winners) == 1
    assert sum(isinstance(outcome, SocketInUse) for outcome in outcomes) == 3
    winners[0].socket.close()  # type: ignore[attr-defined]
