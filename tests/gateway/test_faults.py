"""What clients are told when something is wrong: statuses, bodies and headers as the real services send them."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any

import pytest

from kvd.errors import Busy, ContextFull, Draining, InternalError, InvalidParams
from kvd.gateway import GatewaySettings
from kvd.gateway.app import Gateway
from kvd.gateway.errors import KINDS, from_daemon
from kvd.gateway.sse import event
from kvd_client.errors import ERROR_CLASSES, DaemonUnreachable, local_error
from kvd_client.wire.codes import CODES
from tests.gateway.daemons import ScriptedDaemon, text
from tests.gateway.serving import LineLog, Served, gateway
from tests.support.daemon import eventually, short_folder

HI = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "tiny", "messages": HI}
MESSAGE: dict[str, Any] = {"model": "claude-x", "max_tokens": 5, "messages": HI}


@pytest.mark.parametrize(
    ("path", "body", "param", "named"),
    [
        ("/v1/chat/completions", {"model": "tiny"}, "messages", "at least one"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "king"}]}, "messages[0].role", "developer"),
        ("/v1/chat/completions", {**CHAT, "temperature": 3}, "temperature", "from 0 to 2"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 3}, "top_logprobs", "logprobs is true"),
        ("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ("/v1/responses", {"model": "tiny", "input": "x", "tool_choice": "required"}, "tool_choice", "needs tools"),
        ("/v1/chat/completions", {**CHAT, "n": 2}, "n", "ask once"),
        ("/v1/chat/completions", {**CHAT, "temprature": 1}, "temprature", "temperature"),
        ("/v1/chat/completions", {**CHAT, "presence_penalty": 1}, "presence_penalty", "repetition_penalty"),
        ("/v1/chat/completions", {**CHAT, "stream": "yes"}, "stream", "true or false"),
        ("/v1/chat/completions", {**CHAT, "stop": [""]}, "stop", "non-empty"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "custom"}]}, "tools[0].type", "function"),
        ("/v1/chat/completions", {**CHAT, "response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
            "no images",
        ),
        ("/v1/chat/completions", {"messages": HI}, "model", "string"),
        ("/v1/completions", {"model": "tiny", "prompt": [1, 2]}, "prompt", "one string"),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "echo": True}, "echo", "not supported"),
        (
            "/v1/responses",
            {"model": "tiny", "input": "x", "previous_response_id": "r"},
            "previous_response_id",
            "stores",
        ),
        ("/v1/responses", {"model": "tiny", "input": []}, "input", "at least one"),
        ("/v1/responses", {"model": "tiny", "input": [{"type": "file"}]}, "input[0].type", "function_call_output"),
    ],
)
def test_bad_requests_name_field_and_allowed_values(
    served: Served, scripted: ScriptedDaemon, path: str, body: dict[str, Any], param: str, named: str
) -> None:
    """400 with OpenAI's error object; the daemon is not asked."""
    reply = served.post(path, body)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"
    assert reply.error["param"] == param
    assert named in reply.error["message"]
    assert scripted.of("chat") == []


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"model": "claude-x", "messages": HI}, "max_tokens must be an integer from 1 to 1000000; it is missing"),
        ({**MESSAGE, "messages": []}, "messages"),
        ({**MESSAGE, "temperature": 2}, "from 0 to 1"),
        ({**MESSAGE, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({**MESSAGE, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
        ({**MESSAGE, "tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "all"}}, "auto, any"),
        ({**MESSAGE, "tool_choice": {"type": "any"}}, "tool_choice.type any asks for a call, which needs tools"),
    ],
)
def test_bad_messages_get_anthropics_envelope(served: Served, body: dict[str, Any], named: str) -> None:
    """400, `type: error`, the field in the message, and the request's id in body and header."""
    reply = served.post("/v1/messages", body)
    assert reply.status == 400
    assert reply.json["type"] == "error"
    assert reply.error["type"] == "invalid_request_error"
    assert named in reply.error["message"]
    assert reply.json["request_id"] == reply.headers["request-id"]


@pytest.mark.parametrize(
    ("fault", "status", "openai", "anthropic", "retry"),
    [
        (Busy("7 requests are queued", retry_after_s=2.4), 429, "rate_limit_exceeded", "rate_limit_error", "3"),
        (ContextFull("600 tokens exceed 512"), 400, "context_length_exceeded", "invalid_request_error", None),
        (Draining("going down", retry_after_s=1.0), 503, "service_unavailable", "api_error", "1"),
        (InternalError("oops"), 500, "internal_error", "api_error", None),
        (InvalidParams("stop: no", parameter="stop"), 400, None, "invalid_request_error", None),
    ],
)
def test_the_daemons_refusals_have_the_services_status(
    served: Served,
    scripted: ScriptedDaemon,
    fault: Exception,
    status: int,
    openai: str | None,
    anthropic: str,
    retry: str | None,
) -> None:
    """Both dialects, streaming or not: what is refused before the first event is a status, not an event."""
    scripted.error = fault  # type: ignore[assignment]
    for stream in (False, True):
        reply = served.post("/v1/chat/completions", {**CHAT, "stream": stream})
        assert (reply.status, reply.error["code"]) == (status, openai)
        assert reply.headers.get("retry-after") == retry
        reply = served.post("/v1/messages", {**MESSAGE, "stream": stream})
        assert (reply.status, reply.error["type"]) == (status, anthropic)


def test_params_are_named_as_the_client_named_them(served: Served, scripted: ScriptedDaemon) -> None:
    """The daemon's `stop` is `stop_sequences` in messages, its `messages` are `input` in responses."""
    scripted.error = InvalidParams("must be short", parameter="stop")
    assert served.post("/v1/messages", MESSAGE).error["message"] == "stop_sequences: must be short"
    scripted.error = InvalidParams("must be short", parameter="messages")
    assert served.post("/v1/responses", {"model": "tiny", "input": "x"}).error["param"] == "input"


def test_an_error_in_mid_stream_ends_it(served: Served, scripted: ScriptedDaemon) -> None:
    """The status is gone by then: each dialect has an event for it."""
    scripted.script(text("Hel"))
    scripted.late_error = InternalError("oops")
    chat = served.post("/v1/chat/completions", {**CHAT, "stream": True}).events
    assert chat[-1][1]["error"]["code"] == "internal_error"
    message = served.post("/v1/messages", {**MESSAGE, "stream": True}).events
    assert message[-1] == ("error", {"type": "error", "error": {"type": "api_error", "message": "oops"}})
    reply = served.post("/v1/responses", {"model": "tiny", "input": "x", "stream": True})
    assert reply.events[-1][0] == "response.failed"
    assert served.line(reply.headers["x-request-id"])["outcome"] == "internal"


def test_another_model_is_not_found(served: Served) -> None:
    """404 with `model_not_found`, and the name of the one that is loaded; aliases mean it, too."""
    reply = served.post("/v1/chat/completions", {**CHAT, "model": "gpt-9"})
    assert (reply.status, reply.error["code"], reply.error["param"]) == (404, "model_not_found", "model")
    assert "tiny" in reply.error["message"]
    assert served.ask("GET", "/v1/models/gpt-9").status == 404
    assert served.post("/v1/chat/completions", {**CHAT, "model": "claude-opus"}).status == 200


def test_unknown_paths_and_methods_are_told_in_the_dialect(served: Served) -> None:
    """404 and 405 have bodies as well."""
    assert served.ask("GET", "/v1/chats").error["code"] == "not_found"
    reply = served.ask("GET", "/v1/messages")
    assert (reply.status, reply.json["type"]) == (405, "error")
    assert reply.headers["allow"] == "POST"
    assert reply.error["message"] == "GET is not allowed for /v1/messages; POST is"


@pytest.mark.parametrize("raw", [b"{", b"[1]", b'{"model": NaN}', b"\xff", b"[" * 100_000, b'{"a": 1e999}'])
def test_what_is_no_json_object_is_refused(served: Served, raw: bytes) -> None:
    """Whatever the bytes, the answer is a 400 that says what is wrong."""
    reply = served.ask("POST", "/v1/chat/completions", raw=raw)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        ("/v1/chat/completions", b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}'),
        ("/v1/responses", b'{"model":"tiny","input":"x","stream":true,"metadata":{"a":"\\uDFFF"}}'),
        ("/v1/responses", b'{"model":"tiny","input":"x","metadata":{"\\ud83d":"a"}}'),
        ("/v1/responses", b'{"model":"tiny","input":"x","\\ud800":1}'),
        ("/v1/messages", b'{"model":"\\udc00"}'),
        ("/v1/messages", b'{"model":"\xed\xa0\x80"}'),  # spelt as UTF-8 that there is not
    ],
)
def test_lone_surrogates_are_the_clients_fault(served: Served, path: str, raw: bytes) -> None:
    """JSON can spell what UTF-8 cannot carry: in values and in names, of fields that are used, echoed or unknown."""
    reply = served.ask("POST", path, raw=raw)
    assert reply.status == 400
    assert "surrogate" in reply.error["message"] or "UTF-8" in reply.error["message"]


def test_pairs_are_characters(served: Served, scripted: ScriptedDaemon) -> None:
    """Most programs spell an emoji so."""
    raw = b'{"model":"tiny","messages":[{"role":"user","content":"\\ud83d\\ude00"}]}'
    assert served.ask("POST", "/v1/chat/completions", raw=raw).status == 200
    assert scripted.of("chat")[0]["messages"][0]["content"] == "\U0001f600"
    assert json.loads(event({"a": "\ud800"})[6:]) == {"a": "\ud800"}  # and what gets here breaks nothing off


DEEP: dict[str, Any] = {}
for _ in range(60):
    DEEP = {"properties": DEEP}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}, "nested"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": [0] * 263_000}}}]},
            "values",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}}, "nested"),
        ({"chat_template_kwargs": {"x": [0] * 263_000}}, "values"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "at most 1024 tokens"),
    ],
    ids=["deep tool", "many values", "deep schema", "template", "bias"],
)
def test_what_the_daemon_would_close_the_connection_for_is_one_requests_error(
    served: Served, scripted: ScriptedDaemon, more: dict[str, Any], named: str
) -> None:
    """P33: one connection carries all turns: a request outside the daemon's bounds ends no other one's stream."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)
    headers = {"content-type": "application/json", "x-kvd-agent": "hangs"}
    connection.request("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": True}), headers)
    response = connection.getresponse()
    reply = served.post("/v1/chat/completions", {**CHAT, **more})
    assert reply.status == 400
    assert named in reply.error["message"]
    for _ in range(3):  # the other one goes on: its pings come
        while response.readline() != b": ping\n":
            pass
    assert not scripted.was_cancelled.is_set()
    response.close()
    connection.close()
    assert scripted.was_cancelled.wait(20)


def test_bodies_have_a_bound_together(scripted: ScriptedDaemon) -> None:
    """P21, P33: 429 before the daemon would end the connection; small ones are taken; room comes back."""
    with gateway(scripted.path, max_held_bytes=300_000) as served:  # type: ignore[attr-defined]
        large = {**CHAT, "messages": [{"role": "user", "content": "x" * 200_000}]}
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)
        headers = {"content-type": "application/json", "x-kvd-agent": "hangs"}
        connection.request("POST", "/v1/chat/completions", json.dumps(large), headers)
        assert scripted.has_begun.wait(20)
        reply = served.post("/v1/chat/completions", large)
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        assert "300000" in reply.error["message"]
        assert served.post("/v1/chat/completions", CHAT).status == 200
        connection.close()
        assert scripted.was_cancelled.wait(20)
        eventually(lambda: served.post("/v1/chat/completions", large).status == 200, "there is room again")


def test_a_daemon_that_hangs_is_no_reason_to_hang(
    served: Served, scripted: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P23: health checks and scrapes that pile up behind it would be a leak of their own."""

    async def hanging(params: object, context: object) -> object:
        await asyncio.Event().wait()
        return {}

    for module in ("app", "metrics"):
        monkeypatch.setattr(f"kvd.gateway.{module}.LOOK_S", 0.02)
    monkeypatch.setattr(scripted, "do_health", hanging)
    reply = served.ask("GET", "/health")
    assert reply.status == 503
    assert served.line(reply.headers["x-request-id"])["outcome"] == "unavailable"
    assert b"kvd_gateway_daemon_up 0.0" in served.ask("GET", "/metrics").body


def test_a_form_is_not_json(served: Served) -> None:
    """415: a page of another site could send a form without asking first."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    reply = served.ask("POST", "/v1/chat/completions", CHAT, headers=headers)
    assert reply.status == 415
    assert "application/json" in reply.error["message"]


def test_threads_are_refused_in_a_way_the_sdk_goes_on_from(served: Served) -> None:
    """Anthropic's tool runner asks for a stored conversation first, and sends whole ones when that is unsupported."""
    reply = served.post("/v1/messages", {**MESSAGE, "thread": {"type": "create"}})
    assert reply.status == 400
    assert reply.error["details"]["error_code"] == "thread_unsupported_request"


def test_compressed_bodies_are_refused(served: Served) -> None:
    """They are not read, so they cannot grow beyond the limit either."""
    reply = served.post("/v1/messages", MESSAGE, content_encoding="gzip")
    assert reply.status == 400
    assert reply.error["details"]["error_code"] == "request_body_encoding_unsupported"


def test_large_bodies_are_refused(scripted: ScriptedDaemon) -> None:
    """413, announced or not; the limit is named."""
    with gateway(scripted.path, max_body_bytes=2048) as served:  # type: ignore[attr-defined]
        body = {**CHAT, "messages": [{"role": "user", "content": "x" * 4000}]}
        reply = served.post("/v1/chat/completions", body)
        assert (reply.status, reply.error["code"]) == (413, "request_too_large")
        assert "2048" in reply.error["message"]
        host = served.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=20)
        pieces = iter([json.dumps(body).encode()])
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/messages", pieces, headers, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()


def test_no_daemon_is_503_with_the_command() -> None:
    """The message names the command that starts it; health says so, too, and metrics still come."""
    with short_folder() as folder, gateway(folder / "kvd.sock") as served:
        reply = served.post("/v1/chat/completions", CHAT)
        assert (reply.status, reply.error["code"]) == (503, "daemon_unreachable")
        assert "kvd serve" in reply.error["message"]
        assert reply.headers["retry-after"] == "1"
        assert served.post("/v1/messages", MESSAGE).error["type"] == "api_error"
        assert served.ask("GET", "/health").status == 503
        assert b"kvd_gateway_daemon_up 0.0" in served.ask("GET", "/metrics").body


def test_every_error_of_the_daemon_has_a_kind() -> None:
    """No name of the wire's table falls through; the way to the daemon has its own kinds."""
    for name in CODES:
        error = from_daemon(local_error(name, "why"))
        assert error.kind in KINDS
        assert name == "internal" or name in ERROR_CLASSES
    kinds = {name: from_daemon(local_error(name, "why")).kind for name in CODES}
    assert [name for name, kind in kinds.items() if kind == "internal"] == [
        "model_error",
        "config_error",
        "protocol",
        "internal",
    ]
    assert from_daemon(DaemonUnreachable("none", socket="s", command="kvd serve")).status == 503


def test_the_log_has_one_line_a_request(served: Served, scripted: ScriptedDaemon) -> None:
    """P38: one canonical line, without text of prompt or answer."""
    before = len(served.log.lines)
    scripted.script(text("a secret answer"))
    body = {**CHAT, "messages": [{"role": "user", "content": "a secret question"}]}
    reply = served.post("/v1/chat/completions", body, x_kvd_agent="me")
    line = served.line(reply.headers["x-request-id"])
    later = served.log.lines[before:]  # those of earlier tests' requests may be among them: lines come in batches
    lines = [each for each in later if each[2].get("request_id") == reply.headers["x-request-id"]]
    assert len(lines) == 1
    assert (line["agent"], line["identity"], line["status"], line["outcome"]) == ("me", "agent", 200, "ok")
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (10, 7, 4)
    assert "secret" not in repr(later)


class Torn(LineLog):
    """A log that cannot write the line of a path."""

    def warning(self, event: str, **facts: object) -> None:
        """Fail for one."""
        if facts.get("path") == "/bad":
            raise OSError("no room")
        super().warning(event, **facts)


def test_a_line_that_cannot_be_written_costs_no_other_and_none_is_lost_by_a_stop_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P38: lines are told together, each by itself; a flood is told before its time is over."""
    monkeypatch.setattr("kvd.gateway.around.TELL_EVERY_S", 3600.0)
    monkeypatch.setattr("kvd.gateway.around.MOST_UNTOLD", 4)
    log = Torn()
    seen: list[list[object]] = []

    def paths() -> list[object]:
        return [line["path"] for line in log.requests()]

    async def run() -> None:
        with short_folder() as folder:
            running = Gateway(GatewaySettings(socket=folder / "none"), log)

            async def receive() -> dict[str, str]:
                return {"type": "http.disconnect"}

            async def send(message: object) -> None:
                pass

            async def ask(*names: str) -> None:
                for name in names:
                    scope = {"type": "http", "method": "GET", "path": name, "headers": [(b"host", b"localhost")]}
                    await running.app(scope, receive, send)
                seen.append(paths())

            async def broken() -> None:
                raise OSError("cannot settle")

            monkeypatch.setattr(running, "settled", broken)
            await ask("/1", "/bad", "/2")
            await ask("/3")
            with pytest.raises(OSError, match="cannot settle"):
                async with running._lifespan(None):
                    await ask("/4")
            await ask("/5")
            await running.watch.close()
            await running.client.close()

    asyncio.run(run())
    assert seen == [[], ["/1", "/2", "/3"], ["/1", "/2", "/3"], ["/1", "/2", "/3", "/4", "/5"]]
    assert [facts["path"] for kind, _, facts in log.lines if kind == "exception"] == ["/bad"]


def test_what_is_over_is_told_together_at_a_scrape_and_at_the_end(
    scripted: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P38: lines and counts wait for those of other requests, but no scrape misses one, and none is lost at the end."""
    monkeypatch.setattr("kvd.gateway.around.TELL_EVERY_S", 3600.0)
    counted = 'kvd_gateway_requests_total{endpoint="/v1/chat/completions",outcome="invalid",status="400"} 2.0'
    with gateway(scripted.path) as served:  # type: ignore[attr-defined]
        first, second = (served.post("/v1/chat/completions", {**CHAT, "messages": "none"}) for _ in range(2))
        assert served.log.requests() == []
        eventually(lambda: counted in served.ask("GET", "/metrics").body.decode(), "both are counted")
        third = served.post("/v1/chat/completions", {**CHAT, "messages": "none"})
    told = [line["request_id"] for line in served.log.requests() if line["path"] == "/v1/chat/completions"]
    assert told == [reply.headers["x-request-id"] for reply in (first, second, third)]
