"""Conservation, proved by counting everything again: frames, bytes, references, states.

May import the other modules of kvd.vm but pager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvd.ids import Namespace, PageId
from kvd.vm.address_space import AddressSpace
from kvd.vm.errors import IntegrityError
from kvd.vm.page import IN_FLIGHT, IN_RAM, LOADING, READABLE, RESIDENT, STORED, Page, PageState
from kvd.vm.page_table import PageTable

TAIL_STATES = frozenset(
    {PageState.FILLING, PageState.PACKED, PageState.STASHED, PageState.LOADING_TAIL, PageState.LOST}
)
"""States of a private tail."""

SEALED_STATES = frozenset(PageState) - {
    PageState.FILLING,
    PageState.PACKED,
    PageState.STASHED,
    PageState.LOADING_TAIL,
    PageState.RELEASED,
}
"""States of a sealed page."""


def check(table: PageTable, spaces: Iterable[AddressSpace], more: Iterable[str] = ()) -> None:
    """Raise unless frames, bytes, references and states all agree.

    Args:
        table: the page table.
        spaces: all address spaces.
        more: problems found elsewhere, reported with the others.

    Raises:
        IntegrityError: `data["problems"]` lists every disagreement.
    """
    spaces = list(spaces)
    problems = [*more, *_frame_problems(table), *_byte_problems(table), *_reference_problems(table, spaces)]
    for space in spaces:
        problems.extend(_space_problems(space))
    if problems:
        raise IntegrityError(f"the pager's books do not agree: {'; '.join(problems)}", problems=problems)


def _frame_problems(table: PageTable) -> Iterator[str]:
    held = [page.frame for page in table if page.frame is not None]
    for page in table:
        if (page.frame is not None) != (page.state in RESIDENT):
            yield f"page {page.page_id} is {page.state} with frame {page.frame}"
        if page.state is PageState.RELEASED:
            yield f"released page {page.page_id} is still known"
    # Resident frames include those in transit, which loads own before their bytes have come.
    every = Counter([*held, *table.free_frames])
    if any(count > 1 for count in every.values()):
        yield f"frames used twice: {sorted(frame for frame, count in every.items() if count > 1)}"
    if len(held) + len(table.free_frames) != table.issued_frames:
        yield f"{len(held)} frames held + {len(table.free_frames)} free != {table.issued_frames} issued"


def _byte_problems(table: PageTable) -> Iterator[str]:
    budget = table.budget
    resident_bytes = sum(_ram_bytes(table, page) for page in table)
    in_flight_bytes = sum(page.page_bytes for page in table if page.state is PageState.WRITING)
    in_flight_bytes += max((page.page_bytes for page in table if page.state in LOADING), default=0)
    for page in table:
        if page.ram_bytes != _ram_bytes(table, page):
            yield f"page {page.page_id} is {page.state} of {page.tokens} tokens with {page.ram_bytes} bytes in RAM"
    if resident_bytes != budget.resident_bytes:
        yield f"{resident_bytes} bytes resident, {budget.resident_bytes} booked"
    namespaces: Counter[Namespace] = Counter()
    for page in table:
        if page.ram_bytes:
            namespaces[page.namespace] += page.ram_bytes
    if namespaces != budget.namespaces:
        yield f"resident bytes of namespaces are {dict(namespaces)}, {budget.namespaces} are booked"
    if in_flight_bytes != budget.in_flight_bytes:
        yield f"{in_flight_bytes} bytes in flight, {budget.in_flight_bytes} booked"
    if budget.total_bytes > budget.budget_bytes and not budget.converging:
        yield f"{budget.total_bytes} bytes held exceed the budget of {budget.budget_bytes}"


def _ram_bytes(table: PageTable, page: Page) -> int:
    if page.state is PageState.PACKED:
        return table.packed_bytes(page.page_bytes, page.tokens)
    return page.page_bytes if page.state in RESIDENT else 0


def _reference_problems(table: PageTable, spaces: list[AddressSpace]) -> Iterator[str]:
    mappings: Counter[PageId] = Counter()
    for space in spaces:
        for segment in space.segments:
            for page in (*segment.mapped(), *segment.growth):
                mappings[page.page_id] += 1
                if table.find(page.page_id) is not page:
                    yield f"space {space.space} maps unknown page {page.page_id}"
                if page.namespace != space.namespace:
                    yield f"space {space.space} of {space.namespace} maps page {page.page_id} of {page.namespace}"
                if page.users.get(space.space) is not space.use:
                    yield f"page {page.page_id} does not know its user {space.space}"
    for page in table:
        if len(page.users) != mappings[page.page_id]:
            yield f"page {page.page_id} has {len(page.users)} users and {mappings[page.page_id]} mappings"
        if not page.users and page.state not in IN_FLIGHT:
            yield f"page {page.page_id} is {page.state} though nobody maps it"
        if page.is_behind_window and page.droppable:
            yield f"page {page.page_id} keeps a frame though nobody sees it"


def _space_problems(space: AddressSpace) -> Iterator[str]:
    name = f"space {space.space}"
    full, part = divmod(space.tokens, space.page_tokens)
    needed = [page for _, page in space.needed()]
    every = [page for segment in space.segments for page in (*segment.mapped(), *segment.growth)]
    counted = (
        sum(page.state not in READABLE for page in needed),
        sum(page.page_bytes for page in needed if page.state in STORED),
        sum(page.state is PageState.LOST for page in needed),
        sum(page.state is PageState.PACKED for page in needed),
        sum(page.state in IN_RAM for page in every),
    )
    use = space.use
    booked = (use.absent_pages, use.stored_bytes, use.lost_pages, use.packed_pages, use.ram_pages)
    if counted != booked:
        yield f"{name} has (absent pages, stored bytes, lost, packed, in RAM) {counted}, booked are {booked}"
    behind = {page.page_id for segment in space.segments for page in segment.sealed[: segment.first_page]}
    if behind != space.use.behind_window:
        yield f"{name} has {sorted(behind)} behind its windows, booked are {sorted(space.use.behind_window)}"
    for segment in space.segments:
        if segment.first_page != space.first_page(segment, space.tokens):
            yield f"{name} group {segment.group} needs its pages from {segment.first_page} on"
        where = f"{name} group {segment.group}"
        if len(segment.sealed) != full or (segment.tail.tokens if segment.tail else 0) != part:
            yield f"{where} does not hold {space.tokens} tokens"
        for page in (*segment.mapped(), *segment.growth):
            if page.group != segment.group or page.page_bytes != segment.page_bytes:
                yield f"{where} maps page {page.page_id} of another shape"
        for page in segment.sealed:
            if page.state not in SEALED_STATES or page.key is None or page.tokens != space.page_tokens:
                yield f"{where} has sealed page {page.page_id} as {page.state} with {page.tokens} tokens"
        tail = segment.tail
        if tail is not None:
            if tail.state not in TAIL_STATES or len(tail.users) != 1 or tail.key is not None:
                yield f"{where} has a tail as {tail.state} with {len(tail.users)} users"
            if tail.durable_tokens > tail.tokens:
                yield f"{where} has {tail.durable_tokens} of {tail.tokens} tail tokens durable"
            if tail.state in (PageState.STASHED, PageState.LOADING_TAIL) and tail.durable_tokens != tail.tokens:
                yield f"{where} has a tail in neither tier"
        for page in segment.growth:
            if page.state is not PageState.FILLING or page.tokens or len(page.users) != 1:
                yield f"{where} has growth page {page.page_id} as {page.state} with {page.tokens} tokens"
        if segment.growth and not space.use.active:
            yield f"{where} keeps growth pages though inactive"
