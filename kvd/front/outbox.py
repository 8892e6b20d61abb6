"""Messages of one connection that wait because the peer does not read.

Text that arrives for a call whose last waiting message is text of the same kind is appended to that message, and a
newer progress report replaces an older one: a reader that falls behind gets fewer, larger messages in the same order
per call. Ids of tokens are appended to earlier ones across the text between them: a reader may know of tokens whose
text it has not got, never the reverse. What cannot be merged waits as it is. The owner watches `waiting_bytes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

MERGED = frozenset({"text", "reasoning"})
REPLACED = frozenset({"prefill", "queued"})
TOKENS = "tokens"
_ENTRY_BYTES = 256
"""What a waiting message costs beside its own bytes: many tiny ones must not slip under the bound."""
_PARTS = 256

Encode = Callable[[int, Mapping[str, object]], bytes]


class _Entry:
    """A waiting message: final bytes, or an event that may still take in later ones."""

    __slots__ = ("cost_bytes", "data", "ids", "is_joined", "kind", "parts", "request_id")

    def __init__(
        self, data: bytes, request_id: int, kind: str, text: str | None, ids: list[object] | None = None
    ) -> None:
        self.data = data
        self.request_id = request_id
        self.kind = kind
        self.parts: list[str] | None = None if text is None else [text]
        self.is_joined = False  # `data` is that of the first part alone
        self.ids = ids
        self.cost_bytes = len(data) + _ENTRY_BYTES


class Outbox:
    """The waiting messages, oldest first. Owner: one `Session`; all methods mutate it.

    Args:
        encode: bytes of a stream event; raises EncodeError.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._entries: deque[_Entry] = deque()
        self._open: dict[int, _Entry] = {}
        self._ids: dict[int, _Entry] = {}
        self.waiting_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, data: bytes) -> None:
        """Add a message that is never merged; when it belongs to a call, `seal` that call's events first."""
        self._append(_Entry(data, -1, "", None))

    def add_event(self, request_id: int, event: Mapping[str, object]) -> None:
        """Add a stream event, into the call's last waiting message where that is the same.

        Raises:
            EncodeError: the event cannot be sent; the outbox is as it was.
        """
        data = self._encode(request_id, event)
        kind = str(event.get("type"))
        ids = event.get("ids") if kind == TOKENS and event.keys() == {"type", "ids"} else None
        if isinstance(ids, list):
            self._add_ids(request_id, ids, data)
            return
        text = event.get("text") if kind in MERGED and event.keys() == {"type", "text"} else None
        text = text if isinstance(text, str) else None
        last = self._open.get(request_id)
        if last is not None and last.kind == kind:
            if last.parts is not None and text is not None:
                last.parts.append(text)
                last.is_joined = True
                self._grow(last, len(data))
                if len(last.parts) >= _PARTS:
                    last.parts = ["".join(last.parts)]
                return
            if kind in REPLACED:
                self._grow(last, len(data) - len(last.data))
                last.data = data
                return
        self._seal_text(request_id)
        entry = _Entry(data, request_id, kind, text)
        self._append(entry)
        if text is not None or kind in REPLACED:
            self._open[request_id] = entry

    def _add_ids(self, request_id: int, ids: list[object], data: bytes) -> None:
        entry = self._ids.get(request_id)
        if entry is not None and entry.ids is not None:
            entry.ids += ids
            self._grow(entry, len(data))
            return
        self._seal_text(request_id)  # text that comes from here on must not overtake these
        entry = self._ids[request_id] = _Entry(data, request_id, TOKENS, None, list(ids))
        self._append(entry)

    def seal(self, request_id: int) -> None:
        """Make the call's open messages final; must happen while the call is in flight on the wire."""
        self._seal_text(request_id)
        entry = self._ids.pop(request_id, None)
        if entry is not None:
            entry.data = self._encode(request_id, {"type": TOKENS, "ids": entry.ids})
            entry.ids = None

    def _seal_text(self, request_id: int) -> None:
        entry = self._open.pop(request_id, None)
        if entry is not None and entry.parts is not None:
            if entry.is_joined:
                entry.data = self._encode(request_id, {"type": entry.kind, "text": "".join(entry.parts)})
            entry.parts = None

    def pop(self) -> bytes:
        """Take the oldest message.

        Raises:
            IndexError: none waits.
        """
        entry = self._entries.popleft()
        self.waiting_bytes -= entry.cost_bytes
        if self._open.get(entry.request_id) is entry or self._ids.get(entry.request_id) is entry:
            self.seal(entry.request_id)
        return entry.data

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self._open.clear()
        self._ids.clear()
        self.waiting_bytes = 0

    def _append(self, entry: _Entry) -> None:
        self._entries.append(entry)
        self.waiting_bytes += entry.cost_bytes

    def _grow(self, entry: _Entry, by_bytes: int) -> None:
        entry.cost_bytes += by_bytes
        self.waiting_bytes += by_bytes
