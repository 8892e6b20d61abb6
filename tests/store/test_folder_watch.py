"""Page files that somebody removes or changes: what the system tells is collected, let settle, and looked at once."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watchdog.events import DirDeletedEvent, FileDeletedEvent, FileModifiedEvent, FileMovedEvent, FileSystemEvent

from kvd.store.folder_watch import ROOT_EVERY_S, SETTLE_S, FolderWatch
from tests.support.store_data import hex_of, memory_folder


class FakeObserver:
    """An observer that notifies when a test says so."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error = error
        self.paths: list[str] = []
        self.stopped = False

    def schedule(self, handler: object, path: str, **options: Any) -> None:
        """Take a folder."""
        assert options["recursive"]
        if self.error is not None:
            raise self.error
        self.paths.append(path)

    def start(self) -> None:
        """Nothing runs."""

    def stop(self) -> None:
        """Note it."""
        self.stopped = True

    def join(self) -> None:
        """As a thread that never ran."""
        raise RuntimeError("cannot join thread before it is started")


class Desk:
    """A watch without threads, on a folder of its own."""

    def __init__(self, root: Path, error: OSError | None = None) -> None:
        self.folder = root / "swap"
        self.folder.mkdir()
        self.now_s = 100.0
        self.reports: list[tuple[set[str], set[str]]] = []
        self.logged: list[tuple[str, dict[str, object]]] = []
        self.observers: list[FakeObserver] = []
        self.error = error
        self.watch = FolderWatch(
            self.folder,
            lambda pages, folders: self.reports.append((set(pages), set(folders))),
            lambda event, **facts: self.logged.append((event, facts)),
            make_observer=self.observer,  # type: ignore[arg-type]
            clock=lambda: self.now_s,
        )
        self.watch._watch()

    def observer(self) -> FakeObserver:
        """The next one."""
        self.observers.append(FakeObserver(self.error))
        return self.observers[-1]

    def page(self, name: str) -> tuple[str, str]:
        """Id and path of a page."""
        page_id = hex_of(name)
        return page_id, str(self.folder / page_id[:2] / f"{page_id}.safetensors")

    def tell(self, *events: FileSystemEvent) -> None:
        """The system notifies."""
        for event in events:
            self.watch.on_any_event(event)

    def pass_time(self, seconds: float) -> None:
        """The watch's thread comes round."""
        self.now_s += seconds
        self.watch.hand_on()


@pytest.fixture
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """A desk; a parameter is what the system answers."""
    for root in memory_folder():
        yield Desk(root, getattr(request, "param", None))


def test_a_burst_becomes_one_look(desk: Desk) -> None:
    """A page is named once however often it was told, and only when nothing was heard of it for a while."""
    page_id, path = desk.page("a")
    for _ in range(5):
        desk.tell(FileModifiedEvent(path))
        desk.pass_time(SETTLE_S / 2)
    assert not desk.reports
    desk.pass_time(SETTLE_S)
    assert desk.reports == [({page_id}, set())]
    desk.pass_time(SETTLE_S)
    assert len(desk.reports) == 1


def test_both_ends_of_a_move_are_looked_at(desk: Desk) -> None:
    """A page that is moved away is missed under its name; one that is put there is looked at."""
    one, two = desk.page("a"), desk.page("b")
    desk.tell(FileMovedEvent(one[1], two[1]), FileDeletedEvent(desk.page("c")[1]))
    desk.pass_time(SETTLE_S)
    assert desk.reports == [({one[0], two[0], desk.page("c")[0]}, set())]


def test_a_folder_that_goes_means_all_its_pages(desk: Desk) -> None:
    """`rm -r` of one of the 256 folders."""
    desk.tell(DirDeletedEvent(str(desk.folder / "3f")))
    desk.pass_time(SETTLE_S)
    assert desk.reports == [(set(), {"3f"})]


def test_other_names_are_nobodys_business(desk: Desk) -> None:
    """Our unfinished files, foreign files, and pages in the wrong place."""
    page_id, path = desk.page("a")
    names = [f"{path}.tmp", str(desk.folder / "notes.txt"), str(desk.folder.parent / f"{page_id}.safetensors")]
    desk.tell(*(FileModifiedEvent(name) for name in names))
    desk.pass_time(SETTLE_S)
    assert not desk.reports


@pytest.mark.parametrize("comes_back", ["itself", "another"])
def test_a_folder_that_is_away_is_no_news_until_it_is_back(desk: Desk, comes_back: str) -> None:
    """P4: nothing is said of pages meanwhile, whatever was told of them; then it is watched, and all looked at."""
    assert len(desk.observers) == 1
    away = desk.folder.with_name("away")
    desk.folder.rename(away)
    desk.tell(FileDeletedEvent(desk.page("a")[1]), DirDeletedEvent(str(desk.folder / "3f")))
    for _ in range(3):
        desk.pass_time(ROOT_EVERY_S)
    assert not desk.reports
    if comes_back == "itself":
        away.rename(desk.folder)
    else:
        desk.folder.mkdir()
    desk.pass_time(ROOT_EVERY_S)
    ((pages, folders),) = desk.reports
    assert pages == {desk.page("a")[0]}
    assert len(folders) == 256
    assert desk.watch.is_watching
    assert desk.observers[0].stopped
    assert desk.observers[-1].paths == [str(desk.folder)]


@pytest.mark.parametrize(
    "desk", [OSError(errno.ENOSPC, "inotify watch limit reached"), OSError(errno.EMFILE, "")], indirect=True
)
def test_a_system_that_will_not_watch_is_told_and_costs_nothing(desk: Desk) -> None:
    """The limit of watches is used up: one line says so, and the daemon serves on."""
    assert not desk.watch.is_watching
    ((event, facts),) = desk.logged
    assert event == "swap_not_watched"
    assert "when they are read" in str(facts["reason"])
    desk.pass_time(ROOT_EVERY_S)
    assert len(desk.logged) == 1
    desk.watch.stop()


@pytest.fixture
def root() -> Iterator[Path]:
    """A real folder."""
    for folder in memory_folder():
        yield folder.resolve()


def test_the_system_itself_tells(root: Path) -> None:
    """With real notifications: a page that is removed, one that is changed, a whole folder."""
    folder, ids = root / "swap", [hex_of(number) for number in range(3)]
    paths = [folder / page_id[:2] / f"{page_id}.safetensors" for page_id in ids]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"page")
    seen: set[str] = set()
    news = threading.Condition()

    def report(pages: frozenset[str], folders: frozenset[str]) -> None:
        with news:
            seen.update(pages, (page_id for page_id in ids if page_id[:2] in folders))
            news.notify_all()

    watch = FolderWatch(folder, report, lambda *_, **__: None)
    watch.start()
    assert watch.is_watching
    try:
        paths[0].unlink()
        paths[1].write_bytes(b"other")
        shutil.rmtree(paths[2].parent)
        with news:
            assert news.wait_for(lambda: seen == set(ids), 30)
    finally:
        watch.stop()
    assert not watch.is_watching
