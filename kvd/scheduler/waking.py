"""Waking agents that sleep since the start: their logs are read when somebody uses them.

A request wakes the agents it is about before anything else. What a log turns out to be is seen to when the answer
comes, whoever still waits for it: the agent is restored as at a start, or it is gone because nothing of its log was
good, or it goes on sleeping because the disk refused, and whoever asked is told so. A request that is cancelled or
timed out meanwhile ends at once; the reading goes on.

Equal beginnings can only be shared with agents that are awake, so those of a namespace in use are woken when nothing
else is to do (`kvd.scheduler.upkeep`).

Owner: the engine thread. May import kvd.errors, kvd.store and siblings.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvd.errors import AgentNotFound, KvdError
from kvd.scheduler.requests import AgentRef
from kvd.scheduler.restore import restore_agent
from kvd.scheduler.waiting import Stop, Wait, Waiting, raise_if_stopped
from kvd.store.errors import LogCorrupt
from kvd.store.page_file import PageHeader
from kvd.store.swap_ops import SwapResult

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore


def wake(core: EngineCore, refs: Sequence[AgentRef], stop: Stop) -> Waiting:
    """Wait until none of these agents sleeps.

    Raises:
        Cancelled: by `stop`; what was begun goes on.
        KvdError: the disk refused to read a log; its agent goes on sleeping.
    """
    for ref in refs:
        while ref in core.agents.asleep:
            failed: list[KvdError] = []
            if ref not in core.agents.waking:
                core.agents.waking.add(ref)
                core.store.wake_log(ref, partial(_woken, core, ref, failed.append))
            yield partial(_is_settled, core, ref, stop)
            raise_if_stopped(stop)
            if failed:
                raise failed[0]


def wake_first(
    core: EngineCore, refs: Sequence[AgentRef], stop: Stop, work: Generator[Wait, None, object]
) -> Generator[Wait, None, object]:
    """Do `work` once none of these agents sleeps; raises as `wake` and as `work`."""
    yield from wake(core, refs, stop)
    return (yield from work)


def _is_settled(core: EngineCore, ref: AgentRef, stop: Stop) -> bool:
    return ref not in core.agents.waking or stop() is not None


def _woken(core: EngineCore, ref: AgentRef, fail: Callable[[KvdError], None], result: SwapResult) -> None:
    core.agents.waking.discard(ref)
    # AgentNotFound: the data folder vanished meanwhile, and the store has forgotten whom that cost
    if result.error is not None and not isinstance(result.error, LogCorrupt | AgentNotFound):
        core.log("agent_not_read", agent=str(ref), reason=result.error.message)
        fail(result.error)
        return
    del core.agents.asleep[ref]
    if result.image is None:
        core.log("log_trouble", agent=str(ref), kind="corrupt", reason="nothing of its log is left or good")
        return
    headers = result.value if isinstance(result.value, tuple) else ()
    notices: list[str] = []
    restore_agent(core, ref, result.image, [each for each in headers if isinstance(each, PageHeader)], notices)
    for notice in notices:
        core.log("notice", text=notice)


__all__ = ["wake", "wake_first"]
