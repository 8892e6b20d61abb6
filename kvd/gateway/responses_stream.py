"""A turn as the events of OpenAI's responses: items that are opened, filled and closed, each event with its number.

May import kvd_client and siblings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvd.gateway.answers import Answer, Call, ContentTokens, call_of, new_id, openai_logprobs
from kvd.gateway.errors import ApiError
from kvd.gateway.fields import Fields
from kvd.gateway.openai_responses import ResponseObject, call_item, message_item, output_text, reasoning_item
from kvd.gateway.sse import COMMENT_PING, event
from kvd_client.stream import Logprobs, Matched, OtherEvent, Reasoning, StreamEvent, Text, ToolCall


class ResponseWriter:
    """Says a turn as a response or as its events. Owner: its request.

    Args:
        response: what the request's response is.
    """

    def __init__(self, response: ResponseObject) -> None:
        self._response = response
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._kind = ""
        self._item_id = ""
        self._text = ""
        self._logprobs: list[dict[str, object]] = []
        self._call = Call("", "", "")
        self._in_pieces: set[object] = set()
        self._tokens = ContentTokens()

    @classmethod
    def of(cls, fields: Fields, model: str) -> ResponseWriter:
        """The writer for a request."""
        return cls(ResponseObject(fields, model))

    def begin(self, matched: Matched | None) -> bytes:
        """The response, before it has any output."""
        begun = self._response.begun()
        return self._say("response.created", response=begun) + self._say("response.in_progress", response=begun)

    def event(self, event: StreamEvent) -> bytes:
        """Deltas of the open item; an item of another kind closes it."""
        match event:
            case Text(text):
                opened = self._open("message")
                self._text += text
                self._tokens.said(text, is_content=True)
                return opened + self._part("response.output_text.delta", delta=text, logprobs=[]) + self._told()
            case Logprobs(tokens):
                self._tokens.sampled(tokens)
                return self._told()
            case Reasoning(text):
                self._tokens.said(text, is_content=False)
                opened = self._told() + self._open("reasoning")
                self._text += text
                return opened + self._part("response.reasoning_text.delta", delta=text)
            case ToolCall() | OtherEvent():
                return self._called(event)
            case _:
                return b""

    def _told(self, *, ended: bool = False) -> bytes:
        """The log-probabilities of the open message's text, if there are new ones: they open and close nothing."""
        told = openai_logprobs(self._tokens.take(ended=ended))
        if not told or self._kind != "message":
            return b""
        self._logprobs += told
        return self._part("response.output_text.delta", delta="", logprobs=told)

    def _called(self, event: ToolCall | OtherEvent) -> bytes:
        index = event.data.get("index")
        whole = isinstance(event, ToolCall)
        if (not whole and event.type != "tool_call_delta") or (
            whole and index in self._in_pieces and index is not None
        ):
            return b""
        self._tokens.said("", is_content=False)
        said, call = self._told(), call_of(event.data)
        if whole or index not in self._in_pieces:
            self._in_pieces.add(index)
            said += self._close("completed")  # of the call before, with its own name and arguments
            self._call = Call(call.id, call.name, "")
            said += self._open("function_call")
        self._call = Call(self._call.id, self._call.name, self._call.arguments + call.arguments)
        return said + self._of_item("response.function_call_arguments.delta", delta=call.arguments)

    def end(self, answer: Answer) -> bytes:
        """The end of the open item, and the whole response."""
        ended = self._response.ended(answer)
        status = ended["status"]
        said = self._told(ended=True)
        if not self._items and not self._kind:
            said += self._open("message")  # an empty answer is one, too
        said += self._close(status)
        ended["output"] = self._items
        return said + self._say(f"response.{status}", response=ended)

    def error(self, error: ApiError) -> bytes:
        """An error in mid-stream, which ends it."""
        return self._say("response.failed", response=self._response.failed(error))

    def ping(self) -> bytes:
        """A comment."""
        return COMMENT_PING

    def whole(self, answer: Answer) -> Mapping[str, Any]:
        """The response."""
        return self._response.ended(answer)

    # ---- items ------------------------------------------------------------------------------------------------------

    def _open(self, kind: str) -> bytes:
        """Open an item unless one of that kind is open."""
        if self._kind == kind:
            return b""
        said = self._close("completed")
        prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[kind]
        self._kind, self._item_id, self._text, self._logprobs = kind, new_id(prefix), "", []
        said += self._say("response.output_item.added", output_index=len(self._items), item=self._item("in_progress"))
        if kind != "function_call":
            said += self._part("response.content_part.added", part=self._content_part())
        return said

    def _close(self, status: str) -> bytes:
        """Close the open item, if there is one."""
        if not self._kind:
            return b""
        if self._kind == "function_call":
            told = {"arguments": self._call.arguments, "name": self._call.name}
            said = self._of_item("response.function_call_arguments.done", **told)
        elif self._kind == "reasoning":
            said = self._part("response.reasoning_text.done", text=self._text)
        else:
            said = self._part("response.output_text.done", text=self._text, logprobs=self._logprobs)
        if self._kind != "function_call":
            said += self._part("response.content_part.done", part=self._content_part())
        item = self._item(status)
        said += self._say("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._kind = ""
        return said

    def _item(self, status: str) -> dict[str, Any]:
        if self._kind == "function_call":
            return call_item(self._item_id, self._call, status)
        if self._kind == "reasoning":
            return reasoning_item(self._item_id, self._text, status)
        return message_item(self._item_id, self._text, status, self._logprobs)

    def _content_part(self) -> dict[str, Any]:
        if self._kind == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        return output_text(self._text, self._logprobs)

    def _part(self, kind: str, /, **data: object) -> bytes:
        return self._of_item(kind, content_index=0, **data)

    def _of_item(self, kind: str, /, **data: object) -> bytes:
        return self._say(kind, item_id=self._item_id, output_index=len(self._items), **data)

    def _say(self, kind: str, /, **data: object) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **data}, kind)


__all__ = ["ResponseWriter"]
