"""The suite's own guards work: a leak is named, and no connection leaves this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.leaks import Inventory


def test_a_clean_test_has_left_nothing() -> None:
    """What was opened and closed again is no leak."""
    before = Inventory.take()
    os.close(os.open(__file__, os.O_RDONLY))
    assert before.left_behind(drain_s=0) == ""


def test_an_open_descriptor_is_named() -> None:
    """The report says which file stayed open."""
    before = Inventory.take()
    fd = os.open(__file__, os.O_RDONLY)
    found = before.left_behind(drain_s=0)
    os.close(fd)
    assert "descriptors" in found
    assert str(fd) in found


def test_a_running_thread_is_named() -> None:
    """The report names the thread."""
    before, release = Inventory.take(), threading.Event()
    thread = threading.Thread(target=release.wait, name="left-over")
    thread.start()
    found = before.left_behind(drain_s=0)
    release.set()
    thread.join()
    assert "threads left-over" in found


def test_a_child_process_is_named() -> None:
    """The report has the process id, also of a zombie."""
    before = Inventory.take()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        found = before.left_behind(drain_s=0)
    assert f"child processes {child.pid}" in found


def test_connections_to_other_machines_are_refused() -> None:
    """TCP, UDP and asyncio alike; addresses of documentation networks, never reached."""

    async def through_asyncio() -> None:
        await asyncio.open_connection("192.0.2.1", 9)

    with socket.socket() as tcp, pytest.raises(PermissionError, match=r"192\.0\.2\.1"):
        tcp.connect(("192.0.2.1", 9))
    with socket.socket(type=socket.SOCK_DGRAM) as udp, pytest.raises(PermissionError, match=r"198\.51\.100\.1"):
        udp.sendto(b"x", ("198.51.100.1", 9))
    with pytest.raises(PermissionError):
        asyncio.run(through_asyncio())


def test_this_machine_can_be_reached(short_tmp: Path) -> None:
    """Loopback and Unix sockets are not in the guard's way; the short folder fits macOS's 103 bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass
    path = str(short_tmp / "run" / "kvd.sock")
    assert len(path) <= 103
    Path(path).parent.mkdir()
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()
        client.connect(path)


def test_the_end_of_a_crashed_worker_is_told(tmp_path: Path) -> None:
    """The suite's last lines say where it was; pytest-xdist alone says only that it crashed."""
    (tmp_path / "conftest.py").write_text(CRASHING_CONFTEST)
    (tmp_path / "test_it.py").write_text("import os\ndef test_ends(): os.abort()\ndef test_goes_on(): pass\n")
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", "-c", os.devnull, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert "1 failed, 1 passed" in ran.stdout
    told = ran.stdout.split("where gw0 ended")[-1]
    assert "Fatal Python error: Aborted" in told
    assert "test_ends" in told


CRASHING_CONFTEST = """
from tests.support import crashes
def pytest_sessionstart(session): crashes.begin(session.config)
def pytest_terminal_summary(terminalreporter): crashes.show(terminalreporter.config, terminalreporter)
def pytest_unconfigure(config): crashes.end(config)
"""
