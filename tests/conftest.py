"""What every test gets: the fast BLAS, leak checks, a network guard, short temporary folders, the tiny model.

The launcher runs first: whatever imports mlx later, in whichever order, finds the fast BLAS loaded.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvd import launcher

# one BLAS thread a worker: several wait for the cores of other workers, and wait by spinning
_stated = os.environ.get("KVD_THREADS")
os.environ["KVD_THREADS"] = _stated or "1"
launcher.prepare()
if not _stated:
    del os.environ["KVD_THREADS"]  # what is tested decides for itself

import platformdirs  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from tests.support import crashes  # noqa: E402
from tests.support.examples import PROFILE  # noqa: E402
from tests.support.folders import short_base, use_memory  # noqa: E402
from tests.support.leaks import Inventory  # noqa: E402
from tests.support.network import GUARDED_METHODS  # noqa: E402
from tests.support.zygote import Zygote, start_zygote  # noqa: E402

# The same examples each time, however slow the machine is; `make test-long` looks for new ones.
_slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **_slow)  # type: ignore[arg-type]
settings.register_profile("search", **_slow)  # type: ignore[arg-type]
settings.load_profile(PROFILE)

use_memory()
# what the user has configured is no business of the tests; empty: no file
os.environ["KVD_CONFIG"] = ""
# kernels are kept between runs, but not in the user's own folder
os.environ.setdefault("KVD_KERNEL_CACHE", str(platformdirs.user_cache_path("kvd-tests", appauthor=False) / "kernels"))


def pytest_report_header() -> list[str]:
    """Say which BLAS the figures of this run come from."""
    outcome = launcher.prepare()
    return [outcome.describe(), *([f"warning: {outcome.warning}"] if outcome.warning else [])]


def pytest_sessionstart(session: pytest.Session) -> None:
    """A process that ends by a signal leaves its stack."""
    crashes.begin(session.config)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the stacks of processes that ended so."""
    crashes.show(terminalreporter.config, terminalreporter)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Nothing stays behind."""
    crashes.end(config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with long tests first, else in their random order: what two workers share at the end is short tests."""
    weights: dict[Path, int] = {}
    for item in items:
        weight = 2 if item.get_closest_marker("real_model") else 1 if item.get_closest_marker("daemon") else 0
        weights[item.path] = max(weight, weights.get(item.path, 0))
    items.sort(key=lambda item: -weights[item.path])


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test leaves no thread, child process or open descriptor behind (the marker `leaks` says why one may)."""
    before = Inventory.take()
    yield
    if request.node.get_closest_marker("leaks") is None and (found := before.left_behind()):
        pytest.fail(f"the test left behind: {found}")


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """No test opens a connection to another machine; child processes are told to stay offline too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, guarded in GUARDED_METHODS.items():
            patch.setattr(socket.socket, name, guarded)
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.setenv(name, "1")
        yield


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A private folder whose path is short enough for Unix sockets (macOS allows 103 bytes, its default is longer)."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-", dir=short_base())).resolve()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def daemon_env(short_tmp: Path) -> dict[str, str]:
    """Environment for a daemon under test: one BLAS thread, folders of its own, no settings of the user's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
    folders = {"KVD_DATA_DIR": str(short_tmp / "data"), "KVD_SOCKET": str(short_tmp / "run" / "kvd.sock")}
    shared = {
        name: os.environ[name] for name in ("KVD_BLAS", "KVD_KERNEL_CACHE", "KVD_MODEL_DIR") if name in os.environ
    }
    return kept | shared | folders | {"KVD_CONFIG": "", "KVD_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote | None]:
    """What daemons are forked off; None where that cannot be done, and in modules whose subject is a start."""
    with start_zygote() as started:
        yield started


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny seeded model with a real tokenizer; tests must not write into it."""
    from tests.support.tiny_model import make_tiny_model

    maker: Callable[[Path], object] = make_tiny_model
    folder = tmp_path_factory.mktemp("tiny-model")
    maker(folder)
    return folder
