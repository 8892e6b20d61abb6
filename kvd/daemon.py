"""The daemon: data folder, engine thread, RPC server, signals. With `kvd.assembly`, the composition root.

Order of a start: lock the data folder (a second daemon is refused with the pid of the first), listen, then load the
model on the engine thread; calls that need it wait. Order of a stop: no new requests, what runs finishes or is
cancelled after the grace (its KV is committed either way), the engine ends, the swap queue is flushed, the lock goes.
A `kill -9` skips all of it and loses nothing that was reported durable.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvd.assembly import Assembly
from kvd.config import Settings
from kvd.errors import KvdError
from kvd.front.server import RpcServer
from kvd.ops.children import KeptChild
from kvd.ops.file_watch import FileWatch
from kvd.ops.lifecycle import Notifier, StopAction, handle_stop_signals, inherited_sockets
from kvd.ops.logs import RequestLines, get_logger, hand_on_record, request_line, set_level, setup_logging
from kvd.ops.loops import new_loop
from kvd.ops.stall import StallWatch
from kvd.reloading import Reloader, SettingsFile
from kvd.scheduler.engine import Engine
from kvd.scheduler.limits import LimitChange
from kvd.scheduler.service import KvdService
from kvd.store.fs import RealFileSystem
from kvd.store.layout import DataFolder

FORCED_EXIT_CODE = 130
RELOADS = {"config_reloaded": "done", "config_needs_restart": "needs_restart", "config_refused": "refused"}
"""What the log says of the configuration file -> what its event says."""

CANCEL_GRACE_S = 30.0
"""How long cancelled requests may take to commit what they have: a prefill chunk on a slow machine, and its fsyncs."""


class Daemon:
    """One run of `kvd serve`. Owner: the main thread and its event loop.

    Args:
        settings: validated settings.
        file: where they came from, to follow what becomes of it.
    """

    def __init__(self, settings: Settings, file: SettingsFile | None = None) -> None:
        self._settings = settings
        self._file = file
        self._log = get_logger("kvd")
        self._lines = RequestLines(partial(request_line, self._log))
        self._facts: dict[str, object] = {}
        self._assembly = Assembly(settings, self._facts, self._log_event)
        self._engine = Engine(
            self._assembly.build,
            max_queued=settings.max_queued,
            max_batch=None if settings.max_batch == "auto" else settings.max_batch,
            decode_share=settings.decode_share,
            on_ready=self._on_engine_ready,
            on_request_done=self._lines.put,
            check=settings.check,
        )
        self._notifier = Notifier()
        self._stall_watch = StallWatch(self._engine_idle_s, self._notifier, self._log_event)
        self._failure: BaseException | None = None
        self._is_ready = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._service: KvdService | None = None
        self._started_s = time.monotonic()

    def run(self) -> None:
        """Serve until told to stop.

        Raises:
            KvdError: the data folder is in use, the model is missing, the socket cannot be made.
        """
        folder = DataFolder(self._settings.data_dir, RealFileSystem())
        folder.open()
        try:
            self._assembly.folder = folder
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(self._serve())
        finally:
            self._lines.close()
            folder.close()
        if self._failure is not None:
            raise self._failure

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        gateway = self._gateway()
        service = KvdService(
            self._engine,
            facts=self._facts,
            request_shutdown=self._stop.set,
            is_stalled=lambda: self._stall_watch.is_stalled,
            gateway_fault=lambda: None if gateway is None else gateway.fault,
        )
        self._service = service
        sockets = inherited_sockets()
        server = RpcServer(
            service,
            socket_path=Path(self._settings.socket),
            sock=sockets[0] if sockets else None,
            logger=get_logger("kvd.front"),
        )
        with handle_stop_signals(self._on_signal):
            await server.start()
            try:
                self._engine.start()
                watching = asyncio.create_task(self._stall_watch.run())
                follow = self._follow_file()
                if gateway is not None:
                    gateway.start()
                await self._stop.wait()
                watching.cancel()
                follow()
                service.set_draining()
                self._notifier.stopping("draining")
                ended = await self._drain()
            finally:
                if gateway is not None:
                    await gateway.close()
                service.end_subscriptions()
                await server.close(grace_s=2.0)
            self._lines.close()  # the last line of a log is not a request's
            self._log.info("stopped", clean=ended, uptime_s=round(time.monotonic() - self._started_s, 1))

    def _follow_file(self) -> Callable[[], None]:
        """Act on changes of the configuration file, noticed or told by SIGHUP; returns what ends that.

        A file that was not there at the start is followed from when it is, in a folder that is there, or from SIGHUP.
        """
        loop, file = asyncio.get_running_loop(), self._file
        reloader = None if file is None else Reloader(file, self, self._log_reload)
        running: set[asyncio.Task[None]] = set()

        def changed() -> None:
            task = loop.create_task(one_at_a_time())
            running.add(task)
            task.add_done_callback(running.discard)

        order = asyncio.Lock()

        async def one_at_a_time() -> None:
            async with order:
                assert reloader is not None
                await reloader.reload()

        watch = None if file is None else FileWatch(file.path, changed, self._log_event)
        is_watched = False

        def begin() -> None:
            nonlocal is_watched
            if watch is not None and file is not None and not is_watched and file.path.parent.is_dir():
                is_watched = True
                watch.start()

        def asked() -> None:
            begin()
            if file is None:
                self._log_event("config_absent", reason="SIGHUP, and no file to read: an empty name was given for it")
            elif not was_there and not file.path.exists():
                self._log_event("config_absent", file=str(file.path), reason="SIGHUP, and no such file to read")
            else:
                changed()

        was_there = file is not None and file.path.exists()
        begin()
        # a terminal that is closed sends the same signal, and means that its programs are to end
        listens = not sys.stdin.isatty()
        if listens:
            loop.add_signal_handler(signal.SIGHUP, asked)

        def end() -> None:
            if listens:
                loop.remove_signal_handler(signal.SIGHUP)
            if watch is not None:
                watch.stop()
            for task in running:
                task.cancel()

        return end

    async def change_limits(self, change: LimitChange) -> None:
        """See `kvd.reloading.Hands`."""
        facts = await asyncio.wrap_future(self._engine.configure(change))
        assert isinstance(facts, dict)
        self._facts["budget_bytes"] = facts["budget_bytes"]

    def set_log_level(self, level: str) -> None:
        """See `kvd.reloading.Hands`."""
        set_level(level)

    def set_drain_grace(self, seconds: float) -> None:
        """See `kvd.reloading.Hands`."""
        self._settings = replace(self._settings, drain_grace_s=seconds)

    def _gateway(self) -> KeptChild | None:
        """The process that serves HTTP, if one is wanted; its other settings come from the environment."""
        settings = self._settings
        if settings.http is None:
            return None
        command = [sys.executable, "-m", "kvd", "gateway", "--with-parent", "--listen", settings.http]
        command += ["--socket", str(settings.socket), "--log-level", settings.log_level]
        if settings.log_file is not None and "KVD_GATEWAY_LOG_FILE" not in os.environ:
            # two processes must not rotate one file
            own = settings.log_file.with_name(f"{settings.log_file.stem}.gateway{settings.log_file.suffix}")
            command += ["--log-file", str(own)]
        return KeptChild("gateway", command, get_logger("kvd"), hand_on=hand_on_record)

    async def _drain(self) -> bool:
        """Let requests end, and the engine; False if that did not."""
        assert self._loop is not None
        if self._failure is None:
            self._engine.drain()
            grace_s = self._settings.drain_grace_s
            if not await self._drained_within(grace_s):
                self._engine.cancel_all(f"the daemon is stopping and its grace of {grace_s:g} s is over")
                await self._drained_within(max(grace_s, CANCEL_GRACE_S))
        return await self._loop.run_in_executor(None, self._engine.stop, 60.0)

    async def _drained_within(self, seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        while not self._engine.drained.is_set():
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(0.02)
        return True

    def _engine_idle_s(self) -> float:
        """Seconds since the engine came round; a model that is still loading is no stall."""
        return time.monotonic() - self._engine.last_progress_s if self._is_ready else 0.0

    def _on_signal(self, action: StopAction) -> None:
        assert self._stop is not None
        if action is StopAction.FORCE:
            # what is durable is durable; nothing here is worth waiting for
            self._log.warning("forced_stop")
            self._lines.close(timeout_s=0.5)
            os._exit(FORCED_EXIT_CODE)
        self._log.info(
            "draining", text="running requests finish; a second signal stops at once", **self._engine.queue_facts
        )
        self._stop.set()

    def _on_engine_ready(self, error: BaseException | None) -> None:
        """On the engine thread: carry the news to the loop."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._engine_ready, error)

    def _engine_ready(self, error: BaseException | None) -> None:
        assert self._service is not None
        assert self._stop is not None
        if error is not None:
            self._failure = error
            self._stop.set()
            return
        loaded = self._assembly.loaded
        assert loaded is not None
        self._is_ready = True
        self._service.set_ready(loaded.codec, loaded.template, vocab_tokens=loaded.spec.vocab_tokens)
        self._notifier.ready(f"serving {loaded.spec.model_name}")
        shown = ("model", "kv_format", "attention", "threads", "budget_bytes", "max_batch")
        self._log.info(
            "ready",
            **{name: self._facts.get(name) for name in shown},
            socket=str(self._settings.socket),
            pid=os.getpid(),
            seconds=round(time.monotonic() - self._started_s, 2),
        )
        self._log.debug("facts", **{name: value for name, value in self._facts.items() if name != "notices"})
        notices = self._facts.get("notices")
        for notice in notices if isinstance(notices, list) else []:
            self._log.warning("notice", text=notice)

    def _log_reload(self, event: str, *, level: str = "warning", **facts: object) -> None:
        """What became of a change of the configuration file, for the log and for whoever subscribed."""
        self._log_event(event, level=level, **facts)
        settings, told = facts.get("settings"), [name for name in facts if name not in ("file", "reason")]
        self._engine.ring.publish(
            "reload",
            {
                "outcome": RELOADS[event],
                "settings": settings if isinstance(settings, list) else told,
                "reason": facts.get("reason"),
            },
        )

    def _log_event(self, event: str, *, level: str = "warning", **facts: object) -> None:
        """What an operator may want to know; unless it says otherwise, something is wrong."""
        (self._log.info if level == "info" else self._log.warning)(event, **facts)


def make_private_folders(folder: Path) -> None:
    """Make a folder and its missing parents, all 0700 (`mkdir(parents=True)` gives parents the default mode)."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def serve(settings: Settings, file: SettingsFile | None = None) -> None:
    """Run the daemon in the foreground until SIGTERM, SIGINT or `shutdown`.

    Args:
        settings: what it runs with.
        file: where they came from, if from a file: its changes are followed.

    Raises:
        KvdError: it could not start; the message says why and what to do.
        OSError: the log file or the data folder cannot be made.
    """
    if settings.log_file is not None:
        make_private_folders(settings.log_file.absolute().parent)
    with setup_logging(level=settings.log_level, file=settings.log_file):
        Daemon(settings, file).run()


__all__ = ["Daemon", "KvdError", "serve"]
