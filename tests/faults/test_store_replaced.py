"""P4 P8: page files, logs, catalog and VERSION cut, replaced, unreadable, gone, or no files at all any more.

Theory of operation. Two agents, `ada` and `bob`, are on a real disk. One path of `ada` is damaged, the store starts,
everything is read. What is served must be right; what is not is named in the report; `bob` loses nothing; `ada` can go
on.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvd.store.errors import DataFolderMalformed, DataFolderTooNew
from kvd.store.fs import RealFileSystem
from kvd.store.layout import DataFolder
from kvd.store.recovery_report import RecoveryReport
from kvd.store.swap_ops import AppendRecordOp, DeleteLogOp, FlushOp, ReadPageOp, ReadTailOp
from kvd.store.swap_store import SwapStore
from tests.support.store_data import FINGERPRINT, LAYOUTS, ModelAgent, header_of, open_store
from tests.support.store_turns import good, reads, turn

FOREIGN = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8


@dataclass
class Site:
    """A good folder to be copied and damaged.

    Attributes:
        root: the copy.
        states: of `ada`, by record number.
        bob: the other agent.
    """

    root: Path
    states: dict[int, ModelAgent]
    bob: ModelAgent

    @property
    def ada(self) -> ModelAgent:
        """The newest state."""
        return self.states[max(self.states)]

    def path(self, what: str, agent: str = "ada") -> Path:
        """A path of an agent, or of the folder."""
        folder = DataFolder(self.root, RealFileSystem())
        pages = self.ada.pages if agent == "ada" else self.bob.pages
        match what:
            case "page":
                return folder.page_path(FINGERPRINT, pages[0][0].page_id)
            case "log":
                return folder.log_path(FINGERPRINT, "default", agent)
            case "catalog":
                return folder.catalog_path(FINGERPRINT)
        return self.root / "VERSION"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """The good folder."""
    root = tmp_path_factory.mktemp("template") / "data"
    folder, _, store = open_store(RealFileSystem(), root)
    ada, states = ModelAgent("ada"), {}
    for tokens in (100, 200, 40):
        ada = good(store, ada, tokens)
        states[ada.seq] = ada
    bob = good(store, ModelAgent("bob"), 300)
    store.close()
    folder.close()
    return Site(root, states, bob)


@pytest.fixture
def copies(template: Site, fast_tmp: Path) -> Callable[[], Site]:
    """Makes fresh copies of the good folder."""
    count = 0

    def make() -> Site:
        nonlocal count
        count += 1
        root = fast_tmp / str(count)
        shutil.copytree(template.root, root)
        root.chmod(0o700)
        return Site(root, template.states, template.bob)

    return make


def outside(site: Site) -> Path:
    """A file of somebody else's, which no link may lead to."""
    path = site.root.parent / f"{site.root.name}.outside"
    path.write_bytes(FOREIGN)
    path.chmod(0o644)
    return path


def links_to(site: Site, path: Path) -> None:
    """Put a symbolic link there."""
    target = outside(site)
    path.unlink()
    path.symlink_to(target)


def becomes_folder(site: Site, path: Path) -> None:
    """Put a folder there, with a file in it."""
    path.unlink()
    path.mkdir(mode=0o700)
    (path / "inside").write_bytes(b"x")


def becomes_pipe(site: Site, path: Path) -> None:
    """Put a pipe there that nobody writes to."""
    path.unlink()
    os.mkfifo(path, 0o600)


def becomes_bobs(site: Site, path: Path) -> None:
    """Put the same file of the other agent there."""
    what = "page" if path.suffix == ".safetensors" else "log"
    shutil.copyfile(site.path(what, "bob"), path)


DAMAGE: dict[str, Callable[[Site, Path], object]] = {
    "foreign content": lambda site, path: path.write_bytes(FOREIGN),
    "empty": lambda site, path: path.write_bytes(b""),
    "zeros": lambda site, path: path.write_bytes(bytes(path.stat().st_size)),
    "longer": lambda site, path: path.write_bytes(path.read_bytes() + FOREIGN),
    "gone": lambda site, path: path.unlink(),
    "link": links_to,
    "folder": becomes_folder,
    "pipe": becomes_pipe,
    "another agent's": becomes_bobs,
}


def serve(site: Site) -> tuple[RecoveryReport, bool]:
    """Start, read everything, go on with both agents; whether all of `ada` was served."""
    folder, report, store = open_store(RealFileSystem(), site.root)
    try:
        reads(store, site.bob)
        image = report.agents.get(("default", "ada"))
        whole = image is not None and image.seq == site.ada.seq
        if image is not None:
            whole &= serve_ada(store, report, site.states[image.seq])
        good(store, site.bob, 3)
        if not whole:
            start_over(store, site)
    finally:
        store.close()
        folder.close()
    return report, whole


def serve_ada(store: SwapStore, report: RecoveryReport, ada: ModelAgent) -> bool:
    """Compare whatever is served with what it must be; whether it was all."""
    whole = True
    assert report.agents["default", "ada"].branch.tokens == ada.tokens
    for group, layout in enumerate(LAYOUTS):
        tail = store.perform(ReadTailOp("default", "ada", 0, group))
        assert tail.payload == ada.tail(group)
        for number, page in enumerate(ada.pages[group]):
            loaded = store.perform(ReadPageOp(header_of(page, group), layout))
            assert loaded.error is not None or loaded.payload == ada.page_bytes(group, number)
            whole &= loaded.error is None
    return whole


def start_over(store: SwapStore, site: Site) -> None:
    """What was damaged does not stand in the way of the agent's name for ever."""
    deleted = store.perform(DeleteLogOp("default", "ada"))
    if deleted.error is None:
        good(store, ModelAgent("ada", salt=1), 20)
    else:
        assert site.path("log").is_dir(), deleted.error  # somebody else's folder is not ours to remove
        refused = store.perform(AppendRecordOp(ModelAgent("ada", salt=1).turn(20)[1]))
        assert refused.error is not None


def is_named(report: RecoveryReport, site: Site, what: str) -> bool:
    """Whether the report says what is not as it was."""
    if what == "page":
        return site.path("page").stem in report.missing_pages
    if what == "log":
        logs = {trouble.log for trouble in report.log_troubles}
        return site.path("log").name in logs or any(site.path("log").name in name for name in report.foreign_files)
    return bool(report.facts)


@pytest.mark.parametrize(
    ("what", "how"),
    [
        (what, how)
        for how in DAMAGE
        for what in ("page", "log", "catalog")
        if (what, how) != ("catalog", "another agent's")  # there is one catalog
    ],
)
def test_what_is_not_the_file_is_not_served(
    copies: Callable[[], Site], tally: Counter[str], what: str, how: str
) -> None:
    """Right or absent, never wrong; named in the report; the other agent and other people's files are untouched."""
    site = copies()
    DAMAGE[how](site, site.path(what))
    report, whole = serve(site)
    assert whole == (what == "catalog" or (what, how) == ("log", "longer"))
    unlike_at_start = (what, how) not in (("page", "zeros"), ("page", "another agent's"), ("catalog", "longer"))
    assert is_named(report, site, what) == unlike_at_start, "contents of equal length are found out when they are read"
    if how == "link":
        theirs = outside_of(site)
        assert theirs.read_bytes() == FOREIGN
        assert theirs.stat().st_mode & 0o777 == 0o644
    tally["damaged files, tried"] += 1
    tally["damaged files, served wrong"] += 0


def outside_of(site: Site) -> Path:
    """Where `outside` put its file."""
    return site.root.parent / f"{site.root.name}.outside"


@pytest.mark.parametrize("what", ["page", "log", "catalog"])
def test_a_file_cut_anywhere_is_not_served(copies: Callable[[], Site], tally: Counter[str], what: str) -> None:
    """Lengths from nothing to all but the last byte: the turns before the cut resume, the rest is named."""
    site = copies()
    path = site.path(what)
    data = path.read_bytes()
    lengths = sorted({0, 1, 7, 8, 9, 100, len(data) - 1, *(len(data) * part // 9 for part in range(9))})
    lengths = [length for length in lengths if length < len(data)]
    states = set()
    for length in lengths:
        site = copies()
        site.path(what).write_bytes(data[:length])
        report, whole = serve(site)
        assert whole == (what == "catalog")
        if what != "catalog" or length:
            assert is_named(report, site, what), length
        image = report.agents.get(("default", "ada"))
        states.add(image.seq if image is not None else 0)
    assert states == ({0, 1, 2} if what == "log" else {3})
    tally["damaged files, tried"] += len(lengths)
    assert len(lengths) >= 12


@pytest.mark.parametrize("how", ["foreign content", "empty", "zeros", "link", "folder", "pipe"])
def test_a_folder_whose_version_is_none_is_refused_untouched(
    copies: Callable[[], Site], tally: Counter[str], how: str
) -> None:
    """No guess: the daemon says which file, and everything is as it was once the file is put back."""
    site = copies()
    right = site.path("VERSION").read_bytes()
    DAMAGE[how](site, site.path("VERSION"))
    with pytest.raises((DataFolderMalformed, DataFolderTooNew, OSError), match="VERSION"):
        DataFolder(site.root, RealFileSystem()).open()
    path = site.path("VERSION")
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.write_bytes(right)
    assert serve(site)[1]
    tally["damaged files, tried"] += 1


class Unreadable(RealFileSystem):
    """A real disk that refuses to read one path (root may read what has no permissions, so a mode is not enough)."""

    def __init__(self, path: Path, code: int) -> None:
        self._path = path
        self._code = code

    def read(self, path: Path, *, offset: int = 0, limit: int = -1, drop_cache: bool = False) -> bytes:
        """See `FileSystem.read`."""
        if path == self._path:
            raise OSError(self._code, os.strerror(self._code), str(path))
        return super().read(path, offset=offset, limit=limit, drop_cache=drop_cache)


@pytest.mark.parametrize("what", ["page", "log", "VERSION"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_file_that_may_not_be_read_is_kept(
    copies: Callable[[], Site], tally: Counter[str], what: str, code: int
) -> None:
    """EACCES and EIO are no reason to delete or replace: once it can be read again everything resumes."""
    site = copies()
    path = site.path(what)
    data = path.read_bytes()
    fs = Unreadable(path, code)
    if what == "VERSION":
        with pytest.raises(OSError, match="VERSION"):
            open_store(fs, site.root)
    else:
        site.path("catalog").unlink()  # so that the page's header is asked for
        folder, report, store = open_store(fs, site.root)
        reads(store, site.bob)
        store.close()
        folder.close()
        assert is_named(report, site, what)
    assert path.read_bytes() == data
    assert serve(site)[1]
    tally["damaged files, tried"] += 1


def test_a_catalog_that_cannot_be_is_told_once(copies: Callable[[], Site]) -> None:
    """P38: a folder in its place costs a slower start, not a line for each commit; turns are durable all the same."""
    site = copies()
    becomes_folder(site, site.path("catalog"))
    folder, report, store = open_store(RealFileSystem(), site.root)
    facts = list(report.facts)
    ada = site.ada
    for _ in range(3):
        ada, results = turn(store, ada, 3)
        store.idle()
        facts += [fact for result in results for fact in result.facts]
    facts += store.perform(FlushOp(threading.Event())).facts
    store.close()
    folder.close()
    assert len(facts) == 2
    assert all("no catalog" in fact for fact in facts), facts
    assert serve(Site(site.root, {**site.states, ada.seq: ada}, site.bob))[1]
