"""MECHANISM: where KV bytes live, in RAM and on disk.

In RAM:

- `frame_pool`, `frame_memory`: the pages' frames, per backend, and memory kept for frames to come.
- `fragment`: tokens of a page without a frame; the three are the modules here that may know arrays.

On disk, bytes in and bytes out, no arrays; in the order of dependence:

- `errors`: the package's error classes; imports kvd.errors.
- `fs`, `fs_meter`: the only door to the disk, and a counting one; import nothing else.
- `side_files`: small durable files beside the pages; imports fs.
- `migrate`: bringing a folder of an older format to this one; imports errors, fs.
- `layout`: the data folder's names, version and lock; imports errors, fs, migrate.
- `records`, `record_codec`: the delta log's record, and it as msgpack; import kvd.ids, kvd.vm.text.
- `page_file`, `read_buffers`, `swap_dir`: a page as canonical safetensors bytes, memory to read it into, and the folder
  of all; import kvd.quant.spec.
- `agent_log`: framed, chained, append-only logs; imports fs, record_codec.
- `agent_file`, `agent_file_io`: an exported agent as one safetensors file, written and read in steps; import page_file.
- `agent_image`, `snapshot`: an agent from its records, and back (pure); import records, kvd.quant.spec.
- `catalog`, `catalog_keeper`: the SQLite catalog, which is derived state; import page_file.
- `log_replay`, `sleeping`: an agent from its log's bytes, and which logs need not be read at start; import the above.
- `fork_notes`: a new agent in one line, as the beginning of another one's log; imports the above.
- `recovery_report`, `recovery`: from a folder in any state to agents; import all of the above.
- `disk_usage`, `log_tails`, `log_book`: the quota over every byte, tails read from logs, all logs; import the above.
- `fork_book`: forks that have a note, and making their logs; imports the above.
- `verify`: whether a file is what was written, for `kvd doctor`; imports page_file, agent_image.
- `swap_ops`, `swap_store`, `swap_thread`: operations as data, their execution, and the threads around it.
- `folder_watch`: notices page files that others change; imports layout.
- `ram_store`: the same operations without a disk, for `--swap off`; imports swap_ops.

Nothing here imports vm (but `vm.text`), attention, model, scheduler or front. `frame_pool` and `frame_memory` are
imported by their own names, so that tools which only read the disk need no array library.
"""

from kvd.store.agent_image import AgentImage, BranchImage, SegmentState
from kvd.store.fs import FileSystem, RealFileSystem
from kvd.store.layout import DataFolder
from kvd.store.page_file import PageHeader
from kvd.store.recovery import recover
from kvd.store.recovery_report import LogTrouble, RecoveryReport
from kvd.store.side_files import read_small_file, write_small_file
from kvd.store.swap_ops import (
    AppendRecordOp,
    CompactLogOp,
    DeleteLogOp,
    DeletePageOp,
    FlushOp,
    ReadPageOp,
    ReadTailOp,
    SwapBroken,
    SwapOp,
    SwapResult,
    SwapStatistics,
    WakeLogOp,
    WritePageOp,
)
from kvd.store.swap_thread import SwapThread

__all__ = [
    "AgentImage",
    "AppendRecordOp",
    "BranchImage",
    "CompactLogOp",
    "DataFolder",
    "DeleteLogOp",
    "DeletePageOp",
    "FileSystem",
    "FlushOp",
    "LogTrouble",
    "PageHeader",
    "ReadPageOp",
    "ReadTailOp",
    "RealFileSystem",
    "RecoveryReport",
    "SegmentState",
    "SwapBroken",
    "SwapOp",
    "SwapResult",
    "SwapStatistics",
    "SwapThread",
    "WakeLogOp",
    "WritePageOp",
    "read_small_file",
    "recover",
    "write_small_file",
]
