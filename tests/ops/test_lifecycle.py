"""Life under a service manager, with real sockets, descriptors and signals."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.ops import InheritedSocketUnusable, Notifier, StopAction, StopPlan, handle_stop_signals, inherited_sockets


@pytest.fixture
def manager(short_tmp: Path) -> Iterator[socket.socket]:
    """The end of NOTIFY_SOCKET that systemd holds."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(short_tmp / "notify"))
        listener.settimeout(5)
        yield listener


def test_states_arrive_as_datagrams(manager: socket.socket) -> None:
    """READY, STATUS, WATCHDOG and STOPPING, one datagram each; a status never holds a second line."""
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()})
    assert notifier.ready("serving\non 1 socket")
    assert manager.recv(1000) == b"READY=1\nSTATUS=serving on 1 socket"
    assert notifier.watchdog()
    assert manager.recv(1000) == b"WATCHDOG=1"
    assert notifier.status("2 agents")
    assert manager.recv(1000) == b"STATUS=2 agents"
    assert notifier.stopping()
    assert manager.recv(1000) == b"STOPPING=1"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract addresses are Linux's")
def test_abstract_addresses() -> None:
    """`@name` is an address in the abstract namespace."""
    name = f"kvd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0{name}")
        listener.settimeout(5)
        assert Notifier({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert listener.recv(100) == b"READY=1"


def test_without_a_manager_nothing_happens(short_tmp: Path) -> None:
    """Started by hand, or with the manager gone: False, never an exception."""
    assert Notifier({}).ready() is False
    assert Notifier({"NOTIFY_SOCKET": str(short_tmp / "gone")}).watchdog() is False


def test_variables_do_not_reach_children(manager: socket.socket) -> None:
    """A child must not say READY in our name."""
    environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(environ)
    assert environ == {}
    assert notifier.watchdog_interval_s == 15.0


@pytest.mark.parametrize(
    "environ", [{}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "5", "WATCHDOG_PID": "1"}]
)
def test_no_watchdog(environ: dict[str, str]) -> None:
    """Unset, unreadable, off, or meant for another process."""
    assert Notifier(environ).watchdog_interval_s is None


CHILD = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
from kvd.ops import inherited_sockets
sockets = inherited_sockets("kvd")
print([(s.getsockname(), s.getblocking(), s.get_inheritable()) for s in sockets])
print(sorted(name for name in os.environ if name.startswith("LISTEN_")), flush=True)
for s in sockets:
    s.setblocking(True)
    peer, _ = s.accept()
    peer.sendall(peer.recv(100)[::-1])
    peer.close()
    s.close()
"""


def test_a_systemd_socket_is_served_and_never_unlinked(short_tmp: Path) -> None:
    """A process that gets descriptor 3 answers on it; the socket's path is still there when it is gone."""
    path = str(short_tmp / "kvd.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        script = f"import os\nos.dup2({listener.fileno()}, 3)\nos.set_inheritable(3, True)\n{CHILD}"
        with subprocess.Popen(
            [sys.executable, "-c", script],
            env=os.environ | {"LISTEN_FDS": "1", "LISTEN_FDNAMES": "kvd"},
            pass_fds=[listener.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        ) as child:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(20)
                client.connect(path)
                client.sendall(b"abc")
                assert client.recv(100) == b"cba"
            output = child.communicate(timeout=20)[0]
    assert output.splitlines() == [f"[({path!r}, False, False)]", "[]"]
    assert Path(path).exists()


@pytest.mark.parametrize(
    "environ",
    [{}, {"LISTEN_FDS": "1"}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}, {"LISTEN_FDS": "x", "LISTEN_PID": "me"}],
)
def test_descriptors_for_others_are_left_alone(environ: dict[str, str]) -> None:
    """Without our pid, or without a count, descriptor 3 is whatever it is."""
    environ = {name: str(os.getpid()) if value == "me" else value for name, value in environ.items()}
    assert inherited_sockets("kvd", environ, activate=lambda name: []) == []
    assert environ == {}


def test_launchd_hands_over_by_name(short_tmp: Path) -> None:
    """launchd is asked for the name of the job's socket."""
    asked = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_tmp / "s"))
        listener.listen()

        def activate(name: str) -> list[int]:
            asked.append(name)
            return [os.dup(listener.fileno())]

        (adopted,) = inherited_sockets("Listener", {}, activate=activate)
        with adopted:
            assert adopted.getsockname() == listener.getsockname()
    assert asked == ["Listener"]


def test_a_wrong_descriptor_is_refused_and_all_are_closed(short_tmp: Path) -> None:
    """A TCP socket, a socket that does not listen and a plain file are no Unix listener; nothing leaks."""
    with socket.socket(socket.AF_UNIX) as good, socket.create_server(("127.0.0.1", 0)) as tcp:
        good.bind(str(short_tmp / "s"))
        with pytest.raises(InheritedSocketUnusable, match="ListenStream"):
            inherited_sockets("kvd", {}, activate=lambda name: [os.dup(good.fileno())])
        good.listen()
        fds = [os.dup(good.fileno()), os.dup(tcp.fileno()), os.open(__file__, os.O_RDONLY)]
        with pytest.raises(InheritedSocketUnusable):
            inherited_sockets("kvd", {}, activate=lambda name: fds)
    for fd in fds:
        with pytest.raises(OSError, match="descriptor"):
            os.fstat(fd)
    fd = os.open(__file__, os.O_RDONLY)
    with pytest.raises(InheritedSocketUnusable, match="no socket"):
        inherited_sockets("kvd", {}, activate=lambda name: [fd])


def test_the_first_signal_drains_and_the_second_forces() -> None:
    """P2: SIGTERM lets running requests end, a second signal of either kind does not wait."""
    now_s = 100.0
    plan = StopPlan(lambda: now_s)
    assert not plan.stopping
    assert plan.on_signal(signal.SIGTERM) is StopAction.DRAIN
    assert plan.stopping
    now_s += 0.6
    assert plan.on_signal(signal.SIGINT) is StopAction.FORCE
    assert plan.on_signal(signal.SIGTERM) is StopAction.FORCE
    assert plan.describe() == "SIGTERM, SIGINT, SIGTERM"


def test_a_repeat_at_once_is_the_same_wish() -> None:
    """`timeout` signals the child, then its group: two SIGTERMs within milliseconds drain, they do not force."""
    now_s = 100.0
    plan = StopPlan(lambda: now_s)
    assert plan.on_signal(signal.SIGTERM) is StopAction.DRAIN
    now_s += 0.4
    assert plan.on_signal(signal.SIGTERM) is StopAction.IGNORE
    assert plan.on_signal(signal.SIGINT) is StopAction.IGNORE
    now_s += 0.2
    assert plan.on_signal(signal.SIGTERM) is StopAction.FORCE
    assert plan.describe() == "SIGTERM, SIGTERM"


def test_real_signals_reach_the_loop_and_handlers_come_back() -> None:
    """Two SIGTERMs to this process: drain, then force; afterwards Ctrl-C means what it did before."""
    former = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}

    async def scenario() -> list[StopAction]:
        actions: asyncio.Queue[StopAction] = asyncio.Queue()
        seconds = itertools.count()
        with handle_stop_signals(actions.put_nowait, lambda: float(next(seconds))) as plan:
            seen = []
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)
                seen.append(await asyncio.wait_for(actions.get(), 5))
            assert plan.describe() == "SIGTERM, SIGTERM"
        return seen

    assert asyncio.run(scenario()) == [StopAction.DRAIN, StopAction.FORCE]
    assert {signum: signal.getsignal(signum) for signum in former} == former
