"""Every RPC method, between the event loop (where calls arrive) and the engine thread (where work is done).

Methods are checked and rendered here, on the loop; anything that touches agents runs on the engine: long work as a
queued request, look-ups as a short call between two steps. Health never waits for the engine.

Long because every method has its lines here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypeVar, cast

from kvd import __version__
from kvd.errors import AgentNotFound, CallerError, Cancelled, InvalidParams, KvdError
from kvd.ids import Namespace
from kvd.model.answers import AnswerFormat
from kvd.model.continuation import Continuation, continuation
from kvd.model.grammar import GrammarCompiler
from kvd.model.grammar_text import answer_grammar
from kvd.model.recall import HeldText, needs_tokens
from kvd.model.template import ChatTemplate
from kvd.model.tokenizer import TextCodec
from kvd.scheduler import views
from kvd.scheduler.answering import emitter, post
from kvd.scheduler.chat import AnswerStream, ChatCall, Prepared, held_texts
from kvd.scheduler.core import EngineCore
from kvd.scheduler.engine import Engine
from kvd.scheduler.errors import MethodNotFound, NotReady, Unsupported, with_close_names
from kvd.scheduler.file_steps import port_path
from kvd.scheduler.injected import injected, injected_into
from kvd.scheduler.limits import limit_change
from kvd.scheduler.params import CHAT_NAMES, MAX_NEW_TOKENS, TURN_NAMES, Params
from kvd.scheduler.requests import AgentRef, JobRequest, TurnRequest
from kvd.scheduler.subscribing import Subscriptions
from kvd.scheduler.tokenizing import Tokenizing
from kvd.store.agent_file import read_header
from kvd.store.errors import FileFault
from kvd.store.fs import RealFileSystem
from kvd.vm.text import Span, TypedText

if TYPE_CHECKING:
    from kvd.front.api import CallContext

T = TypeVar("T")

PROTOCOL_VERSION = 1
DRAIN_POLL_S = 0.02
"""How often a call that drains looks whether the engine has."""


class KvdService:
    """Owner: the event loop. One instance a daemon.

    Args:
        engine: does the work.
        facts: what `hello` and `model.info` tell (model, backend, threads, formats); filled when the engine is ready.
        request_shutdown: starts the daemon's shutdown (drains first).
        is_stalled: whether the engine hangs.
        gateway_fault: why the gateway that the daemon keeps does not run; None when it does, or none is wanted.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        facts: dict[str, object],
        request_shutdown: Callable[[], None],
        is_stalled: Callable[[], bool] = lambda: False,
        gateway_fault: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._request_shutdown = request_shutdown
        self._is_stalled = is_stalled
        self._gateway_fault = gateway_fault
        self._ready: asyncio.Event = asyncio.Event()
        self._started_s = time.monotonic()
        self._pid = os.getpid()
        self._draining = False
        self._subscriptions = Subscriptions()
        self._rendering = asyncio.Lock()
        self._codec: TextCodec | None = None
        self._compiler: GrammarCompiler | None = None
        self._template: ChatTemplate | None = None
        job = self._job
        self._at_once: dict[str, Callable[[Mapping[str, object]], object]] = {"health": self._health}
        self._methods: dict[str, Callable[[Params, CallContext], Awaitable[object]]] = {
            "hello": self._hello,
            "generate": self._generate,
            "chat": self._chat,
            "inject": self._inject,
            "tokenize": Tokenizing(self._text_parts, self._in_template).call,
            "agent.list": self._agent_list,
            "agent.info": self._agent_info,
            "agent.fork": job("fork", "new_agent", "tokens", "ttl_s"),
            "agent.rollback": job("rollback", "tokens"),
            "agent.pin": job("pin"),
            "agent.unpin": job("unpin"),
            "agent.verify": job("verify"),
            "agent.prefetch": job("prefetch"),
            "agent.evict": job("evict"),
            "agent.delete": job("delete"),
            "agent.export": self._export,
            "agent.import": self._import,
            "residency": self._residency,
            "statistics": self._statistics,
            "monitor": self._monitor,
            "events.subscribe": self._subscribe,
            "model.info": self._model_info,
            "configure": self._configure,
            "drain": self._drain,
            "shutdown": self._shutdown,
        }

    @property
    def methods(self) -> tuple[str, ...]:
        """All method names, sorted."""
        return tuple(sorted({*self._methods, *self._at_once}))

    def set_ready(self, codec: TextCodec, template: ChatTemplate | None, *, vocab_tokens: int | None = None) -> None:
        """The engine can work: let waiting calls through (on the loop).

        Args:
            codec: the model's.
            template: its chat template; None where it has none.
            vocab_tokens: width of its logits; None for that of the codec.
        """
        self._codec = codec
        self._compiler = GrammarCompiler(codec, codec.token_count if vocab_tokens is None else vocab_tokens)
        self._template = template
        self._ready.set()

    def set_draining(self) -> None:
        """Health says so from here on."""
        self._draining = True

    def at_once(self, method: str) -> Callable[[Mapping[str, object]], object] | None:
        """What answers the method without waiting (see `kvd.front.api.Service`)."""
        return self._at_once.get(method)

    async def call(self, method: str, params: Mapping[str, object], context: CallContext) -> object:
        """Carry out one method (see `kvd.front.api.Service`)."""
        handler = self._methods.get(method)
        if handler is None:
            raise MethodNotFound(f"no method {method!r}; there are {', '.join(self.methods)}", method=method)
        try:
            return await handler(Params(method, params), context)
        except AgentNotFound as error:
            raise await self._with_close_names(error) from None

    async def _with_close_names(self, error: AgentNotFound) -> KvdError:
        """The error, with the names that its agent's name may have been meant for."""
        asked, namespace = str(error.data.get("agent", "")), error.data.get("namespace")
        try:
            names = await self._call(lambda core: core.agents.names(Namespace(str(namespace))))
        except KvdError:
            return error
        assert isinstance(names, list)
        return await asyncio.to_thread(with_close_names, error, asked, names)  # too long for the loop

    # ---- turns ------------------------------------------------------------------------------------------------------

    async def _generate(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown("text", *TURN_NAMES)
        data = params.text("text").encode()
        prompt = TypedText(data, (Span("content", len(data)),) if data else ())
        schema = params.response_schema()
        if schema is None:
            return await self._turn(params, context, Prepared(prompt))
        codec, _ = await self._text_parts()
        grammar = answer_grammar(AnswerFormat(), codec, schema=schema)
        assert grammar is not None
        mask = await self._in_worker(context, lambda: self._grammars().compile(grammar))
        return await self._turn(params, context, Prepared(prompt, (mask,)))

    async def _chat(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown(*CHAT_NAMES, *TURN_NAMES)
        call, ref = ChatCall.of(params), params.ref()
        codec, template = await self._text_parts()
        held: list[HeldText] | None = []
        if call.has_history and template is not None:
            with_tokens = needs_tokens(await asyncio.to_thread(lambda: template.answers), codec)
            held = await self._call(lambda core: held_texts(core, ref, with_tokens=with_tokens))
            if held is None:
                with contextlib.suppress(KvdError):  # a file that is no use is the turn's to tell
                    await self._submit(
                        JobRequest(self._engine.new_request_id(), ref, "prefetch", internal=True), context
                    )
                held = await self._call(lambda core: held_texts(core, ref, with_tokens=with_tokens))
        prepared = await self._in_template(
            context, lambda template: call.prepare(template, codec, self._grammars(), held or [])
        )
        return await self._turn(params, context, prepared, method="chat")

    async def _inject(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown("agent", "agents", "namespace", "text", "messages", "priority")
        if params.has("agent") and params.has("agents"):
            raise InvalidParams("inject takes either agent or agents, not both", parameter="agents")
        refs = params.refs() if params.has("agents") else (params.ref(),)
        if params.has("text") == params.has("messages"):
            raise InvalidParams("inject needs either text or messages", parameter="text")
        priority = params.priority("background")  # others wait for their answers, nobody for this one's
        continues: Continuation | None = None
        prompt = TypedText(b"", ())
        if params.has("messages"):
            messages = params.messages()
            continues = await self._in_template(context, lambda template: continuation(template, messages))
        elif data := params.text("text").encode():
            prompt = TypedText(data, (Span("content", len(data)),))
        else:
            raise InvalidParams("the text is empty; send at least one character", parameter="text")
        await self._wait_ready()
        requests = [
            TurnRequest(
                request_id=self._engine.new_request_id(),
                ref=ref,
                prompt=prompt,
                append=True,
                continues=continues,
                max_tokens=0,
                emit=emitter(context.emit, agent=ref.agent if params.has("agents") else None),
                priority=priority,
                connection=context.peer.connection,
                peer_pid=context.peer.pid,
            )
            for ref in refs
        ]
        if not params.has("agents"):
            return injected(await self._submit(requests[0], context))
        parts = await asyncio.gather(*(self._submit(each, context) for each in requests), return_exceptions=True)
        return injected_into(refs, parts, context)

    async def _turn(
        self,
        params: Params,
        context: CallContext,
        prepared: Prepared,
        *,
        method: Literal["generate", "chat"] = "generate",
    ) -> object:
        await self._wait_ready()
        stream = None if prepared.reader is None else AnswerStream(prepared.reader, context.emit)
        is_streamed = params.flag("stream", default=True)
        # an answer is read whole, whether or not the client wants its events (the session drops those it does not want)
        emit = emitter(stream or context.emit, all_events=is_streamed or stream is not None)
        max_tokens = params.integer("max_tokens", default=256, low=0, high=MAX_NEW_TOKENS)
        request = TurnRequest(
            request_id=self._engine.new_request_id(),
            ref=params.ref(),
            prompt=prepared.prompt,
            method=method,
            max_tokens=max_tokens,
            sampling=params.sampling(),
            logprobs=params.logprobs(max_tokens),
            hooks=prepared.hooks,
            resumable=params.flag("resumable", default=False),
            resume=params.resume(max_tokens),
            tells_control=prepared.tells_control,
            stop=params.stop(),
            emit=emit,
            on_context_full=params.on_context_full(),
            priority=params.priority(),
            timeout_s=params.timeout_s(),
            ttl_s=params.ttl_s(),
            connection=context.peer.connection,
            peer_pid=context.peer.pid,
        )
        result = await self._submit(request, context)
        if isinstance(result, dict) and result["finish_reason"] == "injected":
            result["finish_reason"] = "length"  # `max_tokens` 0: computed as far as was asked for
        return stream.complete(result) if stream is not None and isinstance(result, dict) else result

    async def _submit(self, request: TurnRequest | JobRequest, context: CallContext) -> object:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[object] = loop.create_future()

        def settle(result: object, error: KvdError | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._engine.submit(request, lambda result, error: post(loop, settle, result, error))
        context.on_cancel(lambda: self._engine.cancel(request.request_id))
        return await future

    def _job(self, operation: str, *arguments: str) -> Callable[[Params, CallContext], Awaitable[object]]:
        async def run(params: Params, context: CallContext) -> object:
            params.refuse_unknown("agent", "namespace", *arguments)
            values: dict[str, object] = {}
            if "new_agent" in arguments:
                values["new_agent"] = params.name("new_agent")
            if "tokens" in arguments:
                wanted = params.optional_integer("tokens")
                if wanted is None and operation == "rollback":
                    raise InvalidParams("agent.rollback needs tokens (how many to keep)", parameter="tokens")
                values["tokens"] = wanted
            if "ttl_s" in arguments:
                values["ttl_s"] = params.ttl_s()
            return await self._run_job(params.ref(), operation, values, context)

        return run

    async def _run_job(
        self, ref: AgentRef, operation: str, arguments: Mapping[str, object], context: CallContext
    ) -> object:
        await self._wait_ready()
        request = JobRequest(
            self._engine.new_request_id(),
            ref,
            operation,
            arguments,
            connection=context.peer.connection,
            peer_pid=context.peer.pid,
        )
        return await self._submit(request, context)

    async def _export(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown("agent", "namespace", "path", "force")
        arguments = {"path": str(port_path(params.text("path"))), "force": params.flag("force", default=False)}
        return await self._run_job(params.ref(), "export", arguments, context)

    async def _import(self, params: Params, context: CallContext) -> object:
        """The names that the caller does not give are the file's; both are checked like any caller's."""
        params.refuse_unknown("path", "agent", "namespace", "replace")
        path = port_path(params.text("path"))
        arguments = {"path": str(path), "replace": params.flag("replace", default=False)}
        given: dict[str, object] = {name: params.name(name) for name in ("agent", "namespace") if params.has(name)}
        try:
            header, _ = await asyncio.to_thread(read_header, RealFileSystem(), path)
        except OSError as error:
            raise FileFault(str(path), error) from error
        names = Params("agent.import", {"agent": header.agent, "namespace": header.namespace} | given)
        return await self._run_job(names.ref(), "import", arguments, context)

    # ---- look-ups ---------------------------------------------------------------------------------------------------

    async def _call(self, function: Callable[[EngineCore], T]) -> T:
        await self._wait_ready()
        return cast("T", await asyncio.wrap_future(self._engine.call(function)))

    async def _agent_list(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown("namespace")
        namespace = params.namespace() if params.has("namespace") else None
        return await self._call(lambda core: {"agents": views.agent_list(core, namespace)})

    async def _agent_info(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown("agent", "namespace")
        ref: AgentRef = params.ref()
        return await self._call(lambda core: views.info_of(core, ref))

    async def _residency(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown("agent", "namespace")
        ref = params.ref() if params.has("agent") else None
        namespace = params.namespace() if params.has("namespace") else None
        if ref is not None and await self._call(lambda core: ref in core.agents.asleep):
            await self._run_job(ref, "wake", {}, context)  # its page map is in its log
        return await self._call(lambda core: views.residency(core, ref, namespace))

    async def _statistics(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown()
        return await self._call(views.statistics)

    async def _monitor(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown("namespace", "since")
        namespace = params.namespace() if params.has("namespace") else None
        since = params.optional_integer("since")
        look = await self._call(lambda core: core.monitor.look(core, namespace, since))
        told = look.to_wire()
        more = {**self._engine.queue_facts, "subscribers": self._subscriptions.count}
        return {**told, "figures": {**look.figures, **more}}

    async def _subscribe(self, params: Params, context: CallContext) -> object:
        return await self._subscriptions.serve(self._engine.ring, params, context)

    def end_subscriptions(self) -> None:
        """Nothing more will happen: they tell what is left and end."""
        self._subscriptions.close()

    async def _hello(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown("client", "protocol")
        params.text("client", required=False)
        wanted = params.optional_integer("protocol")
        if wanted is not None and wanted != PROTOCOL_VERSION:
            raise Unsupported(
                f"protocol {wanted} is not spoken here, only {PROTOCOL_VERSION}", protocol=PROTOCOL_VERSION
            )
        base = {"server": "kvd", "version": __version__, "protocol": PROTOCOL_VERSION, "pid": self._pid}
        return base | self._facts | {"status": self._status, "methods": list(self.methods)}

    async def _model_info(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown()
        await self._wait_ready()
        return dict(self._facts)

    async def _configure(self, params: Params, context: CallContext) -> object:
        change = limit_change(params)
        await self._wait_ready()
        facts = await asyncio.wrap_future(self._engine.configure(change))
        assert isinstance(facts, dict)
        self._facts["budget_bytes"] = facts["budget_bytes"]
        return facts

    # ---- life -------------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        if self._draining:
            return "draining"
        if not self._ready.is_set():
            return "loading"
        return "stalled" if self._is_stalled() else "ready"

    def _health(self, params: Mapping[str, object]) -> object:
        if params:
            Params("health", params).refuse_unknown()
        return {
            "ready": self._status == "ready",
            "status": self._status,
            "pid": self._pid,
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "engine_idle_s": round(time.monotonic() - self._engine.last_progress_s, 3),
            "gateway_fault": self._gateway_fault(),
            **self._engine.queue_facts,
        }

    async def _drain(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown()
        self._draining = True
        self._engine.drain()
        while not self._engine.drained.is_set():  # no thread is parked for a caller who may have gone
            await asyncio.sleep(DRAIN_POLL_S)
        return {"drained": True}

    async def _shutdown(self, params: Params, context: CallContext) -> object:
        params.refuse_unknown()
        self._draining = True
        self._request_shutdown()
        return {"stopping": True}

    async def _wait_ready(self) -> None:
        try:
            await asyncio.wait_for(self._ready.wait(), timeout=60.0)
        except TimeoutError:
            raise NotReady("the model is still loading", retry_after_s=5.0) from None

    async def _in_template(self, context: CallContext, render: Callable[[ChatTemplate], T]) -> T:
        """What the model's template makes of messages.

        In a thread of its own: the template is a program of the model's, and the loop serves others meanwhile.
        """
        _, template = await self._text_parts()
        if template is None:
            raise Unsupported("the model has no chat template; use generate with the agent's whole text")
        try:
            return await self._in_worker(context, lambda: render(template))
        except CallerError as error:
            error.data.setdefault("parameter", "messages")
            raise

    async def _in_worker(self, context: CallContext, work: Callable[[], T]) -> T:
        """Work of seconds that is somebody else's program or schema: one at a time, so it holds one thread, not all."""
        async with self._rendering:
            if context.cancelled:
                raise Cancelled("cancelled while it waited for others' messages")
            return await asyncio.to_thread(work)

    def _grammars(self) -> GrammarCompiler:
        assert self._compiler is not None
        return self._compiler

    async def _text_parts(self) -> tuple[TextCodec, ChatTemplate | None]:
        await self._wait_ready()
        assert self._codec is not None
        return self._codec, self._template
