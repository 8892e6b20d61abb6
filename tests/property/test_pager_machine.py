"""The pager against an oracle: any order of requests, transfers and faults keeps every token and every byte account.

The machine carries out instructions on a model of RAM and disk whose pages are tuples of token values, answers
transfers in random order, and after each step compares what a step would read with what was appended.

Long because a state machine's rules share one oracle and are read together.
"""

from __future__ import annotations

from collections.abc import Hashable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvd.ids import GroupId, Namespace, PageId, PageKey, SpaceId
from kvd.vm import events as ev
from kvd.vm.codes import BEHIND_WINDOW, PINNED, SHARED, STATES
from kvd.vm.errors import NoRoomForCopy, NotResident, SpaceInUse
from kvd.vm.eviction import POLICIES
from kvd.vm.pager import Pager
from tests.property.paging_model import PAGE_TOKENS, Machine, Model, Token, Watched
from tests.support.examples import SAME_EXAMPLES

MAX_SPACES = 6
NAMESPACES = (Namespace("work"), Namespace("play"))

WEIGHTS = {
    "turn": 10,
    "append": 4,
    "write_ends": 6,
    "load_ends": 6,
    "grow": 3,
    "activate": 3,
    "deactivate": 3,
    "commit": 2,
    "fork": 4,
    "roll_back": 3,
    "restore_sharing": 1,
    "create": 2,
    "prefetch": 2,
    "predict": 3,
    "withdraw": 1,
    "evict": 2,
    "pin": 1,
    "unpin": 2,
    "cut": 3,
    "copies_lost": 1,
    "files_gone": 1,
    "log_lost": 1,
    "retry": 1,
    "tick": 3,
    "left_alone": 1,
    "heal": 2,
    "close": 1,
    "change_budget": 1,
    "want_memory": 1,
    "change_quota": 1,
    "demand_is_met": 1,
}
ACTIONS = [action for action, weight in WEIGHTS.items() for _ in range(weight)]


class PagerMachine(RuleBasedStateMachine):
    """Random life of a pager."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[SpaceId, Model] = {}
        self.machine = Machine(self.models)
        self.next_space = 0
        self.next_serial = 0
        self.next_page = 0
        self.lost_pages: set[PageId] = set()
        self.maps: dict[SpaceId, tuple[Hashable, tuple[bytes, ...]]] = {}

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _page_id(self) -> PageId:
        self.next_page += 1
        return PageId(f"{self.next_page:032x}")

    def _new_space_id(self) -> SpaceId:
        self.next_space += 1
        return SpaceId(self.next_space)

    def send(self, event: ev.Event) -> None:
        """One event, and what it asks for."""
        self.machine.carry_out(self.pager.handle(event))

    def pick(self, data: st.DataObject, *, active: bool | None = None) -> SpaceId | None:
        """One of the spaces that are (not) active, None when there is none."""
        spaces = [s for s, m in self.models.items() if active is None or m.active == active]
        return data.draw(st.sampled_from(spaces)) if spaces else None

    def demand_bytes(self, *, but: SpaceId | None = None) -> int:
        """Upper bound of what active and pinned spaces need."""
        held = [s for s, m in self.models.items() if (m.active or m.pinned) and s != but]
        return sum(self.pager.working_set_bytes(s, self.wanted.get(s, 0)) for s in held)

    def admit(self, space: SpaceId, extra_tokens: int) -> bool:
        """What an engine checks before it activates or grows."""
        return self.pager.fits(self.demand_bytes(but=space) + self.pager.working_set_bytes(space, extra_tokens))

    def first_seen(self, space: SpaceId, group: int) -> int:
        """First position that the space's next step sees, or a replay of its last token: the test's own arithmetic."""
        window = self.windows[group]
        return 0 if window is None else max(0, len(self.models[space].serials) - 1 - (window - 1))

    def expected(self, space: SpaceId, group: int) -> list[Token]:
        """What a group of the space must hold."""
        return [(group, serial) for serial in self.models[space].serials]

    # ---- life -------------------------------------------------------------------------------------------------------

    @initialize(
        budget_pages=st.integers(5, 14),
        group_count=st.integers(1, 3),
        writes=st.integers(1, 2),
        loads=st.integers(1, 3),
        first_tokens=st.lists(st.integers(1, 18), min_size=2, max_size=4),
        windows=st.lists(st.sampled_from([None, 1, 3, 4, 5, 9]), min_size=3, max_size=3),
        policy=st.sampled_from(sorted(POLICIES)),
        free_percents=st.sampled_from([(0, 0), (0, 30), (20, 40), (30, 100)]),
        pin_limit=st.sampled_from([0, 40, 0.2, 0.5, 1.0]),
    )
    def start(
        self,
        budget_pages: int,
        group_count: int,
        writes: int,
        loads: int,
        first_tokens: list[int],
        windows: list[int | None],
        policy: str,
        free_percents: tuple[int, int],
        pin_limit: int | float,
    ) -> None:
        """A pager of some pages, any policy, marks and limits; groups that see all or a window; spaces with a turn."""
        self.group_count = group_count
        self.windows = windows[:group_count]
        self.pager = Pager(
            budget_pages * 10 * group_count,
            group_count=group_count,
            new_page_id=self._page_id,
            max_writes_in_flight=writes,
            max_loads_in_flight=loads,
            page_tokens=PAGE_TOKENS,
            policy=Watched(POLICIES[policy]()),
            windows=self.windows,
            high_free_percent=free_percents[0],
            low_free_percent=free_percents[1],
            pin_limit=pin_limit,
        )
        self.wanted: dict[SpaceId, int] = {}
        self.shrunk = False
        for number, tokens in enumerate(first_tokens):
            self._create(big=number == 1)
            self._first_turn(SpaceId(number + 1), tokens)

    def _first_turn(self, space: SpaceId, tokens: int) -> None:
        """Give a new space some tokens, so that spaces compete from the start."""
        if not self.admit(space, tokens):
            return
        self.models[space].active = True
        self.wanted[space] = tokens
        self.send(ev.Activated(space))
        self.send(ev.GrowthWanted(space, tokens))
        while not self.pager.is_ready(space):
            page = min(self.machine.writes)
            self.machine.swap[page] = self.machine.writes.pop(page)
            self.send(ev.WriteDone(page))
        self._append(space, tokens)
        self._commit(space)
        self.models[space].active = False
        del self.wanted[space]
        self.send(ev.Deactivated(space))

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One thing happens; what keeps the pager busy is drawn more often than what ends things."""
        action = data.draw(st.sampled_from(ACTIONS))
        getattr(self, action)(data)

    def turn(self, data: st.DataObject) -> None:
        """A whole turn: activate, grow, wait for the disk, append, and mostly commit and deactivate."""
        space = self.pick(data, active=False)
        tokens = data.draw(st.integers(1, 11))
        if space is None or not self.admit(space, tokens):
            return
        self.models[space].active = True
        self.wanted[space] = tokens
        self.send(ev.Activated(space))
        self.send(ev.GrowthWanted(space, tokens))
        for _ in range(data.draw(st.integers(0, 30))):
            if self.pager.is_ready(space) or not (self.machine.writes or self.machine.loads):
                break
            self.load_ends(data)
            self.write_ends(data)
        if self.pager.is_ready(space):
            self._append(space, tokens)
            if data.draw(st.integers(0, 3)):
                self._commit(space)
        if data.draw(st.integers(0, 3)):
            self.models[space].active = False
            self.wanted.pop(space, None)
            self.send(ev.Deactivated(space))

    def create(self, data: st.DataObject) -> None:
        """A new, empty space."""
        if len(self.models) >= MAX_SPACES:
            return
        self._create(big=data.draw(st.booleans()))

    def _create(self, *, big: bool) -> None:
        space = self._new_space_id()
        page_bytes = tuple((14 if big else 7) + group for group in range(self.group_count))
        self.models[space] = Model(page_bytes, namespace=NAMESPACES[space % 2])
        self.send(ev.SpaceCreated(space, page_bytes, NAMESPACES[space % 2]))

    def activate(self, data: st.DataObject) -> None:
        """A request starts."""
        space = self.pick(data, active=False)
        if space is not None and self.admit(space, 0):
            self.models[space].active = True
            self.send(ev.Activated(space))

    def deactivate(self, data: st.DataObject) -> None:
        """A request ends, mostly with a commit."""
        space = self.pick(data, active=True)
        if space is not None:
            if self.pager.lost_at(space) is None and data.draw(st.booleans()):
                self._commit(space)
            self.models[space].active = False
            self.wanted.pop(space, None)
            self.send(ev.Deactivated(space))
            assert all(not segment.growth_frames for segment in self.pager.segments(space))

    def grow(self, data: st.DataObject) -> None:
        """A step to come wants frames."""
        tokens = data.draw(st.integers(1, 11))
        space = self.pick(data, active=True)
        if space is not None and self.admit(space, tokens):
            self.wanted[space] = tokens
            self.send(ev.GrowthWanted(space, tokens))

    def append(self, data: st.DataObject) -> None:
        """A step of every token that was wanted or fewer, when the space is ready."""
        ready = [s for s in self.wanted if self.wanted[s] and self.pager.is_ready(s)]
        if ready:
            space = data.draw(st.sampled_from(ready))
            self._append(space, data.draw(st.integers(1, self.wanted[space])))

    def _append(self, space: SpaceId, tokens: int) -> None:
        model = self.models[space]
        fresh = range(self.next_serial, self.next_serial + tokens)
        self.next_serial += tokens
        for group in range(self.group_count):
            table = self.pager.block_table(space, GroupId(group))
            first = self.pager.first_page(space, GroupId(group))
            for offset, serial in enumerate(fresh):
                position = len(model.serials) + offset
                frame = self.machine.frames[table[position // PAGE_TOKENS - first]]
                del frame[position % PAGE_TOKENS :]  # what a rollback left behind is overwritten
                frame.append((group, serial))
        sealed = (len(model.serials) % PAGE_TOKENS + tokens) // PAGE_TOKENS
        model.serials.extend(fresh)
        self.wanted[space] -= tokens
        keys = tuple(
            tuple(PageKey(f"{space}/{group}/{fresh[-1]}/{n}") for n in range(sealed))
            for group in range(self.group_count)
        )
        self.send(ev.TokensAppended(space, tokens, keys))

    def _commit(self, space: SpaceId) -> None:
        self.models[space].log = list(self.models[space].serials)
        self.send(ev.TurnCommitted(space))

    def commit(self, data: st.DataObject) -> None:
        """The log takes the present length."""
        space = self.pick(data)
        if space is not None and self.pager.lost_at(space) is None:
            self._commit(space)

    def roll_back(self, data: st.DataObject) -> None:
        """Cut anywhere; a refusal changes nothing."""
        space = self.pick(data)
        if space is None:
            return
        model = self.models[space]
        tokens = data.draw(st.integers(0, len(model.serials)))
        before = self.pager.segments(space)
        try:
            instructions = self.pager.handle(ev.RolledBack(space, tokens))
        except (NotResident, NoRoomForCopy):
            assert self.pager.segments(space) == before, "a refused event changes nothing"
            return
        if tokens < len(model.serials):
            self.wanted.pop(space, None)
        del model.serials[tokens:]
        self.machine.carry_out(instructions)
        assert self.pager.tokens(space) == tokens

    def fork(self, data: st.DataObject) -> None:
        """Branch anywhere."""
        parent = self.pick(data)
        if parent is None or len(self.models) >= MAX_SPACES:
            return
        model = self.models[parent]
        tokens = data.draw(st.integers(0, len(model.serials)))
        child = self._new_space_id()
        try:
            instructions = self.pager.handle(ev.Forked(parent, child, tokens))
        except (NotResident, NoRoomForCopy):
            return
        self.models[child] = Model(model.page_bytes, model.serials[:tokens], namespace=model.namespace)
        self.machine.carry_out(instructions)

    def restore_sharing(self, data: st.DataObject) -> None:
        """A space restored from the log of another: same pages, a tail of its own."""
        origin = self.pick(data)
        if origin is None or len(self.models) >= MAX_SPACES or self.models[origin].log != self.models[origin].serials:
            return
        model = self.models[origin]
        space = self._new_space_id()
        self.models[space] = Model(
            model.page_bytes, list(model.serials), list(model.serials), namespace=model.namespace
        )
        images = tuple(ev.SegmentImage(view.group, view.refs, view.tail_tokens) for view in self.pager.segments(origin))
        self.send(ev.SpaceRestored(space, model.page_bytes, images, model.namespace))

    def close(self, data: st.DataObject) -> None:
        """A space goes, whatever is under way for it."""
        space = self.pick(data)
        if space is not None:
            self.wanted.pop(space, None)
            self.send(ev.SpaceClosed(space))
            del self.models[space]

    def pin(self, data: st.DataObject) -> None:
        """The user pins."""
        space = self.pick(data)
        if space is not None and self.admit(space, self.wanted.get(space, 0)):
            self.models[space].pinned = True
            self.send(ev.Pinned(space))

    def unpin(self, data: st.DataObject) -> None:
        """The user unpins."""
        space = self.pick(data)
        if space is not None:
            self.models[space].pinned = False
            self.send(ev.Unpinned(space))

    def prefetch(self, data: st.DataObject) -> None:
        """A hint takes nothing from what is held or was hinted at before, and drops nothing that is not on disk."""
        space = self.pick(data, active=False)
        if space is None:
            return
        held = self._held()
        self.send(ev.PrefetchHinted(space, data.draw(st.sampled_from(["hint", "queued"]))))
        assert held <= self._held(), "a hint takes from what is held"

    def predict(self, data: st.DataObject) -> None:
        """A prediction takes nothing from what is held, or expected sooner; only what is on disk loses its frame."""
        spaces = data.draw(st.lists(st.sampled_from(sorted(self.models)), max_size=3)) if self.models else []
        held, sooner = self._held(), [s for s, m in self.models.items() if m.active] + spaces[:1]
        before = {each: self.pager.residency(each).resident_pages for each in sooner}
        writing = self.pager.statistics().pages["writing"]
        self.send(ev.SpacesPredicted(tuple(spaces)))
        for each, resident_pages in before.items():
            assert self.pager.residency(each).resident_pages >= resident_pages, "a prediction takes from what is due"
        assert held <= self._held(), "a prediction takes from what is held"
        assert self.pager.statistics().pages["writing"] >= writing

    def _held(self) -> set[PageId]:
        """Sealed pages in RAM that nobody may evict."""
        held = set[PageId]()
        for space, model in self.models.items():
            every = [page for segment in self.pager.segments(space) for page in segment.pages]
            pages = [page for page in every if not page.behind_window]
            kept = {page.ref.page_id for page in pages} if model.active else self.pager.pinned_pages(space).keys()
            held |= {page.ref.page_id for page in pages if page.frame is not None and page.ref.page_id in kept}
        return held

    def withdraw(self, data: st.DataObject) -> None:
        """A turn that waited will not come."""
        space = self.pick(data)
        if space is not None:
            self.send(ev.HintWithdrawn(space))

    def cut(self, data: st.DataObject) -> None:
        """A whole cut: the pages it goes through are demanded, read and kept until it is done; none is needed after."""
        space = self.pick(data, active=False)
        if space is None:
            return
        model = self.models[space]
        tokens = data.draw(st.integers(0, len(model.serials)))
        self.send(ev.CutWanted(space, tokens))
        for _ in range(data.draw(st.integers(0, 30))):
            if self.pager.can_cut(space) or not (self.machine.writes or self.machine.loads):
                break
            self.load_ends(data)
            self.write_ends(data)
        if self.pager.can_cut(space):
            try:
                instructions = self.pager.handle(ev.RolledBack(space, tokens))
            except NoRoomForCopy:
                pass
            else:
                self.machine.carry_out(instructions)
                if tokens < len(model.serials):
                    self.wanted.pop(space, None)
                del model.serials[tokens:]
        self.send(ev.CutWanted(space, None))

    def copies_lost(self, data: st.DataObject) -> None:
        """Swap files of pages that are in RAM, or were just read, vanish; they are written again."""
        space = self.pick(data)
        if space is None:
            return
        states = ("clean", "loading")
        pages = [page for segment in self.pager.segments(space) for page in segment.pages if page.state in states]
        pages = [page for page in pages if page.ref.page_id in self.machine.swap]
        if pages:
            page = data.draw(st.sampled_from([page.ref.page_id for page in pages]))
            del self.machine.swap[page]
            self.send(data.draw(st.sampled_from([ev.CopiesLost, ev.FilesGone]))((page,)))

    def files_gone(self, data: st.DataObject) -> None:
        """Swap files of pages that are on disk only vanish, and that is known before anybody reads them."""
        space = self.pick(data)
        if space is None:
            return
        pages = [page for segment in self.pager.segments(space) for page in segment.pages if page.state == "evicted"]
        if pages:
            page = data.draw(st.sampled_from([page.ref.page_id for page in pages]))
            del self.machine.swap[page]
            self.lost_pages.add(page)
            self.send(ev.FilesGone((page,)))

    def log_lost(self, data: st.DataObject) -> None:
        """The log of a space whose tails are all in RAM vanishes: they must not be dropped before the next commit."""
        space = self.pick(data)
        if space is None:
            return
        tails = [segment.tail for segment in self.pager.segments(space)]
        if all(tail is None or tail.state in ("filling", "packed") for tail in tails):
            self.models[space].log = []
            self.send(ev.LogLost(space))

    def retry(self, data: st.DataObject) -> None:
        """Somebody waits for writes."""
        self.send(ev.RetryWanted())

    def evict(self, data: st.DataObject) -> None:
        """The user evicts; what is pinned refuses. Or single pages are to leave: those that are held stay."""
        space = self.pick(data, active=False)
        if space is None:
            return
        if data.draw(st.integers(0, 3)) == 3:
            pages = [page.ref.page_id for segment in self.pager.segments(space) for page in segment.pages]
            self.send(ev.PagesUnwanted(tuple(pages[len(pages) // 2 :])))
            return
        try:
            self.send(ev.EvictionWanted(space))
        except SpaceInUse:
            assert self.models[space].pinned

    # ---- the disk answers, in any order -----------------------------------------------------------------------------

    def write_ends(self, data: st.DataObject) -> None:
        """A write succeeds or fails."""
        if not self.machine.writes:
            return
        fails = data.draw(st.integers(0, 5)) == 5
        page = data.draw(st.sampled_from(sorted(self.machine.writes)))
        content = self.machine.writes.pop(page)
        if fails:
            self.send(ev.WriteFailed(page, "disk full"))
        else:
            self.machine.swap[page] = content
            self.send(ev.WriteDone(page))

    def load_ends(self, data: st.DataObject) -> None:
        """A load succeeds or finds a bad page."""
        if self.machine.loads:
            page = data.draw(st.sampled_from(sorted(self.machine.loads)))
            self._load_ends(page, data.draw(st.integers(0, 7)) == 7)

    def _load_ends(self, page: PageId, fails: bool) -> None:
        frame, content = self.machine.loads.pop(page)
        if fails or content is None:
            self.lost_pages.add(page)
            self.send(ev.LoadFailed(page, "bad checksum"))
        else:
            self.machine.frames[frame] = list(content)
            self.send(ev.LoadDone(page))

    def heal(self, data: st.DataObject | None = None) -> None:
        """The engine cuts every space that lost something back to what is left; a page border never needs a copy."""
        for space, model in self.models.items():
            lost = self.pager.lost_at(space)
            if lost is not None:
                self.wanted.pop(space, None)
                del model.serials[lost:]
                del model.log[lost:]
                self.send(ev.RolledBack(space, lost))
                assert self.pager.lost_at(space) is None

    def tick(self, data: st.DataObject) -> None:
        """Time passes."""
        self.send(ev.Tick())

    def left_alone(self, data: st.DataObject) -> None:
        """Nobody does anything for a while: no tail keeps a frame but for who runs, is pinned or waits for its turn."""
        queued = {space.space for space in self.pager.spaces if space.use.hint == "queued"}
        for _ in range(3):
            self.send(ev.Tick())
        for space, model in self.models.items():
            if not (model.active or model.pinned or space in queued):
                states = {view.tail.state for view in self.pager.segments(space) if view.tail is not None}
                assert "filling" not in states

    def change_budget(self, data: st.DataObject) -> None:
        """The budget grows or shrinks below what is held."""
        budget_pages = data.draw(st.integers(0, 20))
        self.shrunk = True
        self.send(ev.BudgetChanged(budget_pages * 10 * self.group_count))

    def want_memory(self, data: st.DataObject) -> None:
        """The machine is short of memory: idle pages go, and nothing that is held (P23)."""
        held = self._held()
        self.send(ev.MemoryWanted(data.draw(st.integers(0, 200))))
        assert held <= self._held()

    def change_quota(self, data: st.DataObject) -> None:
        """A quota is set or goes: idle pages of its namespace go, and nothing that is held, or another's (P21)."""
        namespace = data.draw(st.sampled_from(NAMESPACES))
        held, others = self._held(), self._resident(but=namespace)
        quota_pages = data.draw(st.one_of(st.none(), st.integers(0, 12)))
        self.send(ev.QuotaChanged(namespace, None if quota_pages is None else quota_pages * 10 * self.group_count))
        # pins of a smaller quota hold less, and a budget out of reach takes from anybody
        pinned = any(model.pinned for model in self.models.values())
        assert pinned or held <= self._held()
        statistics = self.pager.statistics()
        is_short = statistics.waiting_spaces or statistics.resident_bytes > statistics.high_mark_bytes
        assert is_short or self.shrunk or pinned or others <= self._resident(but=namespace)

    def _resident(self, *, but: Namespace) -> set[PageId]:
        """Clean sealed pages in RAM of other namespaces than one."""
        spaces = [space for space, model in self.models.items() if model.namespace != but]
        pages = [page for space in spaces for segment in self.pager.segments(space) for page in segment.pages]
        return {page.ref.page_id for page in pages if page.state == "clean"}

    # ---- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def books_agree(self) -> None:
        """Frames, bytes and references agree, and the budget holds (P21)."""
        if not hasattr(self, "pager"):
            return
        self.pager.check_integrity()
        statistics = self.pager.statistics()
        if not self.shrunk:
            assert statistics.resident_bytes + statistics.in_flight_bytes <= statistics.budget_bytes
        assert statistics.refaults <= statistics.faults
        loaded = sum(each.pages for each in statistics.prefetched.values())
        assert loaded + statistics.faults == self.machine.loads_started, "a load is a fault or was made ahead"
        unknown = sum(each.unknown_pages for each in statistics.prefetched.values())
        assert unknown <= len(self.machine.frames) + len(self.machine.packed)
        assert statistics.pages["writing"] == len(self.machine.writes)
        resident = sum(statistics.pages[s] for s in ("filling", "sealed_dirty", "writing", "clean"))
        assert resident + len(self.machine.loads) == len(self.machine.frames)
        assert statistics.pages["packed"] == len(self.machine.packed)

    @invariant()
    def maps_for_monitors_are_true_and_their_changes_noticed(self) -> None:
        """Codes say what `segments` says of each page; they never change without the version of the space."""
        maps: dict[SpaceId, tuple[Hashable, tuple[bytes, ...]]] = {}
        for space in self.models:
            codes = self.pager.page_codes(space)
            maps[space] = self.pager.map_version(space), codes
            before = self.maps.get(space)
            if before is not None and before[0] == maps[space][0]:
                assert before[1] == codes
                continue
            for view, found in zip(self.pager.segments(space), codes, strict=True):
                pages = [
                    STATES.index(page.state.value)
                    | SHARED * (page.shared_spaces > 1)
                    | BEHIND_WINDOW * page.behind_window
                    for page in view.pages
                ]
                pages += [] if view.tail is None else [STATES.index(view.tail.state.value)]
                assert [code & ~PINNED for code in found] == pages
            pinned = sum(bool(code & PINNED) for found in codes for code in found)
            assert pinned == len(self.pager.pinned_pages(space))
        self.maps = maps

    @invariant()
    def bytes_are_those_of_what_is_held(self) -> None:
        """P21: a frame takes its page's bytes, a packed tail those of its tokens and no more, an absent page none."""
        for space, model in self.models.items():
            held_bytes = 0
            for view in self.pager.segments(space):
                page_bytes = model.page_bytes[view.group]
                frames = [*view.growth_frames, *(page.frame for page in view.pages)]
                tail_bytes = 0
                if view.tail is not None and view.tail.state == "packed":
                    tail_bytes = -(-page_bytes * len(self.machine.packed[view.tail.page_id]) // PAGE_TOKENS)
                elif view.tail is not None and view.tail.frame is not None:
                    tail_bytes = page_bytes
                assert view.tail is None or view.tail.ram_bytes == tail_bytes
                held_bytes += page_bytes * sum(frame is not None for frame in frames) + tail_bytes
            assert self.pager.residency(space).resident_bytes == held_bytes

    @invariant()
    def steps_read_the_truth(self) -> None:
        """A ready space reads exactly what was appended; no page is in neither tier."""
        for space, model in self.models.items():
            assert self.pager.tokens(space) == len(model.serials)
            for view in self.pager.segments(space):
                self._check_pages(space, view.group)
            if not self.pager.is_ready(space):
                continue
            for group in range(self.group_count):
                table, start = self.pager.block_table(space, GroupId(group)), self.first_seen(space, group)
                first = self.pager.first_page(space, GroupId(group))
                assert first == start // PAGE_TOKENS, "all that is seen, and no page more"
                read = [
                    self.machine.frames[table[p // PAGE_TOKENS - first]][p % PAGE_TOKENS]
                    for p in range(start, len(model.serials))
                ]
                assert read == self.expected(space, group)[start:]
                assert (first + len(table)) * PAGE_TOKENS >= len(model.serials) + self.wanted.get(space, 0)

    @invariant()
    def nobody_keeps_what_nobody_sees(self) -> None:
        """A page behind the window of all spaces that map it has a frame only while it is not durable or on its way."""
        seen: set[PageId] = set()
        behind: dict[PageId, str] = {}
        for space in self.models:
            for view in self.pager.segments(space):
                start = self.first_seen(space, view.group)
                for number, page in enumerate(view.pages):
                    is_behind = (number + 1) * PAGE_TOKENS <= start
                    assert page.behind_window == is_behind
                    if is_behind:
                        behind[page.ref.page_id] = page.state
                    else:
                        seen.add(page.ref.page_id)
        kept = {page for page, state in behind.items() if state == "clean"} - seen
        assert not kept, "no cut is under way between two rules"

    def _check_pages(self, space: SpaceId, group: GroupId) -> None:
        """Every page is in the tier its state says, with its content, and lost exactly when its load failed."""
        view = self.pager.segments(space)[group]
        expected = self.expected(space, group)
        first_lost: list[int] = []
        for index, page in enumerate(view.pages):
            content = expected[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            if page.state in ("clean", "evicted"):
                assert list(self.machine.swap[page.ref.page_id]) == content
            if page.state in ("sealed_dirty", "writing", "clean"):
                assert page.frame is not None
                assert self.machine.frames[page.frame] == content
            if page.state == "lost":
                first_lost.append(index * PAGE_TOKENS)
            assert (page.state == "lost") == (page.ref.page_id in self.lost_pages)
        if view.tail is not None:
            assert (view.tail.state == "lost") == (view.tail.page_id in self.lost_pages)
            if view.tail.state == "filling":
                assert view.tail.frame is not None
                assert (
                    self.machine.frames[view.tail.frame][: view.tail.tokens]
                    == expected[len(view.pages) * PAGE_TOKENS :]
                )
            if view.tail.state == "packed":
                assert list(self.machine.packed[view.tail.page_id]) == expected[len(view.pages) * PAGE_TOKENS :]
        start = self.first_seen(space, group)
        first_seen_lost = [position for position in first_lost if position + PAGE_TOKENS > start][:1]
        if first_seen_lost:
            lost_at = self.pager.lost_at(space)
            assert lost_at is not None
            assert lost_at <= first_seen_lost[0]

    # ---- nothing is stuck -------------------------------------------------------------------------------------------

    def demand_is_met(self, data: st.DataObject) -> None:
        """With a disk that answers, every demand that fits what is usable is met (P21: nothing is kept for ever)."""
        self.heal()
        for space, model in self.models.items():
            if not model.active and self.pager.lost_at(space) is None:
                self._commit(space)
        for _ in range(200):
            self.send(ev.Tick())
            for page, content in list(self.machine.writes.items()):
                del self.machine.writes[page]
                self.machine.swap[page] = content
                self.send(ev.WriteDone(page))
            for page in list(self.machine.loads):
                self._load_ends(page, fails=False)
            self.heal()
            # while writes fail, the next trial may be some ticks away
            if not self.machine.writes and not self.machine.loads and not self.pager.writes_fail:
                break
        assert not self.machine.writes
        assert not self.machine.loads
        if self.pager.fits(self.demand_bytes()):
            assert self.pager.statistics().waiting_spaces == 0
            assert all(self.pager.is_ready(space) for space, model in self.models.items() if model.active)
            statistics = self.pager.statistics()
            assert statistics.resident_bytes + statistics.in_flight_bytes <= statistics.budget_bytes
            assert statistics.resident_bytes <= max(statistics.high_mark_bytes, statistics.pinned_bytes)
            self._quotas_are_met()

    def _quotas_are_met(self) -> None:
        """At rest a namespace has more than its quota only where all it has is held."""
        statistics = self.pager.statistics()
        for namespace, quota_bytes in statistics.quotas.items():
            spaces = [space for space in self.pager.spaces if space.namespace == namespace]
            pages = {page.page_id: page for space in spaces for _, page in space.needed() if page.held}
            growth = [page for space in spaces for segment in space.segments for page in segment.growth]
            held_bytes = sum(page.page_bytes for page in (*pages.values(), *growth))
            assert statistics.namespaces.get(namespace, 0) <= max(quota_bytes, held_bytes)

    def teardown(self) -> None:
        """When all spaces are gone and the disk has answered, nothing is left anywhere."""
        if not hasattr(self, "pager"):
            return
        for space in list(self.models):
            self.send(ev.SpaceClosed(space))
            del self.models[space]
        for page, content in list(self.machine.writes.items()):
            self.machine.swap[page] = content
            self.send(ev.WriteDone(page))
        for page in list(self.machine.loads):
            self._load_ends(page, fails=False)
        assert not self.machine.frames
        assert not self.machine.packed
        assert not self.machine.swap
        assert self.pager.statistics().resident_bytes == 0
        assert self.pager.statistics().in_flight_bytes == 0
        self.pager.check_integrity()


PagerMachine.TestCase.settings = settings(
    max_examples=30 if SAME_EXAMPLES else 150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPagerMachine = PagerMachine.TestCase
