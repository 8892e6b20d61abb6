"""The method `tokenize`: ids of a text, or how many a text or a conversation has.

Ids go back in one message, which bounds their text. A count is one number: its text may be as long as a message, since
it is counted in pieces (`kvd.model.counting`), outside the event loop and without Python's lock. One at a time, and
whoever does not want his any more ends it at the next piece.

Owner: the event loop. May import kvd.errors, kvd.model, kvd.vm.text and siblings.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from kvd.errors import Cancelled, InvalidParams
from kvd.model.counting import count_tokens
from kvd.model.template import ChatTemplate
from kvd.model.tokenizer import TextCodec
from kvd.scheduler.params import Params
from kvd.vm.text import Span, TypedText

if TYPE_CHECKING:
    from kvd.front.api import CallContext

MAX_TOKENIZE_BYTES: Final = 1_000_000
"""A text yields about as many ids as it has bytes at most, and clients accept 1,048,576 values in a message."""

MAX_COUNT_BYTES: Final = 1 << 24
"""As long as a message of the protocol."""

TextParts = Callable[[], Awaitable[tuple[TextCodec, ChatTemplate | None]]]
"""The model's codec and template, once it is loaded."""


class InTemplate(Protocol):
    """Renders messages in a worker."""

    def __call__(self, context: CallContext, render: Callable[[ChatTemplate], TypedText], /) -> Awaitable[TypedText]:
        """The prompt."""


class Tokenizing:
    """Owner: the event loop.

    Args:
        text_parts: waits for the model.
        in_template: renders messages.
    """

    def __init__(self, text_parts: TextParts, in_template: InTemplate) -> None:
        self._text_parts = text_parts
        self._in_template = in_template
        self._one_at_a_time = asyncio.Lock()

    async def call(self, params: Params, context: CallContext) -> object:
        """Carry out one call.

        Raises:
            InvalidParams, InvalidText, Unsupported: naming what is wrong.
            Cancelled: the caller left.
        """
        params.refuse_unknown("text", "messages", "tools", "count_only")
        only_count, is_chat = params.flag("count_only", False), params.has("messages")
        typed = await self._messages(params, context) if is_chat else self._text(params)
        most, name = MAX_COUNT_BYTES if only_count else MAX_TOKENIZE_BYTES, "messages" if is_chat else "text"
        if len(typed.data) > most:
            raise InvalidParams(
                f"{name} takes at most {most} bytes here, not {len(typed.data)}; "
                + ("send them in parts" if only_count else "count_only takes more"),
                parameter=name,
            )
        codec, _ = await self._text_parts()
        left = threading.Event()  # the context is the loop's, and who counts is a worker
        context.on_cancel(left.set)

        def pause() -> None:
            if left.is_set():
                raise Cancelled("cancelled while its tokens were counted")

        async with self._one_at_a_time:
            pause()
            if only_count:
                return {"count": await asyncio.to_thread(count_tokens, codec, typed, at_start=is_chat, pause=pause)}
            ids = await asyncio.to_thread(_ids, codec, typed, is_chat=is_chat)
        return {"tokens": list(ids), "count": len(ids)}

    def _text(self, params: Params) -> TypedText:
        if params.has("tools"):
            raise InvalidParams("tools go with messages: a text has none", parameter="tools")
        data = params.text("text").encode()
        return TypedText(data, (Span("content", len(data)),) if data else ())

    async def _messages(self, params: Params, context: CallContext) -> TypedText:
        """The prompt that `chat` would compute for a conversation of a new agent."""
        if params.has("text"):
            raise InvalidParams("tokenize takes either text or messages, not both", parameter="text")
        messages, tools = params.messages(), params.tools()
        return await self._in_template(context, lambda template: template.render(messages, tools=tools))


def _ids(codec: TextCodec, typed: TypedText, *, is_chat: bool) -> Sequence[int]:
    if is_chat:
        return codec.encode_typed(typed, at_start=True)[0]
    return codec.encode_content(typed.data.decode())


__all__ = ["MAX_COUNT_BYTES", "MAX_TOKENIZE_BYTES", "Tokenizing"]
