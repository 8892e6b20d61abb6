"""Every parameter of every method of a real daemon, with values it does not take: refused by name, never a bug.

The table of methods and parameters is the daemon's own (`hello`, and what it says to an unknown parameter), so that a
new method is covered when it is there.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd_client import Client, errors
from kvd_client.wire import StreamReceived
from tests.support.daemon import Daemon, short_folder
from tests.support.zygote import Zygote

pytestmark = pytest.mark.daemon

WORK = {"drain", "shutdown"}
"""Methods that would end the daemon: called with wrong parameters only."""


@pytest.fixture(scope="module")
def daemon(tiny_model_dir: Path, zygote: Zygote | None) -> Iterator[Daemon]:
    """A daemon with one agent, `witness`."""
    with short_folder() as folder, Daemon(folder, tiny_model_dir, zygote=zygote) as running:
        running.client.inject("witness", " the of and")
        yield running


VALID: dict[str, Any] = {
    "agent": "witness",
    "text": "a text",
    "messages": [{"role": "user", "content": "hi"}],
    "new_agent": "witness-2",
    "tokens": 1,
    "max_tokens": 0,
    "path": "/nowhere/agent.safetensors",
}
"""Values that make a call of every method complete, or fail for want of a file or folder. A new method whose needs are
not met here fails the test."""

ODD = (None, True, False, 0, -1, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), -float("inf"), "", "x")
ODDER = ("\x00", "é" * 5000, b"", b"\xff", [], {}, [[]], [{}], [None], {"": None}, {"a": [1]}, ["x"] * 2000, [b"x"])
DEEPER: tuple[Any, ...] = (
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": "x", "tool_calls": 7, "name": {"a": []}}],
    [{"role": 7, "content": "x"}],
    [{"role": "user", "content": b"\x00"}],
    [{"role": "user", "content": "x", "extra": b"\x00"}],
    [{"role": "", "content": "{{ 7 * 7 }}{% raise %}"}],
    {"5": 1.0, "x": 2},
    {"99999999": 1.0},
    {"5": float("nan")},
    [[[[[[[[[[]]]]]]]]]],
)


ENDLESS = {"events.subscribe"}
"""Methods that answer when they are left: what comes first counts."""


def call(client: Client, method: str, params: dict[str, Any]) -> None:
    """Call a method to its end, or to its first event.

    Raises:
        RemoteError: as `Client.call`.
    """
    if method not in ENDLESS:
        client.call(method, params)
        return
    transport = client.transport()
    number = transport.send_request(method, params, None)
    message = transport.next_message(number, 30.0)
    transport.cancel(number)
    while isinstance(last := message, StreamReceived):
        message = transport.next_message(number, 30.0)
    transport.forget(number)
    if last.error is not None and last.error.name != "cancelled":
        raise errors.remote_error(last.error)


def allowed_parameters(client: Client, method: str) -> list[str]:
    """The parameters a method takes, as its refusal of an unknown one says."""
    with pytest.raises(errors.InvalidParams) as refused:
        client.call(method, {"no such parameter": 1})
    assert refused.value.data["parameters"] == ["no such parameter"]
    names: list[str] = refused.value.data["allowed"]
    for name in names:
        assert name in refused.value.message
    return names


def test_every_parameter_of_every_method(daemon: Daemon) -> None:
    """Bytes are never right: each parameter of each method refuses them by its name. The table is the daemon's own."""
    client, tried = daemon.client, Counter[str]()
    for method in client.hello()["methods"]:
        tried["methods"] += 1
        for name in allowed_parameters(client, method):
            base = {key: VALID[key] for key in _needed(client, method) if key != name}
            if (method, name) in (("inject", "messages"), ("tokenize", "messages")):
                del base["text"]  # they take exactly one of the two
            with pytest.raises(errors.InvalidParams) as refused:
                client.call(method, {**base, name: b"bytes"})
            assert refused.value.data["parameter"] == name, (method, name)
            assert name in refused.value.message
            tried["mistyped"] += 1
    assert tried["methods"] >= 20
    assert tried["mistyped"] >= 50


def _needed(client: Client, method: str) -> list[str]:
    """Parameters without which a call is refused, found by leaving them out."""
    allowed = allowed_parameters(client, method)
    if method in WORK:
        assert allowed == []
        return []
    if method in ENDLESS:
        return []
    needed: list[str] = []
    if method == "inject":
        return ["agent", "text"]
    while True:
        # an agent or a file that is not there ends every call that would change something
        given = {key: "nobody-at-all" if key in ("agent", "new_agent") else VALID[key] for key in needed}
        try:
            client.call(method, given | ({"max_tokens": 0, "namespace": "fuzz"} if "max_tokens" in allowed else {}))
        except errors.InvalidParams as missing:
            name = missing.data["parameter"]
            said = missing.message
        except (errors.AgentNotFound, errors.InvalidRequest):
            return needed
        else:
            return needed
        assert f"needs {name}" in said
        assert name not in needed
        needed.append(name)


def test_odd_values_are_never_a_bug_of_the_daemon(daemon: Daemon) -> None:
    """Whatever a parameter holds: a result, or an error that names a parameter; never `internal`."""
    client, rng, tried = daemon.client, random.Random(22), 0
    for method in client.hello()["methods"]:
        if method in WORK:
            continue
        allowed = allowed_parameters(client, method)
        for name, value in itertools.product(allowed, (*ODD, *ODDER, *DEEPER)):
            given = {key: VALID[key] for key in allowed if key in VALID} | {"namespace": "fuzz", name: value}
            if "namespace" not in allowed:
                del given["namespace"]
            if method == "inject" and name != "messages" and rng.random() < 0.9:
                given.pop("messages")
            if name == "agents":
                del given["agent"]  # it takes exactly one of the two
            elif name != "agent" and "agent" in allowed:
                given["agent"] = "nobody-at-all"
            refused: dict[str, Any] | None = None
            fault = ""
            try:
                call(client, method, given)
            except errors.InvalidParams as error:
                refused = dict(error.data)
            except (errors.AgentNotFound, errors.AgentExists, errors.Unsupported, errors.ContextFull):
                pass
            except errors.InvalidRequest as error:  # there is no file where the path leads
                fault = str(error.data["fault"])
            assert fault in ("", "file_refused"), (method, name, value, fault)
            assert refused is None or refused["parameter"] in allowed, (method, name, value, refused)
            tried += 1
    assert tried >= 1500
    for info in client.agents("fuzz"):
        client.delete(info.agent, namespace="fuzz")


def test_made_up_methods(daemon: Daemon) -> None:
    """Names that are no method, private ones of the code included, are `method_not_found` with the known ones."""
    for name in (
        "",
        " ",
        "__init__",
        "_health",
        "call",
        "agent",
        "agent.",
        "agent.list.x",
        "HEALTH",
        "é" * 500,
        "\x00",
    ):
        with pytest.raises(errors.MethodNotFound):
            daemon.client.call(name)
