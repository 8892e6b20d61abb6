"""Policy: which pages are in RAM, and what of an agent's text serves a prompt. No arrays, files, threads or clock.

- `pager` takes events and returns instructions; it is the only module that others drive.
- `events` are the words of that conversation, `views` the frozen pictures of the pager's state.
- `address_space`, `page_table` and `page` hold what is mapped where and in which state; `mapping` changes it.
- `demand` says what goes next, `prefetch` what is loaded before anybody demands it, `budget` counts bytes, `eviction`
  ranks victims, `transfers` starts loads and writes, as far as `disk_rooms` has room for them, `packing` takes frames
  from tails that no step needs, `reclaim` evicts in the background, `pins` says what pins hold, `integrity` counts
  again; `window` says which pages a step sees.
- `moves` sums up whose pages came and went, `codes` has page maps as bytes.
- `text` types an agent's text, `prefix` matches it against a prompt, `keys` names pages by their content, `sharing`
  finds the pages of a domain that a prompt begins with.
- `trace` has the words for writing down what agents did, so that another policy can be asked the same.
- `errors` says whose fault it was.

May import kvd.ids, kvd.errors and kvd.quant.spec.
"""

from __future__ import annotations

from kvd.vm.errors import (
    BrokenText,
    IllegalEvent,
    IllegalTransition,
    IntegrityError,
    NoRoomForCopy,
    NotResident,
    SpaceInUse,
)
from kvd.vm.eviction import POLICIES, EvictionPolicy, LruPolicy, ReusePolicy
from kvd.vm.keys import KeyChain
from kvd.vm.page import PageState
from kvd.vm.pager import Pager
from kvd.vm.prefix import Divergence, Match, MatchKind, StoredText, best_match, match
from kvd.vm.text import Span, SpanKind, TypedText
from kvd.vm.views import PageView, Residency, SegmentView, Statistics, TailView

__all__ = [
    "POLICIES",
    "BrokenText",
    "Divergence",
    "EvictionPolicy",
    "IllegalEvent",
    "IllegalTransition",
    "IntegrityError",
    "KeyChain",
    "LruPolicy",
    "Match",
    "MatchKind",
    "NoRoomForCopy",
    "NotResident",
    "PageState",
    "PageView",
    "Pager",
    "Residency",
    "ReusePolicy",
    "SegmentView",
    "SpaceInUse",
    "Span",
    "SpanKind",
    "Statistics",
    "StoredText",
    "TailView",
    "TypedText",
    "best_match",
    "match",
]
