"""Calls that stand for recalled answers in templates that insist on seeing calls.

Theory of operation. Some templates count turns without calls, or refuse a result that follows none. They get the answer
with as many calls as it has, but of a made-up function whose name and arguments are a mark, so that nothing of a client
is in what they print for it. In the output the answer reaches from the markup that it was written behind to the markup
that closes an answer, around the mark, all of it in one run of control text; there the text that the model wrote is put
in place. A template that prints the mark anywhere else, or something of the client's in between, is refused.

Pure. May import this package.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

from kvd.model.errors import TemplateRefused
from kvd.model.recall import Generated
from kvd.model.rendering import Piece

_PREFIX: Final = "Kv" + secrets.token_hex(12)
"""Of all marks of this process: no client can guess it."""


def new_mark() -> str:
    """A name for one answer's calls, of letters and digits."""
    return f"{_PREFIX}M{secrets.token_hex(6)}"


def is_stand_in(text: str) -> bool:
    """Whether a text is part of a stand-in."""
    return _PREFIX in text


def stand_in(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The message with calls of a made-up function and nothing else."""
    function = {"name": mark, "arguments": {mark: mark}}
    ids = [call.get("id") if isinstance(call, Mapping) else None for call in message["tool_calls"]]
    calls = [{"type": "function", "function": function} | ({} if each is None else {"id": each}) for each in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def in_place(pieces: list[Piece], marks: Mapping[str, Generated], closing: str) -> list[Piece]:
    """The pieces with recalled answers in place of what was printed for their stand-ins.

    Args:
        pieces: of a rendering; control text has the marks.
        marks: by mark, in the order of the messages.
        closing: markup that closes an answer.

    Raises:
        TemplateRefused: where an answer begins or ends cannot be told.
    """
    for mark, answer in marks.items():
        places = [number for number, (_, text) in enumerate(pieces) if mark in text]
        text = pieces[places[0]][1] if len(places) == 1 else ""
        end = text.find(closing, text.rfind(mark)) if closing and text.startswith(answer.opening) else -1
        if end < 0:
            raise TemplateRefused("the chat template does not show where calls begin and end")
        put: list[Piece] = [("control", answer.opening), ("recalled", answer.text), ("control", text[end:])]
        pieces = [*pieces[: places[0]], *put, *pieces[places[0] + 1 :]]
    return pieces
