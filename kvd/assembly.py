"""Puts the engine together on its thread: model, formats, store, pager, agents.

With `kvd.daemon` this is the composition root. Everything here runs once, on the engine thread (MLX arrays belong to
the thread that makes them).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from kvd import launcher
from kvd.attention.interface import AttentionBackend
from kvd.attention.select import ATTENTION_CHOICES, pool_for, select_backend
from kvd.config import DEFAULT_QUOTA_BYTES, ConfigError, Settings
from kvd.errors import Draining, EnvironmentFault
from kvd.formats import FormatChoice, choose_formats
from kvd.ids import Namespace, PageId
from kvd.model import cpu_assist, dispatch
from kvd.model.forward import device_kind, gpu_info, limit_buffer_cache, stated_scratch_bytes
from kvd.model.loader import LoadedModel, load
from kvd.model.probes import probes_for
from kvd.model.registry import resolve
from kvd.model.spec import CacheGroup, ModelCacheSpec
from kvd.model.template import ChatTemplate
from kvd.ops.device import Clamped, budget_room, clamp_budget, clamp_footprint, clamp_quota, device_facts, device_limit
from kvd.ops.lasting_clock import lasting_s
from kvd.ops.sizes import format_size
from kvd.quant.spec import PAGE_TOKENS, PageFormat, PageLayout
from kvd.record import EngineRecord, read_record, write_record
from kvd.scheduler.batch_size import default_max_batch
from kvd.scheduler.core import NUMERICS, EngineCore
from kvd.scheduler.limits import LimitSettings
from kvd.scheduler.memory import Memory
from kvd.scheduler.pressure import Pressure
from kvd.scheduler.restore import restore_agents
from kvd.scheduler.store_door import StoreDoor
from kvd.scheduler.tracing import TraceWriter, open_trace
from kvd.store.folder_watch import FolderWatch
from kvd.store.layout import DataFolder
from kvd.store.ram_store import RamStore
from kvd.store.recovery import recover
from kvd.store.recovery_report import EMPTY_REPORT, RecoveryReport
from kvd.store.side_files import write_small_file
from kvd.store.swap_ops import CheckPagesOp, SwapResult
from kvd.store.swap_store import SwapStore
from kvd.store.swap_thread import Store, SwapThread
from kvd.vm.budget import FLIGHT_SHARE
from kvd.vm.eviction import POLICIES
from kvd.vm.pager import Pager

MISSING_PAGES_NAMED = 10
"""Missing pages that the log names; the others are counted."""

LOAD_BYTES = 64 << 20
"""Page loads in flight at once, in bytes: some tens of milliseconds of an SSD's time."""


class Assembly:
    """Builds the engine's core. Used once.

    Args:
        settings: validated settings.
        facts: filled with what `hello` and `model.info` tell.
        log: told of what an operator wants to know.
    """

    def __init__(self, settings: Settings, facts: dict[str, object], log: Callable[..., None]) -> None:
        self._settings = settings
        self._facts = facts
        self._log = log
        self._notices: list[str] = []
        self.folder: DataFolder | None = None
        self.loaded: LoadedModel | None = None

    def build(self, deliver: Callable[[SwapResult], None]) -> EngineCore:
        """Load the model, recover the agents, start the swap thread.

        Raises:
            KvdError: the model, the data folder or the device refused; the message says why.
        """
        assert self.folder is not None
        settings = self._settings
        trace = None if settings.trace is None else open_trace(settings.trace)
        limit_buffer_cache()
        loaded = load(resolve(settings.model, settings.model_dir))
        self.loaded = loaded
        dispatch.install(loaded.model)
        swap_off = settings.swap == "off"
        write = _write_nothing if swap_off else partial(write_small_file, self.folder.fs)
        formats = choose_formats(loaded, settings.kv_format, settings.data_dir / "conditioning", write)
        self._notices += formats.notices
        folder, fingerprint = self.folder, loaded.spec.fingerprint

        def layouts(group: int, format_id: str) -> PageLayout | None:
            return formats.book.layouts.get((group, format_id))

        for fact in folder.facts:
            self._log("data_folder", fact=fact)
        if swap_off:
            report = EMPTY_REPORT
            self._notices.append(
                "swap is off: nothing is durable, and agents in the data folder are neither served nor changed"
            )
        else:
            report = recover(folder, fingerprint, layouts, folder.fs)
            self._tell_recovery(report)
        backend = self._choose_backend(loaded, formats, report)
        assisted = cpu_assist.install(loaded.model) if backend.name == "cpu" else ()
        self._facts["cpu_assist"] = list(assisted)
        budget_bytes, quota_bytes, limits = self._clamp(loaded, report)
        pressure = self._pressure()
        disk: Store
        if swap_off:
            disk = RamStore(folder, folder.fs)
        else:
            disk = SwapStore(
                folder=folder,
                fingerprint=fingerprint,
                fs=folder.fs,
                quota_bytes=quota_bytes,
                layouts=layouts,
                recovered=report,
            )
        swap = SwapThread(store=disk, deliver=deliver)
        store = StoreDoor(swap, self._log)
        max_writes, max_loads = transfer_bounds(budget_bytes, formats)
        pager = Pager(
            budget_bytes,
            group_count=len(loaded.spec.groups),
            new_page_id=lambda: PageId(secrets.token_hex(16)),
            max_writes_in_flight=max_writes,
            max_loads_in_flight=max_loads,
            policy=POLICIES[settings.eviction](),
            windows=[group.layer.window for group in loaded.spec.groups],
            pin_limit=settings.pin_limit,
        )
        core_box: list[EngineCore] = []
        largest_frame_bytes = max(layout.payload_bytes for layout in formats.book.layouts.values())
        self._notices += holds_no_page(budget_bytes, largest_frame_bytes)

        def forget(page: PageId) -> None:
            core_box[0].forget_page(page)

        memory = Memory(
            pager=pager,
            pool=pool_for(backend, budget_bytes, largest_frame_bytes),
            swap=store,
            fingerprint=loaded.spec.fingerprint,
            numerics=NUMERICS,
            on_forget=forget,
            on_event=self._log,
        )
        store.connect(memory)
        core = EngineCore(
            loaded=loaded,
            pager=pager,
            memory=memory,
            store=store,
            formats=formats.book,
            backend=backend,
            chunk_tokens=settings.chunk_tokens,
            prefetch=settings.prefetch,
            sharing=settings.sharing,
            age_clock=lasting_s,
            log=self._log,
            limits=limits,
            pressure=pressure,
            write_limit_bytes=settings.write_limit_bytes,
            swap_off=swap_off,
        )
        core_box.append(core)
        if trace is not None:
            memory.trace = TraceWriter(
                trace,
                pager=pager,
                owner=lambda space: str(core.owner(space)[0]),
                windows=[group.layer.window for group in loaded.spec.groups],
                page_tokens=PAGE_TOKENS,
                clock=core.clock,
                log=self._log,
            )
        core.default_batch = _default_batch(core)
        self._notices += restore_agents(core, report)
        core.warm.scan(folder.fs, settings.warm_from, fingerprint=fingerprint, numerics=NUMERICS, log=self._log)
        swap.start()
        if not swap_off:
            core.watch = FolderWatch(folder.swap_folder(fingerprint), partial(_submit_checks, swap), self._log)
            core.watch.start()
        self._tell_facts(core, formats, budget_bytes, quota_bytes)
        return core

    # ---- parts ------------------------------------------------------------------------------------------------------

    def _choose_backend(self, loaded: LoadedModel, formats: FormatChoice, report: RecoveryReport) -> AttentionBackend:
        """The recorded backend if it can run, else the first right one; a flag overrides and is recorded."""
        assert self.folder is not None
        recorded = read_record(self._settings.data_dir)
        wanted = self._settings.attention
        if wanted == "auto" and recorded.attention in ATTENTION_CHOICES:
            wanted = str(recorded.attention)
        in_use = _formats_in_use(loaded.spec, formats, report)
        choice = select_backend(wanted, probes_for(loaded.spec, in_use, dtype=loaded.dtype))
        self._notices += choice.notices
        launch = launcher.report()
        threads = launch.threads if launch is not None else 1
        now = EngineRecord(choice.backend.name, threads, NUMERICS)
        for what, before, after in (
            ("BLAS threads", recorded.threads, now.threads),
            ("attention backend", recorded.attention, now.attention),
            ("numerics", recorded.numerics, now.numerics),
        ):
            if before not in (None, after):
                self._notices.append(
                    f"{what} changed from {before} to {after}: greedy continuations of older agents may differ from an "
                    "unbroken run"
                )
        if self._settings.swap == "on":
            write_record(self._settings.data_dir, self.folder.fs, now)
        self._facts |= {"attention": choice.backend.name, "threads": threads}
        if choice.timings_ms:
            self._facts["attention_timings_ms"] = dict(choice.timings_ms)
        self._facts["blas"] = launch.describe() if launch is not None else "not set up by the launcher"
        if launch is not None and launch.warning:
            self._notices.append(launch.warning)
        return choice.backend

    def _clamp(self, loaded: LoadedModel, report: RecoveryReport) -> tuple[int, int, LimitSettings]:
        facts = device_facts(self._settings.data_dir)
        reserved = loaded.weights_bytes + stated_scratch_bytes(loaded.spec)
        device = device_limit(gpu_info())
        budget = clamp_budget(self._settings.budget_bytes, facts, reserved_bytes=reserved, device=device)
        quota = clamp_quota(self._settings.quota_bytes, facts, used_bytes=report.used_bytes)
        if quota.reason is not None and self._settings.quota_bytes == DEFAULT_QUOTA_BYTES:
            self._log("quota", level="info", text=quota.reason)  # nobody asked for the default: no cause for a warning
            quota = Clamped(quota.granted_bytes, None)
        self._notices += [clamped.reason for clamped in (budget, quota) if clamped.reason is not None]
        if budget.granted_bytes < 1:
            raise EnvironmentFault(f"no memory is left for KV pages: {budget.reason}")
        room_bytes, reason = budget_room(facts, reserved_bytes=reserved, device=device)
        limits = LimitSettings(
            largest_budget_bytes=room_bytes,
            largest_reason=reason,
            branch_limit_bytes=self._settings.branch_limit_bytes,
            namespace_quotas={Namespace(name): quota_bytes for name, quota_bytes in self._settings.namespace_quotas},
            namespace_disk_quotas={Namespace(name): size for name, size in self._settings.namespace_disk_quotas},
        )
        return budget.granted_bytes, quota.granted_bytes, limits

    def _pressure(self) -> Pressure:
        """The limit of the process's memory, which has to leave room for pages beside what is loaded already."""
        limit = clamp_footprint(self._settings.footprint_limit_bytes, device_facts(self._settings.data_dir))
        if limit.reason is not None:
            self._notices.append(limit.reason)
        pressure = Pressure(limit.granted_bytes)
        pressure.look()
        if pressure.level == "none":
            return pressure
        taken = f"the daemon takes {format_size(pressure.footprint_bytes)} before it has any pages"
        if self._settings.footprint_limit_bytes is not None:
            raise ConfigError(
                f"footprint-limit {format_size(limit.granted_bytes)} is too little: {taken}", setting="footprint-limit"
            )
        self._notices.append(
            f"the machine is short of memory: {taken}, and {format_size(limit.granted_bytes)} is the limit"
        )
        return Pressure(limit.granted_bytes)

    def _tell_recovery(self, report: RecoveryReport) -> None:
        """Nothing is dropped silently: one line says what was found, one for each kind of thing that was wrong."""
        is_wrong = bool(report.missing_pages or report.log_troubles)
        self._log(
            "recovered",
            level="warning" if is_wrong else "info",
            agents=len(report.agents) + len(report.asleep),
            asleep=len(report.asleep),
            read_bytes=report.read_bytes,
            reads=report.reads,
            pages=len(report.pages),
            missing_pages=len(report.missing_pages),
            orphans=len(report.orphans),
            orphan_bytes=report.orphan_bytes,
            used_bytes=report.used_bytes,
            seconds=round(report.seconds, 3),
        )
        for trouble in report.log_troubles:
            self._log(
                "log_trouble", log=trouble.log, kind=trouble.kind, lost_bytes=trouble.lost_bytes, reason=trouble.reason
            )
        if report.missing_pages:
            some = dict(list(report.missing_pages.items())[:MISSING_PAGES_NAMED])
            self._log("pages_missing", pages=len(report.missing_pages), first=some)
        for fact in report.facts:
            # an empty data folder has no catalog yet
            is_new = not (report.agents or report.asleep or report.pages or is_wrong)
            self._log("catalog", level="info" if is_new else "warning", fact=fact)

    def _tell_facts(self, core: EngineCore, formats: FormatChoice, budget_bytes: int, quota_bytes: int) -> None:
        spec = core.spec
        page_bytes = sum(core.formats.layouts[g, f].payload_bytes for g, f in enumerate(core.formats.default_ids))
        token_bytes = sum(core.formats.layouts[g, f].token_bytes for g, f in enumerate(core.formats.default_ids))
        fp16_bytes = sum(group.fp16_token_bytes for group in spec.groups)
        self._facts |= {
            "model": spec.model_name,
            "fingerprint": spec.fingerprint,
            "context_tokens": spec.context_tokens,
            "kv_format": formats.name,
            "kv_format_ids": list(core.formats.default_ids),
            "kv_format_reason": formats.reason,
            "page_bytes": page_bytes,
            "token_bytes": token_bytes,
            "fp16_token_bytes": fp16_bytes,
            "fp16_ratio": round(token_bytes / fp16_bytes, 4),
            "scratch_bytes": stated_scratch_bytes(spec),
            "budget_bytes": budget_bytes,
            "quota_bytes": quota_bytes,
            "sharing": self._settings.sharing,
            "swap": self._settings.swap,
            "write_limit_bytes": self._settings.write_limit_bytes,
            "chunk_tokens": core.chunk_tokens,
            "max_batch": core.default_batch if self._settings.max_batch == "auto" else self._settings.max_batch,
            "data_dir": str(self._settings.data_dir),
            "chat": _chat_facts(core.loaded.template),
            "notices": list(self._notices),
            "groups": [
                {
                    "kind": g.layer.kind,
                    "layers": len(g.layer_indices),
                    "kv_heads": g.layer.kv_heads,
                    "k_dim": g.layer.k_dim,
                    "v_dim": g.layer.v_dim,
                    "window": g.layer.window,
                }
                for g in spec.groups
            ],
        }


def _chat_facts(template: ChatTemplate | None) -> dict[str, object] | None:
    """What `chat` can do with the model; None where it can do nothing."""
    if template is None:
        return None
    answers = template.answers
    return {
        "tools": "template" if template.supports_tools else "text",
        "tool_form": answers.tools.name if answers.tools is not None else None,
        "reasoning": list(answers.reasoning or ()),
        "switches": list(template.variables),
    }


def _default_batch(core: EngineCore) -> int:
    """What `--max-batch auto` means here. The pager states its reserves only once there is an agent."""
    book = core.formats
    page_bytes = [book.layouts[group, name].payload_bytes for group, name in enumerate(book.default_ids)]
    windows = [group.layer.window for group in core.spec.groups]
    return default_max_batch(
        usable_bytes=core.pager.usable_bytes * (FLIGHT_SHARE - 1) // FLIGHT_SHARE - sum(page_bytes),
        groups=list(zip(page_bytes, windows, strict=True)),
        context_tokens=core.spec.context_tokens,
        chunk_tokens=core.chunk_tokens,
        device=device_kind(),
    )


def _submit_checks(swap: SwapThread, page_ids: frozenset[str], folders: frozenset[str]) -> None:
    """Let the swap thread look at page files when it has nothing else to do."""
    with contextlib.suppress(Draining):
        swap.submit(CheckPagesOp(page_ids, folders))


def _write_nothing(path: Path, data: bytes) -> None:
    """Constants of formats stay in RAM while swap is off: no page in the data folder will need them."""


def holds_no_page(budget_bytes: int, page_bytes: int) -> list[str]:
    """What to say at the start of a budget that is too small for the model's largest page; nothing of a larger one."""
    if budget_bytes >= page_bytes:
        return []
    sizes = f"the budget of {format_size(budget_bytes)} holds no page of this model, which takes"
    return [f"{sizes} {format_size(page_bytes)}: every request will be refused; give more with --budget"]


def transfer_bounds(budget_bytes: int, formats: FormatChoice) -> tuple[int, int]:
    """Page writes and page loads in flight at once.

    Writes are copies, for which the pager keeps room free: two where a quarter of an eighth of the budget holds each.
    Loads take nothing but the frames that were asked for. They are taken up between steps, so that a whole turn's pages
    should come within one; a bound in bytes keeps a demand from waiting long for what was read ahead of it.
    """
    largest = max(layout.payload_bytes for layout in formats.book.layouts.values())
    copies = budget_bytes // 8 // largest
    return max(1, min(2, copies // 2)), max(4, min(32, LOAD_BYTES // largest))


def _formats_in_use(
    spec: ModelCacheSpec, formats: FormatChoice, report: RecoveryReport
) -> Iterator[tuple[CacheGroup, PageFormat]]:
    """The formats of new agents and of all that were found on disk: each must be right on this device."""
    found = {
        (segment.group, segment.format_id)
        for image in report.agents.values()
        for branch in image.branches.values()
        for segment in branch.segments
    }
    found |= {each for agent in report.asleep.values() for each in agent.summary.all_formats}
    for number, format_id in sorted({*enumerate(formats.book.default_ids), *found} & set(formats.book.layouts)):
        yield spec.groups[number], formats.book.layouts[number, format_id].page_format
