"""What happened (events) and what to do (instructions): the whole conversation between pager and engine.

Events are past facts, instructions imperatives; all are frozen. The pager never touches an array, a file, a thread or
a clock: it takes an event and returns the instructions the engine must carry out **in order**. May import kvd.ids and
kvd.vm.page.

Theory of operation. An *address space* has, per cache group, one segment: sealed pages (256 tokens each, immutable,
may be mapped by several spaces) and at most one private *tail* page that is filling. Of a group with a window the pages
before what the next step sees stay mapped, but nobody wants them in RAM. `Activated` pins a space and asks for
everything else that is absent; `GrowthWanted` asks for frames for tokens to come. Neither blocks: what cannot be had at
once is queued inside the pager and continues when a `WriteDone` or `LoadDone` makes room. The engine runs a step when
`pager.is_ready(space)`.

Durability of a tail: after `TurnCommitted`, the tail's KV is in the agent's log up to `durable_tokens`; an inactive
space's fully durable tail may be dropped from RAM and is read back with `LoadTail`. Before that it is packed: its
tokens stay in RAM without a frame (`PackTail`, `UnpackTail`), whether or not they are durable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvd.ids import DEFAULT_NAMESPACE, FrameId, GroupId, Namespace, PageId, PageKey, SpaceId
from kvd.vm.page import PrefetchReason


@dataclass(frozen=True, slots=True)
class PageRef:
    """A sealed page as recovery and forks name it."""

    page_id: PageId
    key: PageKey


@dataclass(frozen=True, slots=True)
class SegmentImage:
    """One segment of a recovered space: its sealed pages in order and the tokens of its tail (0: no tail)."""

    group: GroupId
    pages: tuple[PageRef, ...]
    tail_tokens: int


# ---- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SpaceCreated:
    """An empty space exists. `page_bytes[g]` are the bytes of one page of group g in this space's format."""

    space: SpaceId
    page_bytes: tuple[int, ...]
    namespace: Namespace = DEFAULT_NAMESPACE


@dataclass(frozen=True, slots=True)
class SpaceRestored:
    """A space known from its log: sealed pages are in swap (EVICTED), the tail in the log (STASHED)."""

    space: SpaceId
    page_bytes: tuple[int, ...]
    segments: tuple[SegmentImage, ...]
    namespace: Namespace = DEFAULT_NAMESPACE


@dataclass(frozen=True, slots=True)
class Activated:
    """A request on this space starts: pin it and fault in what its next step sees and is absent."""

    space: SpaceId


@dataclass(frozen=True, slots=True)
class Deactivated:
    """The request ended: unpin. Frames mapped for growth beyond the computed tokens are given back."""

    space: SpaceId


@dataclass(frozen=True, slots=True)
class PrefetchHinted:
    """Load what the space lacks, without pinning it; clean pages of spaces that are expected less may go for it.

    `reason`: `hint` for a client's word, tried once; `queued` for a turn that waits, tried until it runs (`Activated`)
    or `HintWithdrawn`.
    """

    space: SpaceId
    reason: PrefetchReason = "hint"


@dataclass(frozen=True, slots=True)
class HintWithdrawn:
    """The turn that the space was to be loaded for will not come."""

    space: SpaceId


@dataclass(frozen=True, slots=True)
class SpacesPredicted:
    """These spaces, and no others, are expected to run, the soonest first: load them ahead, evict them last."""

    spaces: tuple[SpaceId, ...]


@dataclass(frozen=True, slots=True)
class GrowthWanted:
    """The next step appends `tokens` tokens: map frames for them in every group (the space must be active)."""

    space: SpaceId
    tokens: int


@dataclass(frozen=True, slots=True)
class TokensAppended:
    """A step wrote `tokens` tokens of KV. Pages that became full are now sealed; `keys[g]` are their keys in order."""

    space: SpaceId
    tokens: int
    keys: tuple[tuple[PageKey, ...], ...]


@dataclass(frozen=True, slots=True)
class TurnCommitted:
    """The space's log holds its tail up to the present token count."""

    space: SpaceId


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Cut the space to `tokens`. A cut inside a sealed page makes a private copy of its first tokens (CopyTail).

    Pages that a window comes back to are demanded while the space is active or pinned.
    """

    space: SpaceId
    tokens: int


@dataclass(frozen=True, slots=True)
class Forked:
    """`child` maps the sealed pages of `parent` up to `tokens`; the tokens of at most one page per segment are copied.

    A page that is cut must be in RAM: say CutWanted first, or have the parent active and ready.
    """

    parent: SpaceId
    child: SpaceId
    tokens: int


@dataclass(frozen=True, slots=True)
class CutWanted:
    """A cut of the space at `tokens` is to come (fork, rollback): load the one page per group that it goes through.

    The pages are kept until the next CutWanted for the space; `tokens` None only lets go of them. At a page border, or
    beyond the space's KV, nothing is needed.
    """

    space: SpaceId
    tokens: int | None


@dataclass(frozen=True, slots=True)
class LogLost:
    """The space's log is gone: a tail that is in RAM is durable nowhere (one that is not will fail to load)."""

    space: SpaceId


@dataclass(frozen=True, slots=True)
class FilesGone:
    """Swap files of pages are gone for certain: CLEAN pages are dirty again, EVICTED ones lost, others as they were.

    Those that are LOADING are dirty once they have come: they may have been read before the files went.
    Unknown pages are passed over.
    """

    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class CopiesLost:
    """The swap files of these pages are gone. Those that are in RAM are written again; the rest will fail to load.

    Those that are LOADING may come all the same, and are then written again.
    """

    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class SpaceClosed:
    """The space is gone: unmap everything; pages nobody maps are forgotten."""

    space: SpaceId


@dataclass(frozen=True, slots=True)
class Pinned:
    """The user pinned the space: its pages are loaded and not evicted."""

    space: SpaceId


@dataclass(frozen=True, slots=True)
class Unpinned:
    """The user took the pin back."""

    space: SpaceId


@dataclass(frozen=True, slots=True)
class MarkedPassing:
    """Nobody is (or, after all, somebody is) expected to come back to the space: its pages leave RAM before others'."""

    space: SpaceId
    is_passing: bool


@dataclass(frozen=True, slots=True)
class EvictionWanted:
    """The user asked to evict the space (dirty pages are written first)."""

    space: SpaceId


@dataclass(frozen=True, slots=True)
class PagesUnwanted:
    """These pages are to leave RAM: CLEAN ones that nobody holds do, others stay as they were.

    Unknown pages are passed over.
    """

    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class WritesAllowed:
    """Writes of pages may start while those that started since then take less than this; None: always.

    `rooms`: what pages of namespaces with a quota of the disk may take, those included that are being written.
    """

    allowance_bytes: int | None
    rooms: Mapping[Namespace, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WriteDone:
    """The page is durable in swap."""

    page: PageId


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The page could not be written; it stays resident and dirty.

    No write starts after it but one trial at a time: at ever rarer `Tick`s, or on `RetryWanted`. When one succeeds,
    the others follow.
    """

    page: PageId
    reason: str


@dataclass(frozen=True, slots=True)
class LoadDone:
    """The page's (or tail's) bytes are in its frame."""

    page: PageId


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The page's file is missing or corrupt. The page is lost; `pager.lost_at(space)` says from which token on."""

    page: PageId
    reason: str


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """The budget is now `budget_bytes`; evict down to it."""

    budget_bytes: int


@dataclass(frozen=True, slots=True)
class QuotaChanged:
    """Pages of the namespace should take no more than `quota_bytes` of the frames; None: it has no quota."""

    namespace: Namespace
    quota_bytes: int | None


@dataclass(frozen=True, slots=True)
class MemoryWanted:
    """The machine is short of memory: evict so many bytes of idle pages, or all there are."""

    wanted_bytes: int


@dataclass(frozen=True, slots=True)
class Tick:
    """A second passed: pack tails that nobody has used for a while, try a write again if writes fail.

    And evict down to the low mark, if the high one is exceeded.
    """


@dataclass(frozen=True, slots=True)
class RetryWanted:
    """Somebody waits for writes: try one now if writes fail, whatever the back-off says.

    `space`: one of its pages; None: whichever is next.
    """

    space: SpaceId | None = None


Event = (
    SpaceCreated
    | SpaceRestored
    | Activated
    | Deactivated
    | PrefetchHinted
    | HintWithdrawn
    | SpacesPredicted
    | GrowthWanted
    | TokensAppended
    | TurnCommitted
    | RolledBack
    | Forked
    | CutWanted
    | LogLost
    | CopiesLost
    | FilesGone
    | SpaceClosed
    | Pinned
    | Unpinned
    | MarkedPassing
    | EvictionWanted
    | PagesUnwanted
    | WritesAllowed
    | WriteDone
    | WriteFailed
    | LoadDone
    | LoadFailed
    | BudgetChanged
    | QuotaChanged
    | MemoryWanted
    | Tick
    | RetryWanted
)

# ---- instructions ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MapFrame:
    """Make frame `frame` exist for a new, empty tail page of `group` in the format of `space`."""

    page: PageId
    frame: FrameId
    group: GroupId
    space: SpaceId


@dataclass(frozen=True, slots=True)
class LoadPage:
    """Make the frame exist, read the swap file into it, then send LoadDone or LoadFailed."""

    page: PageId
    frame: FrameId
    group: GroupId


@dataclass(frozen=True, slots=True)
class LoadTail:
    """Make the frame exist and fill its first `tokens` tokens from the space's log; then LoadDone or LoadFailed."""

    page: PageId
    frame: FrameId
    group: GroupId
    space: SpaceId
    tokens: int


@dataclass(frozen=True, slots=True)
class WritePage:
    """Copy the frame's bytes and queue them for swap; WriteDone or WriteFailed follows."""

    page: PageId
    frame: FrameId
    group: GroupId


@dataclass(frozen=True, slots=True)
class CopyTail:
    """Keep a copy of the first `tokens` tokens of page `source` as the new packed tail `page`.

    They are read from `frame`, or, when that is None, from `source` as it is packed.
    """

    source: PageId
    frame: FrameId | None
    page: PageId
    group: GroupId
    tokens: int


@dataclass(frozen=True, slots=True)
class PackTail:
    """Keep the first `tokens` tokens of the frame as the packed tail `page`, and free the frame."""

    page: PageId
    frame: FrameId
    tokens: int


@dataclass(frozen=True, slots=True)
class UnpackTail:
    """Make the frame exist, put the packed tail `page` of `tokens` tokens into it, and forget what was packed."""

    page: PageId
    frame: FrameId
    tokens: int


@dataclass(frozen=True, slots=True)
class CutPacked:
    """Keep only the first `tokens` tokens of a packed tail."""

    page: PageId
    tokens: int


@dataclass(frozen=True, slots=True)
class DropPacked:
    """A packed tail's bytes are not needed any more."""

    page: PageId


@dataclass(frozen=True, slots=True)
class DropFrame:
    """The frame's content is not needed any more: free it."""

    frame: FrameId


@dataclass(frozen=True, slots=True)
class ForgetPage:
    """Nobody maps the page: delete its row and file (after the log record that let go of it is durable)."""

    page: PageId


Instruction = (
    MapFrame
    | LoadPage
    | LoadTail
    | WritePage
    | CopyTail
    | PackTail
    | UnpackTail
    | CutPacked
    | DropPacked
    | DropFrame
    | ForgetPage
)
