"""Streams that go on behind a break: what the caller already has is said again, not sampled again.

Theory of operation. A turn is durable as a whole, at its end; a daemon that was killed knows nothing of a half one. But
whoever reads a stream that tells its tokens (`resumable`) has their ids, and sends them with the same call
(`Resume`). Such a turn goes the same way as it did at first: the same prompt, then the same tokens through the same
steps, but for these tokens nothing is sampled. So stop strings, masks, log-probabilities and the parts of an answer
come out as they did, and what follows has the same position, and with the same seed the same random number. All of it
is told again from the beginning: the caller skips as much as it has.

A turn that was cancelled (its connection broke, its daemon lives) left its tokens with their KV on a branch. Where that
is so, they are not computed again either; where log-probabilities or masks are wanted they are, since these come from
logits.

That the prompt is the same, token for token, is checked before anything changes: the first stream told a digest of it
(`prompt_key`), and another model, another template or an agent whose own text is another one now give another digest.

May import kvd.errors, kvd.vm.text and siblings.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvd.errors import InvalidParams
from kvd.scheduler.agents import Agent, Branch
from kvd.scheduler.errors import NotResumable
from kvd.scheduler.requests import Resume, TurnRequest

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore

KEY_BYTES = 16


def prompt_key(fingerprint: str, ids: Sequence[int]) -> str:
    """Digest of a prompt's ids with one model, in hexadecimal."""
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=KEY_BYTES)
    digest.update(array("q", ids).tobytes())
    return digest.hexdigest()


def refuse_other_prompt(core: EngineCore, resume: Resume, ids: Sequence[int]) -> None:
    """Compare the prompt of the stream that broke with the present one.

    Raises:
        NotResumable: they differ, so that what follows could not be what would have followed.
        InvalidParams: a token is none that can be part of a text.
    """
    if resume.key != prompt_key(core.spec.fingerprint, ids):
        raise NotResumable(
            f"the stream cannot go on after {len(resume.tokens)} tokens: its prompt, now {len(ids)} tokens, is not the "
            "one it began with (the agent, its earlier turns or the model have changed); call again without resume",
            prompt_tokens=len(ids),
            resumed_tokens=len(resume.tokens),
        )
    for token in resume.tokens:
        if token >= core.spec.vocab_tokens or token in core.codec.eos_ids:
            raise InvalidParams(f"resume.tokens has {token}, which no stream tells", parameter="resume")


def held_answer(agent: Agent, request: TurnRequest, ids: Sequence[int]) -> tuple[Branch, int] | None:
    """The branch that holds most of what is resumed, with its KV.

    Args:
        agent: whose turn it is.
        request: with `resume`.
        ids: of the prompt.

    Returns:
        The branch, and how many tokens behind the prompt are those of the stream; None where there are none, or they
        are wanted once more for their logits.
    """
    if request.resume is None or request.hooks or request.logprobs is not None:
        return None
    whole, best = [*ids, *request.resume.tokens], 0
    found: Branch | None = None
    for branch in agent.branches.values():
        if branch.behind or branch.tokens[: len(ids)] != whole[: len(ids)]:
            continue
        pairs = zip(branch.tokens[len(ids) :], request.resume.tokens, strict=False)
        common = next((n for n, (left, right) in enumerate(pairs) if left != right), None)
        if common is None:
            common = min(len(branch.tokens) - len(ids), len(request.resume.tokens))
        held = branch.border_at_most(len(ids) + common) - len(ids)
        if held > best:
            found, best = branch, held
    return None if found is None else (found, best)


def resume_facts(core: EngineCore, request: TurnRequest, ids: Sequence[int]) -> dict[str, object]:
    """What `matched` says besides, of a stream that may be resumed or is.

    Args:
        core: the engine's parts.
        request: the turn's.
        ids: of the prompt.
    """
    if not request.resumable:
        return {}
    return {"resume_key": prompt_key(core.spec.fingerprint, ids), "resumed_tokens": request.given_tokens}
