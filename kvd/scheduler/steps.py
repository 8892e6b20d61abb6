"""Steps of the model that running requests want, carried out for all of them at once.

A turn or job yields a `StepWanted` (`kvd.scheduler.waiting`) when the pages of its space are there; the engine gathers
the wants of an iteration and gives them to `run_steps`, which fills in what came of each. Decode steps run in one
forward pass. When that fails no row's tokens count, so each row is run again alone: the one whose fault it is fails,
the others get their logits. What breaks the books (`EngineBroken`) is raised.

Owner: the engine thread. May import kvd.model.batch_cache, kvd.quant.spec and siblings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvd.model.batch_cache import BatchCache
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.sampling import Logits
from kvd.scheduler.waiting import StepWanted

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore

MAX_BATCH_FAILURES = 3
"""So many batches in a row that fail although each row runs alone are the model's fault: no more are tried."""


def run_steps(core: EngineCore, wants: Sequence[StepWanted]) -> None:
    """Compute steps of different branches and fill in their results; each want is done afterwards.

    Raises:
        EngineBroken: books and memory do not agree any more.
    """
    core.memory.copy_late()  # steps write into open pages
    tried = len(wants) > 1 and all(want.is_decode for want in wants) and core.batch_failures < MAX_BATCH_FAILURES
    if tried and _run_together(core, wants):
        core.batch_failures = 0
        return
    for want in wants:
        _run_alone(core, want)
    if tried and all(want.error is None for want in wants):
        core.batch_failures += 1
        if core.batch_failures == MAX_BATCH_FAILURES:
            core.log("batches_given_up", failures=MAX_BATCH_FAILURES)


def _run_together(core: EngineCore, wants: Sequence[StepWanted]) -> bool:
    """One forward pass for decode steps; False when it failed: no want is done then, and each may be run alone."""
    try:
        batch = BatchCache.merge([core.sequence(want.branch) for want in wants])
        replays = {row for row, want in enumerate(wants) if want.replays}
        with _in_model(core):
            logits = core.forward.step_batch(batch, [want.ids for want in wants], replays=replays)
    except Exception as error:  # alone it shows whose fault it is
        core.log("batch_failed", rows=len(wants), error=f"{type(error).__name__}: {error}")
        return False
    for row, want in enumerate(wants):
        try:
            _count(core, want)
        except Exception as error:  # belongs to the request
            want.fail(error)
        else:
            want.succeed(logits[row])
    return True


def _run_alone(core: EngineCore, want: StepWanted) -> None:
    branch = want.branch
    try:
        sequence = core.sequence(branch)
        try:
            with _in_model(core):
                if want.replays:
                    logits: Logits | None = core.forward.replay(sequence, want.ids[-1])
                else:
                    logits = core.forward.step(sequence, want.ids, wants_logits=want.wants_logits)
        except BaseException:
            sequence.abort_step()
            raise
        _count(core, want)
    except Exception as error:  # belongs to the request
        want.fail(error)
    else:
        want.succeed(logits)


@contextmanager
def _in_model(core: EngineCore) -> Iterator[None]:
    """What is done inside is the model's work, not the engine's."""
    began_s = core.clock()
    try:
        yield
    finally:
        core.stats.forward_s += core.clock() - began_s


def _count(core: EngineCore, want: StepWanted) -> None:
    """The tokens of a step have KV from here on."""
    branch, tokens = want.branch, len(want.ids)
    if want.replays:
        core.stats.tokens_replayed += 1
        return
    core.memory.append(branch.space, tokens, core.page_keys(branch, tokens))
    before, branch.computed = branch.computed, branch.computed + tokens
    if branch.computed // PAGE_TOKENS > before // PAGE_TOKENS:
        core.sharing.note(branch)
    core.stats.tokens_computed += tokens
