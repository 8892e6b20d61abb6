"""Pages that agents of one namespace have in common: who has the pages a prompt begins with, and who is making them.

Theory of operation. With `--sharing namespace` all agents of a namespace are one sharing domain. A turn that is planned
looks for pages whose text its prompt begins with (`kvd.vm.sharing`). When they reach further than what the agent's own
branches keep, the turn starts from a new branch that maps them: whole pages, with the ids they were computed for. A
mapping is a fork at a page border: nothing is copied, read or waited for, and no address space is gone on with.
The branch is the agent's own once the turn carries its plan out; until then it only keeps the pages from going away.

A turn that computes its prompt says so (`Advance`). Another one whose prompt has at least one whole page more in common
with it than is there already waits for these pages instead of computing them, too. It waits only for turns that are
past such a wait themselves and neither preempted nor over, so no two can wait for each other; meanwhile it holds a
place but no pages.

The index is brought up to date when it is asked: branches that may have sealed pages are noted, and read then. It
follows cuts at once. What is found is compared with the text itself before it is mapped.

With `--sharing agent` nothing is noted and nothing is found; pages that agents share already stay shared.

Owner: the engine thread. May import kvd.config, kvd.ids, kvd.quant.spec, kvd.vm and siblings.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from kvd.config import SHARING
from kvd.ids import SpaceId
from kvd.quant.spec import PAGE_TOKENS
from kvd.scheduler.agents import Agent, Branch
from kvd.scheduler.requests import AgentRef
from kvd.vm.events import Forked
from kvd.vm.prefix import typed_prefix_bytes
from kvd.vm.sharing import PageTexts, control_borders
from kvd.vm.text import TypedText, cut_spans

if TYPE_CHECKING:
    from kvd.scheduler.core import EngineCore

MAX_TRIED = 16
"""Branches that are looked at for one place: what is wrong with one page is wrong with it for all who map it."""


@dataclass(eq=False, slots=True)
class Advance:
    """A turn that computes its prompt. Changed by the turn only.

    Attributes:
        domain: whose pages they become.
        prompt: the agent's whole text.
        token_bytes: bytes each token of it stands for.
        is_away: whether the turn is preempted.
        branch: what it works on; None until it has it.
        is_over: the turn ended.
    """

    domain: str
    prompt: TypedText
    token_bytes: Sequence[int]
    is_away: Callable[[], bool]
    branch: Branch | None = None
    is_over: bool = False
    _page_ends: list[int] = field(default_factory=list)

    def has(self, pages: int) -> bool:
        """Whether so many pages are sealed."""
        return self.branch is not None and self.branch.computed >= pages * PAGE_TOKENS

    def pages_within(self, text_bytes: int) -> int:
        """Whole pages whose text lies in the first `text_bytes` bytes and that others can begin with."""
        if not self._page_ends:
            end = 0
            for start in range(0, len(self.token_bytes) - PAGE_TOKENS + 1, PAGE_TOKENS):
                end += sum(self.token_bytes[start : start + PAGE_TOKENS])
                self._page_ends.append(end)
        pages = bisect_right(self._page_ends, text_bytes)
        while pages and not can_begin_with(self.prompt.data, self.token_bytes, pages, self._page_ends[pages - 1]):
            pages -= 1
        return pages

    def end_of(self, pages: int) -> int:
        """Length in bytes of the text of the first `pages` pages."""
        return self._page_ends[pages - 1] if pages else 0


def can_begin_with(data: bytes | bytearray, token_bytes: Sequence[int], pages: int, end_bytes: int) -> bool:
    """Whether a text may go on otherwise after `pages` whole pages: they end with a character and all of its tokens."""
    tokens = pages * PAGE_TOKENS
    on_border = end_bytes >= len(data) or data[end_bytes] & 0xC0 != 0x80
    return on_border and (tokens >= len(token_bytes) or token_bytes[tokens] != 0)


class Sharing:
    """Owner: the engine thread. `EngineCore` has one.

    Args:
        core: the engine's parts.
        mode: of `kvd.config.SHARING`.
    """

    def __init__(self, core: EngineCore, mode: str) -> None:
        if mode not in SHARING:
            raise ValueError(f"sharing must be one of {', '.join(SHARING)}, not {mode!r}")
        self._core = core
        self._is_on = mode == "namespace"
        self._texts: dict[str, PageTexts] = {}
        self._branches: dict[SpaceId, tuple[str, Branch]] = {}
        self._noted: dict[str, dict[SpaceId, Branch]] = {}
        self._advances: list[Advance] = []

    @property
    def is_on(self) -> bool:
        """Whether agents of a namespace share pages."""
        return self._is_on

    def domain_of(self, ref: AgentRef) -> str:
        """The sharing domain of an agent's pages, in their keys and headers: its namespace, or the agent alone."""
        return str(ref.namespace) if self._is_on else f"{ref.namespace}\0{ref.agent}"

    # ---- what there is ----------------------------------------------------------------------------------------------

    def note(self, branch: Branch) -> None:
        """A branch may have sealed pages that the index lacks."""
        if self._is_on:
            domain = self.domain_of(self._core.owner(branch.space)[0])
            self._branches[branch.space] = domain, branch
            self._noted.setdefault(domain, {})[branch.space] = branch

    def cut(self, space: SpaceId, computed: int) -> None:
        """KV of a space beyond `computed` tokens is given up."""
        if space in self._branches:
            domain, branch = self._branches[space]
            if domain in self._texts:
                self._texts[domain].cut(space, computed // PAGE_TOKENS)
            self.note(branch)

    def forget(self, space: SpaceId) -> None:
        """A space is gone."""
        if space in self._branches:
            domain, _ = self._branches.pop(space)
            self._noted.get(domain, {}).pop(space, None)
            texts = self._texts.get(domain)
            if texts is not None:
                texts.forget(space)
                if not len(texts):
                    del self._texts[domain]

    def _up_to_date(self, domain: str) -> PageTexts:
        texts = self._texts.get(domain, PageTexts())
        for branch in self._noted.pop(domain, {}).values():
            _read(texts, branch)
        if len(texts):
            self._texts[domain] = texts
        return texts

    # ---- what of it serves ------------------------------------------------------------------------------------------

    def find(self, ref: AgentRef, prompt: TypedText, beyond_bytes: int) -> tuple[Branch, int] | None:
        """A branch whose first whole pages hold the beginning of a prompt, and how many tokens that is.

        Args:
            ref: who asks; only its own domain is searched.
            prompt: the agent's whole text.
            beyond_bytes: bytes of it that the agent has KV for: only what reaches further is of use.
        """
        if not self._is_on:
            return None
        for place in self._up_to_date(self.domain_of(ref)).find(prompt):
            if place.end_bytes <= beyond_bytes:
                return None
            for space in islice(place.spaces, MAX_TRIED):
                branch = self._branches[space][1]
                if self._serves(branch, place.pages, place.end_bytes, prompt):
                    return branch, place.pages * PAGE_TOKENS
        return None

    def _serves(self, branch: Branch, pages: int, end_bytes: int, prompt: TypedText) -> bool:
        """Whether a prompt can go on from a branch's first pages."""
        tokens = pages * PAGE_TOKENS
        if branch.format_ids != self._core.formats.default_ids or branch.doubtful or branch.missing:
            return False
        if branch.computed < tokens or not can_begin_with(branch.text, branch.token_bytes, pages, end_bytes):
            return False
        if self._core.pager.resumable_at(branch.space, tokens) != tokens or self._is_refused(branch, pages):
            return False
        stored = TypedText(bytes(branch.text[:end_bytes]), tuple(cut_spans(branch.spans, end_bytes)))
        return typed_prefix_bytes(stored, prompt) == end_bytes == branch.text_bytes_of(tokens)

    def _is_refused(self, branch: Branch, pages: int) -> bool:
        """Whether the disk refused one of a branch's first pages: nobody else's turn is to depend on it (P33)."""
        refused = self._core.memory.failed_writes
        if not refused:
            return False
        segments = self._core.pager.segments(branch.space)
        return any(page.ref.page_id in refused for segment in segments for page in segment.pages[:pages])

    def map_pages(self, agent: Agent, source: Branch, tokens: int) -> Branch:
        """A branch that maps the first `tokens` ids of a branch of the domain, a page border; not yet the agent's.

        Whoever asked for it puts it into `agent.branches`, or lets go of it with `EngineCore.let_go`.
        """
        core = self._core
        branch_id = agent.next_branch
        agent.next_branch += 1
        space = core.open_space(agent.ref, branch_id, source.format_ids)
        core.memory.apply(Forked(source.space, space, tokens))
        branch = core.copy_branch(source, branch_id, space, tokens)
        branch.borrowed_pages = tokens // PAGE_TOKENS
        self.note(branch)
        return branch

    # ---- what is on its way -----------------------------------------------------------------------------------------

    def begin(
        self, ref: AgentRef, prompt: TypedText, token_bytes: Sequence[int], is_away: Callable[[], bool]
    ) -> Advance:
        """A turn goes on to compute its prompt; `end` follows in any case."""
        advance = Advance(self.domain_of(ref), prompt, token_bytes, is_away)
        self._advances.append(advance)
        return advance

    def end(self, advance: Advance) -> None:
        """The turn ended."""
        advance.is_over = True
        self._advances.remove(advance)

    def awaited(self, ref: AgentRef, prompt: TypedText, beyond_bytes: int) -> Callable[[], bool] | None:
        """When a turn need wait no longer for pages that another one is about to seal; None when there are none.

        Args:
            ref: who asks.
            prompt: the agent's whole text.
            beyond_bytes: bytes of it that there are pages of already.
        """
        if not self._is_on:
            return None
        domain, best, wanted_pages, reach_bytes = self.domain_of(ref), None, 0, beyond_bytes
        for each in self._advances:
            if each.domain != domain or each.is_away():
                continue
            pages = each.pages_within(typed_prefix_bytes(each.prompt, prompt))
            if each.end_of(pages) > reach_bytes and not each.has(pages):
                best, wanted_pages, reach_bytes = each, pages, each.end_of(pages)
        if best is None:
            return None
        advance = best
        return lambda: advance.is_over or advance.is_away() or advance.has(wanted_pages)


def _read(texts: PageTexts, branch: Branch) -> None:
    """Put a branch's sealed pages into the index, as far as their text is settled.

    Tokens that are being generated stand for no bytes yet; nothing after the last that does is settled.
    """
    settled = len(branch.token_bytes)
    while settled and not branch.token_bytes[settled - 1]:
        settled -= 1
    known, whole = texts.pages(branch.space), min(branch.computed, settled) // PAGE_TOKENS
    if known >= whole:
        return
    borders = control_borders(branch.spans)
    start = texts.end_bytes(branch.space)
    for page in range(known, whole):
        end = start + sum(branch.token_bytes[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS])
        inside = borders[bisect_left(borders, start) : bisect_left(borders, end)]
        texts.append(branch.space, bytes(branch.text[start:end]), [border - start for border in inside])
        start = end
