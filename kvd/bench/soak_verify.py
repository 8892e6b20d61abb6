"""Hold a daemon to a transcript: what an agent has must be one of the things that its client was told.

The protocol does not give an agent's text back, and need not: a `generate` of the expected text with `max_tokens` 0
matches EXACT only if the stored bytes are the same, and then reuses every computed token (P1, P14, P33). An agent that
may hold text nobody was told of is cut back to what is known.

May import kvd_client and kvd.bench.soak_transcript only: clients verify, too.
"""

from __future__ import annotations

from kvd.bench.soak_transcript import Transcript
from kvd_client import AgentInfo, Client, GenerateResult
from kvd_client.errors import AgentNotFound

REENCODED_TOKENS = 48
"""A prompt that ends inside a stored token is encoded anew from that token's start on: at most so many tokens."""


class Violation(Exception):
    """The daemon did not keep a promise; the text says which."""


def verify_agent(client: Client, transcript: Transcript, *, daemon_pid: int) -> Transcript | None:
    """Find out what an agent holds and refuse what its transcript does not allow.

    Returns:
        The transcript with one possibility; None when the agent is gone, as it may be.

    Raises:
        Violation: the agent is gone, or holds something else, or a computed token was not reused.
        KvdClientError: the daemon went away or refused.
    """
    seen = transcript.as_seen_by(daemon_pid)
    try:
        # a request that its client left may run still: this one waits for its turn, as `agent.info` does not
        info = client.prefetch(seen.agent)
    except AgentNotFound:
        if seen.absent:
            return None
        raise Violation(f"{seen.agent} is gone; its transcript says that it exists") from None
    if info.server.get("lost_pages"):
        raise Violation(f"{seen.agent} has lost {info.server['lost_pages']} pages")
    return _verify_chat(client, seen, info, daemon_pid) if seen.kind == "chat" else _verify_text(client, seen, info)


def _verify_text(client: Client, seen: Transcript, info: AgentInfo) -> Transcript:
    candidates = {found for claim in seen.claims if (found := claim.candidate(info.text_bytes)) is not None}
    if not candidates:
        told = sorted({len(claim.high.encode()) for claim in seen.claims})
        raise Violation(f"{seen.agent} holds {info.text_bytes} bytes of text; its transcript allows {told}")
    troubles = []
    for data, whole in sorted(candidates, key=lambda each: (not each[1], each[0])):
        text = data.decode()
        if not text:
            if not info.text_bytes and not info.tokens:
                return seen.answered("", durable=info.durable, daemon_pid=seen.daemon_pid)
            # nothing is known but that something was generated: nothing can be told from the text
            client.rollback(seen.agent, 0)
            return seen.answered("", durable=True, daemon_pid=seen.daemon_pid)
        result = client.generate(seen.agent, text, max_tokens=0, stream=False)
        trouble = trouble_with(result, info, data, whole=whole)
        if not trouble:
            return seen.answered(text, durable=result.durable, daemon_pid=seen.daemon_pid)
        troubles.append(trouble)
    raise Violation(f"{seen.agent} is not what its transcript says: {'; or '.join(troubles)}")


def trouble_with(result: GenerateResult, info: AgentInfo, data: bytes, *, whole: bool) -> str:
    """What is wrong with the reply to a text that the agent must hold; empty if nothing is.

    Args:
        result: of a turn without new tokens.
        info: the agent before it.
        data: the text that was sent.
        whole: the agent must hold nothing beyond it.
    """
    if whole:
        if result.match != "exact":
            return f"{len(data)} bytes {result.match} ({result.match_reason}), where they are all of the text"
        if result.cached_tokens < info.computed_tokens:  # more when a fork of it has what it lacks
            return f"{result.cached_tokens} of {info.computed_tokens} computed tokens were reused"
        return ""
    divergence = result.server.get("divergence") or {}
    ended = result.match == "exact" or (divergence.get("byte") == len(data) and divergence.get("found") == "")
    if not ended:
        return f"{len(data)} bytes {result.match} ({result.match_reason}), where only the prompt may end"
    least = min(info.computed_tokens, result.prompt_tokens - REENCODED_TOKENS)
    if result.cached_tokens < least:
        return f"only {result.cached_tokens} of {info.computed_tokens} computed tokens were reused"
    return ""


def _verify_chat(client: Client, seen: Transcript, info: AgentInfo, daemon_pid: int) -> Transcript:
    """Ask the question that comes next, or was not answered, without wanting an answer."""
    question = seen.question or "And what follows from that?"
    messages = [*seen.messages, {"role": "user", "content": question}]
    result = client.chat(seen.agent, messages, max_tokens=0, stream=False)
    trouble = chat_trouble(result, floor_tokens=seen.floor_tokens, certain=not seen.question)
    if trouble:
        raise Violation(f"{seen.agent} is not what its transcript says: {trouble}")
    return seen.conversed(
        seen.messages,
        tokens=result.prompt_tokens,
        durable=result.durable,
        daemon_pid=daemon_pid,
        question=question,
    )


def chat_trouble(result: GenerateResult, *, floor_tokens: int, certain: bool) -> str:
    """What is wrong with how a conversation was matched; empty if nothing is.

    Args:
        result: of the turn.
        floor_tokens: tokens that the agent held at least; the last of them may be pending.
        certain: nothing but those, all of which the messages repeat.
    """
    divergence = result.server.get("divergence") or {}
    allowed = ("new", "extend") if not floor_tokens else ("extend",)
    if certain and result.match not in allowed:
        where = f"({result.match_reason}; {dict(divergence)})"
        return f"the conversation {result.match} {where}, where it can only extend"
    if divergence and divergence.get("found"):
        return f"the conversation differs from what is stored ({result.match_reason})"
    # where more is stored than was asked for, the messages end inside it
    least = min(floor_tokens - 1, result.prompt_tokens - REENCODED_TOKENS) if divergence else floor_tokens - 1
    if result.cached_tokens < least:
        return f"only {result.cached_tokens} of {floor_tokens} stored tokens were reused ({result.match_reason})"
    return ""


__all__ = ["REENCODED_TOKENS", "Violation", "chat_trouble", "trouble_with", "verify_agent"]
