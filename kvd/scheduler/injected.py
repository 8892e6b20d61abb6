"""What `inject` answers, to one agent and to several.

May import kvd.errors, kvd.front.api (types) and kvd.scheduler.requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvd.errors import Cancelled, KvdError
from kvd.scheduler.requests import AgentRef

if TYPE_CHECKING:
    from kvd.front.api import CallContext


def injected(result: object) -> object:
    """The result of `inject` to one agent."""
    return {**result, "tokens": result["prompt_tokens"]} if isinstance(result, dict) else result


def injected_into(refs: Sequence[AgentRef], parts: Sequence[object], context: CallContext) -> dict[str, object]:
    """The result of `inject` to several: one entry an agent, which has either its figures or its error.

    Raises:
        Cancelled: the client cancelled the call before all were done; `data` has the entries.
        BaseException: a part failed in a way that no client can be told.
    """
    entries: list[object] = []
    for ref, part in zip(refs, parts, strict=True):
        if isinstance(part, KvdError):
            entries.append({"agent": ref.agent, "error": context.error_map(part)})
        elif isinstance(part, BaseException):
            raise part
        else:
            entries.append(injected(part))
    if context.cancelled and any(isinstance(part, Cancelled) for part in parts):
        raise Cancelled("cancelled by the client; what was computed is kept", agents=entries)
    return {"agents": entries}
