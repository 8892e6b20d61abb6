"""Checks of the socket: its path and folder, and the daemon that answers there. Import kvd_client and this package."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator

from kvd import __version__
from kvd.doctor.context import Context
from kvd.doctor.findings import Check, notice, ok, problem
from kvd.doctor.socket_state import socket_state
from kvd_client.paths import socket_path_limit_bytes, start_command


def check_socket(context: Context) -> Iterator[Check]:
    """The socket's path and folder, and who answers there."""
    path = context.options.socket
    facts: dict[str, object] = {"path": str(path)}
    limit_bytes = socket_path_limit_bytes()
    path_bytes = len(os.fsencode(path))
    if path_bytes > limit_bytes:
        yield problem(
            "socket", f"{path} has {path_bytes} bytes, this platform takes {limit_bytes}", "a shorter --socket", **facts
        )
        return
    try:
        folder = path.parent.stat()
    except OSError:
        folder = None
    if folder is not None and folder.st_uid != os.getuid():
        yield problem(
            "socket",
            f"{path.parent} belongs to user {folder.st_uid}",
            "choose a --socket in a folder of your own",
            **facts,
        )
        return
    mode = 0 if folder is None else stat.S_IMODE(folder.st_mode)
    repaired_as_data = path.parent == context.options.data_dir and context.state.state == "usable"
    if mode & 0o077 and not repaired_as_data:  # of the data folder itself the check of modes tells
        yield problem(
            "socket",
            f"{path.parent} lets other users in (mode {mode:04o}); kvd serve refuses it",
            f"chmod 700 {shlex.quote(str(path.parent))}, or another --socket",
            **facts,
        )
        return
    yield _who_answers(context, facts)


def _who_answers(context: Context, facts: dict[str, object]) -> Check:
    path = context.options.socket
    found = socket_state(path)
    facts["state"] = found
    held, pid = context.lock.held, context.lock.pid
    if found == "other":
        return problem("socket", f"{path} exists and is no socket", "move it away, or choose another --socket", **facts)
    if found == "stale":
        return notice(
            "socket",
            f"{path} is left over from a daemon that is gone",
            f"{context.options.repair()}; kvd serve does it too",
            **facts,
        )
    if found == "absent" and held:
        return problem(
            "socket",
            f"process {pid} holds the data folder, but nobody listens at {path}",
            "give the --socket that the daemon was started with, or stop the process",
            **facts,
        )
    if found == "absent":
        return ok("socket", f"no daemon runs; start one with: {start_command(path)}", **facts)
    return _ask_daemon(context, facts)


def _ask_daemon(context: Context, facts: dict[str, object]) -> Check:
    from kvd_client import Client, KvdClientError

    path = context.options.socket
    try:
        with Client(path, timeout_s=10.0) as client:
            hello, health = client.hello("kvd doctor"), client.health()
    except KvdClientError as error:
        return problem(
            "socket",
            f"a daemon listens at {path} but does not answer as one: {error.message}",
            "look into its log; stop it if it hangs",
            **facts,
        )
    facts |= {
        "version": hello.get("version"),
        "pid": hello.get("pid"),
        "ready": health.ready,
        "daemon_status": health.status,
        "data_dir": hello.get("data_dir"),
        "notices": list(hello.get("notices") or ()),
    }
    text = f"kvd {hello.get('version')}, process {hello.get('pid')}, {health.status}"
    if hello.get("version") != __version__:
        return notice("socket", f"{text}; this is kvd {__version__}", "restart the daemon", **facts)
    if hello.get("data_dir") not in (None, str(context.options.data_dir)):
        return notice(
            "socket", f"{text}, serves {hello['data_dir']}, not the folder examined", "give its --data-dir", **facts
        )
    return ok("socket", text, **facts)


__all__ = ["check_socket"]
