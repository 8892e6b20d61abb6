"""Which loop serves."""

from __future__ import annotations

import asyncio
import sys

import pytest

from kvd.ops.loops import new_loop

new_loop().close()  # the first uvloop of a process makes a pipe that stays: no test is blamed for it


async def _kind() -> str:
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


@pytest.mark.parametrize(("hidden", "kind"), [(False, "uvloop"), (True, "asyncio")])
def test_uvloop_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, *, hidden: bool, kind: str) -> None:
    """P40: a machine without it serves all the same."""
    if hidden:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    else:
        pytest.importorskip("uvloop")
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(_kind()) == kind
