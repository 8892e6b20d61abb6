"""What a connection hears: past facts, frozen. Params and results are plain msgpack values.

Those there are many of are tuples, which take a third of the time to make that frozen dataclasses do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvd_client.wire.codes import ErrorObject


class RequestReceived(NamedTuple):
    """`[0, id, method, [params]]`. The id is in flight until `send_response` or `send_error`."""

    request_id: int
    method: str
    params: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """A whole request with a known id that cannot be served: answer it with `error`; the connection goes on.

    Its text is not UTF-8 (`invalid_text`) or its parameters are not one map (`invalid_params`).
    """

    request_id: int
    error: ErrorObject


class ResponseReceived(NamedTuple):
    """`[1, id, error, result]` to a request of ours; exactly one of `error` and `result` counts."""

    request_id: int
    error: ErrorObject | None
    result: object


class StreamReceived(NamedTuple):
    """`[2, "stream", [id, event]]` for a request of ours that is still in flight."""

    request_id: int
    event: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class CancelReceived:
    """`[2, "cancel", [id]]` for a request that is in flight here (others are dropped: the answer crossed it)."""

    request_id: int


@dataclass(frozen=True, slots=True)
class ErrorNotified:
    """`[2, "error", [error]]`: why the peer is about to close the connection."""

    error: ErrorObject


@dataclass(frozen=True, slots=True)
class NotificationReceived:
    """Any other `[2, method, params]`; unknown methods are for the caller to ignore."""

    method: str
    params: tuple[object, ...]


Event = (
    RequestReceived
    | RequestRefused
    | ResponseReceived
    | StreamReceived
    | CancelReceived
    | ErrorNotified
    | NotificationReceived
)
