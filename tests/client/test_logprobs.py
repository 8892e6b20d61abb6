"""Log-probabilities at the client's end: typed, printable as JSON, and what does not fit is never taken for one."""

from __future__ import annotations

import json

import pytest

from kvd_client import calls
from kvd_client.cli_text import logprob_line
from kvd_client.errors import KvdClientError
from kvd_client.logprobs import Alternative, TokenLogprob, parse_logprobs
from kvd_client.stream import Logprobs, OtherEvent, parse_event

END = {"id": 2, "token": "<|im_end|>", "bytes": None, "logprob": -3}
HALF = {"id": 7, "token": "\N{REPLACEMENT CHARACTER}", "bytes": b"\xc3", "logprob": -0.25}
SENT = [{**HALF, "top_logprobs": [HALF, END]}, {**END, "top_logprobs": []}]
PARSED = (
    TokenLogprob(
        7,
        "\N{REPLACEMENT CHARACTER}",
        b"\xc3",
        -0.25,
        (Alternative(7, "\N{REPLACEMENT CHARACTER}", b"\xc3", -0.25), Alternative(2, "<|im_end|>", None, -3.0)),
    ),
    TokenLogprob(2, "<|im_end|>", None, -3.0),
)


def test_events_and_results_have_the_same_types() -> None:
    """Both become `TokenLogprob`s; a result without the field has None, and one with an empty list has none of them."""
    assert parse_event({"type": "logprobs", "logprobs": SENT}) == Logprobs(PARSED)
    read = calls.generate("a", "x", "default", {"logprobs": 2}).read
    assert read({"text": "é", "logprobs": SENT}, None).logprobs == PARSED
    assert read({"text": "é", "logprobs": []}, None).logprobs == ()
    plain = read({"text": "é"}, None)
    assert (plain.logprobs, dict(plain.server)) == (None, {})
    assert read({"logprobs": SENT, "new": 1}, None).server == {"new": 1}


def test_what_is_sent() -> None:
    """The parameter goes as it is, 0 too, and is left out when it is None."""
    assert calls.generate("a", "x", "n", {"logprobs": 0}).params["logprobs"] == 0
    assert "logprobs" not in calls.generate("a", "x", "n", {"logprobs": None}).params
    assert calls.chat("a", [{"role": "user", "content": "x"}], "n", {"logprobs": 5}).params["logprobs"] == 5


def test_they_are_printed_as_the_openai_api_has_them() -> None:
    """Bytes are a list of integers in JSON, or null; for people a token is a line."""
    printed = json.loads(json.dumps([each.plain() for each in PARSED]))
    assert printed[0]["bytes"] == [0xC3]
    assert printed[0]["top_logprobs"][1] == {"id": 2, "token": "<|im_end|>", "bytes": None, "logprob": -3.0}
    assert printed[1]["top_logprobs"] == []
    assert logprob_line(PARSED[1]) == "   -3.000  '<|im_end|>'"
    assert logprob_line(PARSED[0]).split()[2:] == ["'\N{REPLACEMENT CHARACTER}'", "-0.250", "'<|im_end|>'", "-3.000"]


@pytest.mark.parametrize(
    "wrong",
    [
        7,
        "text",
        [7],
        [{}],
        [{**HALF, "top_logprobs": 7}],
        [{**HALF, "top_logprobs": [{}]}],
        [{**HALF, "top_logprobs": [], "id": True}],
        [{**HALF, "top_logprobs": [], "bytes": "é"}],
        [{**HALF, "top_logprobs": [], "logprob": None}],
        [{**HALF, "top_logprobs": [], "logprob": True}],
    ],
)
def test_what_does_not_fit_is_refused(wrong: object) -> None:
    """An odd event is passed through as it came; an odd result is a violation of the protocol."""
    with pytest.raises(ValueError, match=r"not|no token"):
        parse_logprobs(wrong)
    event = {"type": "logprobs", "logprobs": wrong}
    assert parse_event(event) == OtherEvent("logprobs", event)
    with pytest.raises(KvdClientError, match="logprobs cannot be read"):
        calls.generate("a", "x", "n", {}).read({"logprobs": wrong}, None)
