"""A gateway in front of a scripted daemon, one of each a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.front.service import serving
from tests.gateway.daemons import ScriptedDaemon
from tests.gateway.serving import Served, gateway
from tests.support.daemon import short_folder


@pytest.fixture(scope="module")
def scripted() -> Iterator[ScriptedDaemon]:
    """The daemon; `served` is in front of it."""
    with short_folder() as folder, serving(folder / "kvd.sock", ScriptedDaemon()) as service:
        assert isinstance(service, ScriptedDaemon)
        service.path = folder / "kvd.sock"  # type: ignore[attr-defined]
        yield service


@pytest.fixture(scope="module")
def served(scripted: ScriptedDaemon) -> Iterator[Served]:
    """A gateway without keys; `claude-*` means its model, too."""
    with gateway(scripted.path, aliases=("claude-*",), ping_s=0.05) as running:  # type: ignore[attr-defined]
        running.ask("GET", "/health")  # connects now, so that no test is blamed for the open connection
        yield running


@pytest.fixture(autouse=True)
def _fresh_script(request: pytest.FixtureRequest) -> None:
    """Each test writes its own script; calls of earlier ones are forgotten."""
    if "scripted" in request.fixturenames:
        daemon = request.getfixturevalue("scripted")
        daemon.script({"type": "text", "text": "Hello"})
        daemon.calls.clear()
        daemon.was_cancelled.clear()
        daemon.has_begun.clear()
