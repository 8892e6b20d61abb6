"""What becomes of a configuration file that changes while the daemon runs."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from watchdog.events import FileModifiedEvent, FileMovedEvent, FileOpenedEvent

from kvd.config import ConfigError, Settings
from kvd.errors import InvalidParams
from kvd.ops import file_watch
from kvd.ops.file_watch import FileWatch
from kvd.reloading import LIVE, Reloader, SettingsFile
from kvd.scheduler.limits import LimitChange
from kvd_client.config_file import default_config_file
from tests.support.daemon import Daemon, daemon_environment, eventually
from tests.support.zygote import Zygote

START = Settings(
    Path("/d"), Path("/d/s"), "m", Path("/m"), budget_bytes=8_000_000, namespace_quotas=(("a", 2_000_000),)
)


class World:
    """A file, hands that note what they are told, and a log."""

    def __init__(self) -> None:
        self.settings: Settings | Exception = START
        self.done: list[object] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.refuses = False
        self.reloader = Reloader(SettingsFile(Path("/c.toml"), START, self._read), self, self._log)

    def _read(self) -> Settings:
        if isinstance(self.settings, Exception):
            raise self.settings
        return self.settings

    def _log(self, event: str, **facts: Any) -> None:
        self.events.append((event, facts))

    async def change_limits(self, change: LimitChange) -> None:
        """See `Hands`."""
        if self.refuses:
            raise InvalidParams("more than the machine has")
        self.done.append(change)

    def set_log_level(self, level: str) -> None:
        """See `Hands`."""
        self.done.append(level)

    def set_drain_grace(self, seconds: float) -> None:
        """See `Hands`."""
        self.done.append(seconds)

    def change(self, **settings: Any) -> None:
        """Write the file and have it read."""
        from dataclasses import replace

        self.settings = replace(START, **settings)
        asyncio.run(self.reloader.reload())


def test_what_can_change_is_put_in_force_once() -> None:
    """Budget, quotas (new, other, gone), log level and grace; what is as it was is left alone."""
    world = World()
    world.change(budget_bytes=6_000_000, namespace_quotas=(("b", 3_000_000),), log_level="debug", drain_grace_s=5.0)
    change = LimitChange(6_000_000, {"a": None, "b": 3_000_000})  # type: ignore[dict-item]
    assert sorted(map(str, world.done)) == sorted(map(str, ["debug", 5.0, change]))
    assert [name for name, _ in world.events] == ["config_reloaded"]
    assert world.events[0][1]["budget_bytes"] == 6_000_000
    world.done.clear()
    world.change(budget_bytes=6_000_000, namespace_quotas=(("b", 3_000_000),), log_level="debug", drain_grace_s=5.0)
    assert (world.done, len(world.events)) == ([], 1)
    world.change(budget_bytes=7_000_000, namespace_quotas=(("b", 3_000_000),), log_level="debug", drain_grace_s=5.0)
    assert world.done == [LimitChange(7_000_000, {})]


def test_disk_quotas_of_namespaces_follow_the_file() -> None:
    """A new one, another one, and one that is gone; quotas of RAM are left alone."""
    world = World()
    quotas = {"namespace_quotas": START.namespace_quotas}
    world.change(namespace_disk_quotas=(("a", 2_000_000), ("b", 3_000_000)), **quotas)
    world.change(namespace_disk_quotas=(("b", 4_000_000),), **quotas)
    assert world.done == [
        LimitChange(None, {}, {"a": 2_000_000, "b": 3_000_000}),  # type: ignore[dict-item]
        LimitChange(None, {}, {"a": None, "b": 4_000_000}),  # type: ignore[dict-item]
    ]


def test_what_needs_a_restart_is_said_once() -> None:
    """With the names and what could change; said again when it becomes something else, not when it goes back."""
    world = World()
    world.change(quota_bytes=5_000_000, eviction="reuse")
    assert [(name, facts["settings"]) for name, facts in world.events] == [
        ("config_needs_restart", ["eviction", "quota_bytes"])
    ]
    assert "budget_bytes" in world.events[0][1]["reason"]
    world.change(quota_bytes=5_000_000, eviction="reuse")
    assert len(world.events) == 1
    world.change(quota_bytes=6_000_000)
    assert world.events[1][1]["settings"] == ["quota_bytes"]
    world.change()
    assert (len(world.events), world.done) == (2, [])
    assert set(LIVE) < set(Settings.__dataclass_fields__)


def test_a_wrong_file_changes_nothing() -> None:
    """The reason is told; so is a budget that the machine has not, and the rest of that file counts."""
    world = World()
    world.settings = ConfigError("/c.toml: [serve] budget: '8XB' is not a size", setting="budget")
    asyncio.run(world.reloader.reload())
    assert world.events == [("config_refused", {"file": "/c.toml", "reason": world.settings.message})]
    world.refuses = True
    world.change(budget_bytes=9_000_000, log_level="error")
    assert world.done == ["error"]
    assert world.events[1][1]["settings"] == ["budget_bytes"]
    world.refuses = False
    world.change(budget_bytes=9_000_000, log_level="error")
    assert world.done == ["error", LimitChange(9_000_000, {})]


class _Observer:
    """Never notifies by itself; may refuse to start."""

    def __init__(self, fault: OSError | None = None) -> None:
        self.fault = fault
        self.folder = ""
        self.is_running = False

    def schedule(self, handler: object, path: str, *, recursive: bool) -> None:
        """Note the folder."""
        assert not recursive
        self.folder = path

    def start(self) -> None:
        """As the system would."""
        if self.fault is not None:
            raise self.fault
        self.is_running = True

    def stop(self) -> None:
        """Likewise."""
        self.is_running = False

    def join(self) -> None:
        """Nothing runs."""


def _watch(path: Path, changed: Callable[[], None], log: Callable[..., None], observer: _Observer) -> FileWatch:
    return FileWatch(path, changed, log, make_observer=lambda: observer)  # type: ignore[arg-type,return-value]


def test_a_burst_is_one_look_and_others_files_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes, and a rename onto the name, as editors do; opening it, and other names, are nothing."""
    monkeypatch.setattr(file_watch, "SETTLE_S", 0.01)
    looks, observer = list[int](), _Observer()

    async def scenario() -> None:
        watch = _watch(Path("/c/kvd.toml"), lambda: looks.append(1), lambda *_, **__: None, observer)
        watch.start()
        assert (observer.folder, observer.is_running) == ("/c", True)
        for event in (FileOpenedEvent("/c/kvd.toml"), FileModifiedEvent("/c/other")):
            watch.on_any_event(event)
        await asyncio.sleep(0.05)
        assert looks == []
        watch.on_any_event(FileModifiedEvent("/c/kvd.toml"))
        watch.on_any_event(FileMovedEvent("/c/.kvd.toml.swp", "/c/kvd.toml"))
        for _ in range(500):
            if looks:
                break
            await asyncio.sleep(0.01)
        assert looks == [1]
        watch.on_any_event(FileModifiedEvent("/c/kvd.toml"))
        await asyncio.sleep(0)
        watch.stop()
        watch.on_any_event(FileModifiedEvent("/c/kvd.toml"))
        await asyncio.sleep(0.05)
        assert (looks, observer.is_running) == ([1], False)

    asyncio.run(scenario())


def test_a_system_that_cannot_watch_is_told() -> None:
    """The daemon goes on; the log says how to have the file read."""
    told: list[dict[str, Any]] = []

    async def scenario() -> None:
        watch = _watch(
            Path("/c/kvd.toml"), lambda: None, lambda _, **facts: told.append(facts), _Observer(OSError(28, "no space"))
        )
        watch.start()
        watch.stop()

    asyncio.run(scenario())
    assert "SIGHUP" in told[0]["reason"]


@pytest.mark.daemon
def test_a_file_made_after_the_start_is_followed(
    short_tmp: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, zygote: Zygote | None
) -> None:
    """At the default place, whose folder is not there yet: SIGHUP finds it; with nothing to read it says so."""
    file = default_config_file({"XDG_CONFIG_HOME": str(short_tmp / "x")}, platform="linux")

    def environment(**extra: str) -> dict[str, str]:
        kept = daemon_environment(HOME=str(short_tmp), XDG_CONFIG_HOME=str(short_tmp / "x"), **extra)
        return {name: value for name, value in kept.items() if name != "KVD_CONFIG"}

    monkeypatch.setattr("tests.support.daemon.daemon_environment", environment)
    if sys.platform == "darwin":
        file = short_tmp / "Library/Application Support/kvd" / file.name
    (short_tmp / "d").mkdir()
    with Daemon(short_tmp / "d", tiny_model_dir, zygote=zygote) as daemon:

        def told(event: str) -> list[dict[str, Any]]:
            return [each for each in daemon.log_lines() if each.get("event") == event]

        daemon.signal(signal.SIGHUP)
        eventually(lambda: told("config_absent"), "there is nothing to read")
        assert told("config_absent")[0]["file"] == str(file)
        file.parent.mkdir(parents=True)
        file.write_text("[serve]\nbudget = 0\n")
        daemon.signal(signal.SIGHUP)
        eventually(lambda: told("config_refused"), "what is wrong in it is told")
        assert f"{file}: [serve] budget: " in told("config_refused")[0]["reason"]
        other = file.with_name("new")
        other.write_text('[serve]\nbudget = "48MB"\n')
        other.replace(file)  # from now on without a signal
        eventually(lambda: daemon.client.statistics().budget_bytes == 48_000_000, "the file's budget is in force")
        assert daemon.terminate() == 0


@pytest.mark.daemon
def test_a_running_daemon_follows_its_file(
    short_tmp: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, zygote: Zygote | None
) -> None:
    """A smaller budget in the file is in force without a restart; a wrong file is told; SIGHUP reads it, too."""
    file = short_tmp / "kvd.toml"
    file.write_text('[serve]\nbudget = "64MB"\n')
    monkeypatch.setattr(
        "tests.support.daemon.daemon_environment", lambda **extra: daemon_environment(KVD_CONFIG=str(file), **extra)
    )
    (short_tmp / "d").mkdir()
    with Daemon(short_tmp / "d", tiny_model_dir, zygote=zygote) as daemon:
        assert daemon.client.statistics().budget_bytes == 64_000_000
        other = file.with_name("new")
        other.write_text('[serve]\nbudget = "32MB"\nquota = "1GB"\n')
        other.replace(file)
        eventually(lambda: daemon.client.statistics().budget_bytes == 32_000_000, "the smaller budget is in force")
        file.write_text('[serve]\nbudget = "much"\n')
        eventually(lambda: "config_refused" in daemon.log.read_text(), "the wrong file is told")
        assert daemon.client.statistics().budget_bytes == 32_000_000
        file.write_text('[serve]\nbudget = "48MB"\n')
        daemon.signal(signal.SIGHUP)
        eventually(lambda: daemon.client.statistics().budget_bytes == 48_000_000, "SIGHUP has it read")
        events = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
        restart = [each["settings"] for each in events if each["event"] == "config_needs_restart"]
        assert restart == [["quota_bytes"]]
        assert daemon.terminate() == 0
