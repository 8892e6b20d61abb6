"""Running kvd as a service: logs, sizes, the machine's limits, life under a service manager.

`logs` sets up structlog and knows the one line of a request, `log_stream` keeps a log nobody reads from holding us up,
`levels` names the levels; `sizes` parses and formats sizes; `footprint` measures a process's memory, `open_things`
counts its descriptors and threads; `device` asks the machine for memory and disk and clamps budget and quota;
`lifecycle` speaks to systemd and launchd and turns signals into a drain; `loops` chooses the event loop; `stall`
notices an engine that hangs; `file_watch` says when a file was changed; `lasting_clock` goes on while the machine
sleeps; `children` keeps a child process running; `service` installs kvd with either manager, `service_files` are the
files for it; `errors` holds the faults. May import structlog, watchdog (`file_watch`), uvloop (`loops`) and kvd.errors;
no mlx, no numpy, nothing else of kvd.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvd.ops.children import ChildLog, KeptChild
    from kvd.ops.device import (
        Clamped,
        DeviceFacts,
        DeviceLimit,
        budget_room,
        clamp_budget,
        clamp_footprint,
        clamp_quota,
        device_facts,
        device_limit,
    )
    from kvd.ops.errors import InheritedSocketUnusable, InvalidSize
    from kvd.ops.footprint import Footprint, measure_footprint, process_footprint_bytes
    from kvd.ops.levels import LEVELS
    from kvd.ops.lifecycle import Notifier, StopAction, StopPlan, handle_stop_signals, inherited_sockets
    from kvd.ops.logs import LogSetup, RequestLine, get_logger, request_line, setup_logging
    from kvd.ops.open_things import count_open_files, count_threads
    from kvd.ops.sizes import format_size, parse_share, parse_size

__all__ = [
    "LEVELS",
    "ChildLog",
    "Clamped",
    "DeviceFacts",
    "DeviceLimit",
    "Footprint",
    "InheritedSocketUnusable",
    "InvalidSize",
    "KeptChild",
    "LogSetup",
    "Notifier",
    "RequestLine",
    "StopAction",
    "StopPlan",
    "budget_room",
    "clamp_budget",
    "clamp_footprint",
    "clamp_quota",
    "count_open_files",
    "count_threads",
    "device_facts",
    "device_limit",
    "format_size",
    "get_logger",
    "handle_stop_signals",
    "inherited_sockets",
    "measure_footprint",
    "parse_share",
    "parse_size",
    "process_footprint_bytes",
    "request_line",
    "setup_logging",
]

_HOMES: Final = {
    "children": "ChildLog KeptChild",
    "device": "Clamped DeviceFacts DeviceLimit budget_room clamp_budget clamp_footprint clamp_quota device_facts "
    "device_limit",
    "errors": "InheritedSocketUnusable InvalidSize",
    "footprint": "Footprint measure_footprint process_footprint_bytes",
    "levels": "LEVELS",
    "lifecycle": "Notifier StopAction StopPlan handle_stop_signals inherited_sockets",
    "logs": "LogSetup RequestLine get_logger request_line setup_logging",
    "open_things": "count_open_files count_threads",
    "sizes": "format_size parse_share parse_size",
}
"""The module of each name: a command that only parses a size must not wait for structlog."""


def __getattr__(name: str) -> object:
    if name in __all__:
        import importlib

        home = next(module for module, names in _HOMES.items() if name in names.split())
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
