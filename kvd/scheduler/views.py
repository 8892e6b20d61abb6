"""What clients may see of engine, agents and memory: plain msgpack-able facts, units in the names.

Functions here run on the engine thread between two steps and change nothing.
"""

from __future__ import annotations

from kvd.ids import Namespace
from kvd.model.forward import array_memory, stated_scratch_bytes
from kvd.ops.footprint import measure_footprint
from kvd.ops.open_things import count_open_files, count_threads
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import Agent
from kvd.scheduler.branches import other_branch_bytes
from kvd.scheduler.core import EngineCore
from kvd.scheduler.disk_quotas import use_by_namespace
from kvd.scheduler.endings import end_facts
from kvd.scheduler.requests import AgentRef
from kvd.store.sleeping import SleepingAgent
from kvd.vm.codes import PINNED
from kvd.vm.page import READABLE
from kvd.vm.window import first_seen_page


def agent_info(core: EngineCore, agent: Agent) -> dict[str, object]:
    """One agent."""
    branch = agent.branch
    now = core.pager.residency(branch.space)
    return {
        "agent": agent.ref.agent,
        "namespace": agent.ref.namespace,
        "tokens": len(branch.tokens),
        "computed_tokens": branch.computed,
        "text_bytes": len(branch.text),
        "branches": len(agent.branches),
        "other_branch_bytes": other_branch_bytes(core, agent),
        "branch_limit_bytes": core.limits.branch_limit_bytes,
        "pages": now.total_pages,
        "behind_window_pages": now.behind_window_pages,
        "resident_pages": now.resident_pages,
        "swapped_pages": now.stored_pages,
        "lost_pages": now.lost_pages,
        "shared_pages": now.shared_pages,
        "resident_bytes": now.resident_bytes,
        "needed_bytes": now.needed_bytes,
        "total_bytes": now.total_bytes,
        "pinned": agent.pinned,
        "pinned_bytes": sum(core.pager.pinned_pages(branch.space).values()),
        "durable": agent.unsaved is None,
        "durable_reason": agent.unsaved,
        "kv_format": ", ".join(dict.fromkeys(branch.format_ids)),
        "created_s": agent.created_s,
        **end_facts(core, agent),
    }


def agent_list(core: EngineCore, namespace: Namespace | None) -> list[dict[str, object]]:
    """All agents of a namespace (None: of all), by name; of those that sleep what the catalog says."""
    awake = {agent.ref: agent_info(core, agent) for agent in core.agents.in_namespace(namespace)}
    asleep = {
        ref: sleeping_info(core, ref, agent)
        for ref, agent in core.agents.asleep.items()
        if namespace is None or ref.namespace == namespace
    }
    every = awake | asleep
    return [every[ref] for ref in sorted(every, key=lambda ref: (ref.namespace, ref.agent))]


def info_of(core: EngineCore, ref: AgentRef) -> dict[str, object]:
    """One agent, whether it sleeps or not.

    Raises:
        AgentNotFound, LogUnreadable: as `AgentRegistry.get`.
    """
    sleeping = core.agents.asleep.get(ref)
    return agent_info(core, core.agents.get(ref)) if sleeping is None else sleeping_info(core, ref, sleeping)


def sleeping_info(core: EngineCore, ref: AgentRef, agent: SleepingAgent) -> dict[str, object]:
    """An agent whose log has not been read since the start, as `agent_info` would show it then: all of it on disk."""
    summary = agent.summary
    format_ids = summary.format_ids or core.formats.default_ids
    pages = -(-summary.computed_tokens // PAGE_TOKENS)
    total_bytes = needed_bytes = needed_pages = 0
    for group, format_id in enumerate(format_ids):
        layout = core.formats.layouts.get((group, format_id))
        page_bytes = 0 if layout is None else layout.payload_bytes
        seen = pages - first_seen_page(summary.computed_tokens, core.spec.groups[group].layer.window, PAGE_TOKENS)
        needed_pages += seen
        needed_bytes += seen * page_bytes
        total_bytes += pages * page_bytes
    other_pages = max(0, len(agent.page_ids) - len(format_ids) * (summary.computed_tokens // PAGE_TOKENS))
    return {
        "agent": ref.agent,
        "namespace": ref.namespace,
        "tokens": agent.row.tokens,
        "computed_tokens": summary.computed_tokens,
        "text_bytes": summary.text_bytes,
        "branches": agent.row.branches,
        "other_branch_bytes": other_pages * total_bytes // max(1, pages * len(format_ids)),
        "branch_limit_bytes": core.limits.branch_limit_bytes,
        "pages": pages * len(format_ids),
        "behind_window_pages": pages * len(format_ids) - needed_pages,
        "resident_pages": 0,
        "swapped_pages": needed_pages,
        "lost_pages": 0,
        "shared_pages": 0,
        "resident_bytes": 0,
        "needed_bytes": needed_bytes,
        "total_bytes": total_bytes,
        "pinned": summary.pinned,
        "pinned_bytes": 0,
        "durable": True,
        "durable_reason": None,
        "kv_format": ", ".join(dict.fromkeys(format_ids)),
        "created_s": summary.created_s,
        **end_facts(core, summary),
    }


def residency(core: EngineCore, ref: AgentRef | None, namespace: Namespace | None = None) -> dict[str, object]:
    """Page maps of one agent, of a namespace or of all that are awake: per segment one entry a page with its state."""
    agents = [core.agents.get(ref)] if ref is not None else core.agents.in_namespace(namespace)
    return {
        "page_tokens": PAGE_TOKENS,
        "budget_bytes": core.pager.statistics().budget_bytes,
        "resident_bytes": core.pager.statistics().resident_bytes,
        "agents": [_page_map(core, agent) for agent in agents],
        "asleep": sum(namespace is None or each.namespace == namespace for each in core.agents.asleep)
        if not ref
        else 0,
    }


def _page_map(core: EngineCore, agent: Agent) -> dict[str, object]:
    branches: list[dict[str, object]] = []
    for branch in agent.branches.values():
        segments: list[dict[str, object]] = []
        for segment, codes in zip(core.pager.segments(branch.space), core.pager.page_codes(branch.space), strict=True):
            pages = [
                {
                    "page": page.ref.page_id,
                    "state": page.state.value,
                    "resident": page.state in READABLE,
                    "shared_by": page.shared_spaces,
                    "behind_window": page.behind_window,
                    "pinned": bool(code & PINNED),
                }
                for page, code in zip(segment.pages, codes, strict=False)  # the tail's code is the last
            ]
            tail = segment.tail
            segments.append(
                {
                    "group": int(segment.group),
                    "window_tokens": core.spec.groups[segment.group].layer.window,
                    "pages": pages,
                    "tail": None
                    if tail is None
                    else {
                        "tokens": tail.tokens,
                        "state": tail.state.value,
                        "ram_bytes": tail.ram_bytes,
                        "pinned": bool(codes[-1] & PINNED),
                    },
                }
            )
        branches.append(
            {
                "branch": branch.branch_id,
                "current": branch.branch_id == agent.current,
                "tokens": len(branch.tokens),
                "segments": segments,
            }
        )
    return {
        "agent": agent.ref.agent,
        "namespace": agent.ref.namespace,
        "pinned": agent.pinned,
        "branches": branches,
    }


def health_facts(core: EngineCore) -> dict[str, object]:
    """Whether the pool thrashes, memory is short, the disk is well; from any thread, since it reads single values."""
    return {
        "thrashing": core.thrashing.is_thrashing,
        "refault_rate": round(core.thrashing.refault_rate, 4),
        "memory_pressure": core.pressure.level,
        **disk_facts(core),
    }


def disk_facts(core: EngineCore) -> dict[str, object]:
    """Whether KV goes to disk and how the disk fares; may be asked from any thread, as `health_facts`."""
    now = core.disk_quotas
    quotas = {"disk_quotas_full": list(now.full), "disk_quotas_too_small": list(now.too_small)}
    return {"swap": "off" if core.swap_off else "on"} | core.store.health.facts() | quotas


def statistics(core: EngineCore) -> dict[str, object]:
    """Figures of the whole daemon. Byte figures are bytes now, counters are since start."""
    pager = core.pager.statistics()
    store = core.store.statistics()
    pool = core.memory.pool.statistics()
    hands = core.memory.statistics
    ahead = pager.prefetched
    predictor = core.paging.predictor
    arrays = array_memory()
    return {
        "budget_bytes": pager.budget_bytes,
        "usable_bytes": pager.usable_bytes,
        "high_mark_bytes": pager.high_mark_bytes,
        "low_mark_bytes": pager.low_mark_bytes,
        "resident_bytes": pager.resident_bytes,
        "packed_bytes": pager.packed_bytes,
        "peak_resident_bytes": pager.peak_resident_bytes,
        "peak_budget_bytes": pager.peak_total_bytes,
        "in_flight_bytes": pager.in_flight_bytes,
        "dirty_bytes": pager.dirty_bytes,
        "pinned_bytes": pager.pinned_bytes,
        "pin_limit_bytes": pager.pin_limit_bytes,
        "unpinned_bytes": pager.unpinned_bytes,
        "namespaces": use_by_namespace(core.pager, core.disk_quotas, store.namespace_bytes),
        "frame_bytes": pool.slab_bytes,
        "kept_frame_bytes": pool.kept_bytes,
        "read_buffer_bytes": store.read_buffer_bytes,
        "frames": pool.frames,
        "pages": dict(pager.pages),
        "shared_pages": pager.shared_pages,
        "behind_window_pages": pager.behind_window_pages,
        "behind_window_bytes": pager.behind_window_bytes,
        "eviction": pager.eviction,
        "evictions": pager.evictions,
        "reclaimed": pager.reclaimed,
        "window_drops": pager.window_drops,
        "tails_packed": pager.packs,
        "tails_unpacked": pager.unpacks,
        "faults": pager.faults,
        "demanded_pages": pager.demanded,
        "refaults": pager.refaults,
        "refault_rate": round(core.thrashing.refault_rate, 4),
        "thrashing": core.thrashing.is_thrashing,
        "thrashing_episodes": core.thrashing.episodes,
        "admission_limit": core.thrashing.limit,
        "prefetched_pages": {reason: figures.pages for reason, figures in ahead.items()},
        "prefetched_bytes": {reason: figures.page_bytes for reason, figures in ahead.items()},
        "prefetch_used_pages": {reason: figures.used_pages for reason, figures in ahead.items()},
        "prefetch_used_bytes": {reason: figures.used_bytes for reason, figures in ahead.items()},
        "prefetch_wasted_pages": {reason: figures.wasted_pages for reason, figures in ahead.items()},
        "prefetch_wasted_bytes": {reason: figures.wasted_bytes for reason, figures in ahead.items()},
        "prefetch_unknown_pages": {reason: figures.unknown_pages for reason, figures in ahead.items()},
        "prediction_hits": predictor.hits,
        "prediction_misses": predictor.misses,
        "swap_in_busy_s": round(store.reading_s, 3),
        "swap_in_waited_s": round(core.stats.swap_in_waited_s, 3),
        "swap_in_exposed_s": round(core.stats.swap_in_exposed_s, 3),
        "pages_loaded": hands.pages_loaded,
        "tails_loaded": hands.tails_loaded,
        "load_failures": hands.load_failures,
        "pages_given_up": core.stats.pages_given_up,
        "pages_dropped": hands.pages_dropped,
        "swap_watched": core.watch is not None and core.watch.is_watching,
        "page_files_lost": hands.page_files_lost,
        "page_files_rewritten": hands.page_files_rewritten,
        "write_failures": hands.write_failures,
        "swap_bytes": store.swap_bytes,
        "log_bytes": store.log_bytes,
        "disk_used_bytes": store.used_bytes,
        "quota_bytes": store.quota_bytes,
        "bytes_written": store.bytes_written,
        "bytes_written_last_minute": core.governor.last_minute_bytes,
        "write_limit_bytes": core.governor.limit_bytes,
        "write_delayed_bytes": core.pager.held_write_bytes,
        "bytes_read": store.bytes_read,
        "fsyncs": store.fsyncs,
        "fsync_s": round(store.fsync_s, 6),
        "written_bytes_per_token": round(store.bytes_written / max(1, core.stats.tokens_computed), 1),
        "tokens_computed": core.stats.tokens_computed,
        "tokens_reused": core.stats.tokens_reused,
        "tokens_shared": core.stats.tokens_shared,
        "tokens_replayed": core.stats.tokens_replayed,
        "decode_steps": core.stats.decode_steps,
        "decode_rows": core.stats.decode_rows,
        "largest_batch": core.stats.largest_batch,
        "mean_batch": round(core.stats.decode_rows / max(1, core.stats.decode_steps), 2),
        "prefill_chunks": core.stats.prefill_chunks,
        "decode_s": round(core.stats.decode_s, 3),
        "prefill_s": round(core.stats.prefill_s, 3),
        "engine_busy_s": round(core.stats.busy_s, 4),
        "forward_s": round(core.stats.forward_s, 4),
        "sampling_s": round(core.stats.sampling_s, 4),
        "reserved_bytes": core.reservations.reserved_bytes,
        "max_batch": core.stats.max_batch,
        "preemptions": core.stats.preemptions,
        "requests": core.stats.requests,
        "turns_not_durable": core.stats.turns_not_durable,
        "agents_expired": core.stats.agents_expired,
        "records_written": core.stats.records_written,
        **disk_facts(core),
        "disk_refusals": core.store.health.episodes,
        "agents": len(core.agents),
        "agents_asleep": len(core.agents.asleep),
        "footprint_bytes": measure_footprint().footprint_bytes,
        "footprint_limit_bytes": core.pressure.hard_bytes,
        "memory_pressure": core.pressure.level,
        "memory_refusals": core.pressure.refusals,
        "mlx_active_bytes": arrays.active_bytes,
        "mlx_cache_bytes": arrays.cache_bytes,
        "mlx_peak_bytes": arrays.peak_bytes,
        "open_files": count_open_files(),
        "threads": count_threads(),
        "scratch_bytes": stated_scratch_bytes(core.spec),
        "fp16_token_bytes": sum(group.fp16_token_bytes for group in core.spec.groups),
        "token_bytes": sum(
            core.formats.layouts[group, format_id].token_bytes
            for group, format_id in enumerate(core.formats.default_ids)
        ),
    }
