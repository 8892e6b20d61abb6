"""Checks of what the data folder holds, one model's folder after the other: logs, pages, catalog, leftovers.

Import kvd.ops, kvd.quant and this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvd.doctor.context import Context
from kvd.doctor.deep import DeepResult, verify_all
from kvd.doctor.findings import Check, counted, notice, ok, problem
from kvd.doctor.store_look import ABSENT, NO_FILE, UNREADABLE, StoreLook, look
from kvd.ops.sizes import format_size
from kvd.quant.conditioning import load_conditioning
from kvd.quant.errors import ConditioningDamaged

NAMED: Final = 5


def check_stores(context: Context) -> Iterator[Check]:
    """Catalog, logs and swap files of every model agree."""
    for fingerprint in context.fingerprints:
        facts: dict[str, object] = {"fingerprint": fingerprint, "model": context.title(fingerprint)}
        try:
            found = look(context, fingerprint)
        except OSError as error:
            yield problem(
                "store",
                f"{context.title(fingerprint)} cannot be read: {error}",
                "check the disk and the modes",
                **facts,
            )
            continue
        title = context.title(fingerprint)
        repair = _command(context, "--repair")
        yield _logs(found, title, repair, facts)
        yield _pages(found, title, repair, facts, known=context.knows(fingerprint))
        yield _catalog(found, title, _command(context, "--rebuild"), facts)
        if not found.live:  # a running daemon's unfinished files and pages without records are no leftovers
            yield _leftovers(found, title, repair, facts)


def check_deep(context: Context) -> Iterator[Check]:
    """Every page file and log record has its checksum (`--deep`)."""
    if not context.options.deep or not context.state.may_be_searched:
        return
    results = verify_all(context)
    yield _deep(results, _command(context, "--repair", "--deep"))


def check_constants(context: Context) -> Iterator[Check]:
    """The constants of conditioned page formats are whole: pages cannot be read without them."""
    damaged: dict[str, str] = {}
    kept = context.inventory.of_kind("constants")
    for entry in kept:
        try:
            load_conditioning(entry.path)
        except ConditioningDamaged as error:
            damaged[str(entry.path)] = error.message
    if damaged:
        yield problem(
            "constants",
            "; ".join(list(damaged.values())[:NAMED]),
            f"{_command(context, '--repair')} writes the model's own anew; restore others, or their pages are lost",
            damaged=damaged,
        )
    elif kept:
        yield ok("constants", f"{counted(len(kept), 'set')} of conditioning constants, whole", damaged={})


def _command(context: Context, *flags: str) -> str:
    """How to repair; a daemon has to be stopped first."""
    command = context.options.repair(*flags)
    return f"stop the daemon ({context.options.shutdown()}), then: {command}" if context.lock.held else command


def _logs(found: StoreLook, title: str, repair: str, facts: dict[str, object]) -> Check:
    by_kind = {
        kind: [t for t in found.troubles if t.kind == kind] for kind in ("unreadable", "corrupt", "stale", "torn")
    }
    stale = found.stale_agents()
    forks = () if found.live else found.report.facts  # a running daemon's are about to have logs
    facts = facts | {
        "forks": list(forks),
        "agents": len(found.report.agents),
        "log_bytes": found.report.log_bytes,
        "troubles": [
            {"log": t.log, "agent": list(t.agent or ()), "kind": t.kind, "lost_bytes": t.lost_bytes, "reason": t.reason}
            for t in found.troubles
        ],
        "stale": {f"{namespace}/{agent}": why for (namespace, agent), why in stale.items()},
    }
    misplaced = [t for t in by_kind["unreadable"] if t.reason.startswith(NO_FILE)]
    if misplaced:
        words = ", ".join(f"{t.log}: {t.reason}" for t in misplaced[:NAMED])
        return problem(
            "logs",
            f"{title}: not served: {words}",
            "stop the daemon and put the file itself back under that name; nothing is deleted until then",
            **facts,
        )
    if by_kind["unreadable"]:
        words = ", ".join(f"{t.log}: {t.reason}" for t in by_kind["unreadable"][:NAMED])
        return problem(
            "logs",
            f"{title}: the disk refuses to read {words}",
            "check the disk and the modes; nothing is deleted",
            **facts,
        )
    if by_kind["corrupt"]:
        words = "; ".join(
            f"{_agent(t.agent) or t.log} loses {t.lost_bytes} bytes (wrong {t.reason})"
            for t in by_kind["corrupt"][:NAMED]
        )
        return problem(
            "logs",
            f"{title}: committed records changed: {words}",
            f"{repair}; it keeps the rest in quarantine",
            **facts,
        )
    if stale:
        words = "; ".join(f"{_agent(ref)}: {why}" for ref, why in list(stale.items())[:NAMED])
        return problem(
            "logs",
            f"{title}: the catalog knows more than the logs: {words}",
            f"restore the logs, or: {repair}",
            **facts,
        )
    if by_kind["torn"]:
        return notice(
            "logs",
            f"{title}: {counted(len(by_kind['torn']), 'log')} with an append that never finished or was durable",
            f"nothing: the next start cuts it off; or: {repair}",
            **facts,
        )
    if forks:
        return notice(
            "logs",
            f"{title}: {'; '.join(forks[:NAMED])}",
            f"nothing: the next start makes the logs of forks that can be finished; or: {repair}",
            **facts,
        )
    return ok(
        "logs",
        f"{title}: {counted(len(found.report.agents), 'agent')}, {format_size(found.report.log_bytes)} of logs",
        **facts,
    )


def _pages(found: StoreLook, title: str, repair: str, facts: dict[str, object], *, known: bool) -> Check:
    refused = {page_id: why for page_id, why in found.missing.items() if why.startswith(UNREADABLE)}
    bad = {page_id: why for page_id, why in found.missing.items() if why != ABSENT and page_id not in refused}
    lost = [page_id for page_id, why in found.missing.items() if why == ABSENT and found.is_lost(page_id)]
    gone = [page_id for page_id in found.missing if page_id not in bad | refused and page_id not in lost]
    unknown = sorted({format_id for _, format_id in found.report.unknown_formats})
    facts = facts | {
        "pages": len(found.report.pages),
        "swap_bytes": found.report.swap_bytes,
        "bad": bad,
        "refused": refused,
        "lost": lost,
        "gone": gone,
        "unknown_formats": unknown,
        "layouts_known": known,
    }
    if bad:
        words = "; ".join(f"{page_id}: {why}" for page_id, why in list(bad.items())[:NAMED])
        return problem(
            "pages",
            f"{title}: {counted(len(bad), 'page file')} not as the logs name: {words}",
            f"{repair}; their tokens are computed again",
            **facts,
        )
    if refused:  # they may be good, so no repair touches them
        words = "; ".join(f"{page_id}: {why}" for page_id, why in list(refused.items())[:NAMED])
        return problem(
            "pages",
            f"{title}: the disk refuses to read {counted(len(refused), 'page file')}: {words}",
            "check the disk and the modes; their tokens are computed again",
            **facts,
        )
    if lost:
        return problem(
            "pages",
            f"{title}: {counted(len(lost), 'page file')} gone: {', '.join(lost[:NAMED])}",
            f"restore them, or: {repair}; their tokens are computed again",
            **facts,
        )
    if unknown and known:
        return problem(
            "pages",
            f"{title}: this kvd cannot read pages in {', '.join(unknown)}: their conditioning constants are missing",
            "restore <data dir>/conditioning; otherwise their tokens are computed again",
            **facts,
        )
    text = f"{title}: {counted(len(found.report.pages), 'page')}, {format_size(found.report.swap_bytes)}"
    if gone:
        return notice(
            "pages",
            f"{text}; {len(gone)} more lost earlier",
            "nothing: their tokens are computed again when the agents continue",
            **facts,
        )
    if not known:
        text += "; its page layouts are not known here: headers and names were checked, lengths were not"
    return ok("pages", text, **facts)


def _catalog(found: StoreLook, title: str, rebuild: str, facts: dict[str, object]) -> Check:
    behind, left = found.rows_behind(), found.rows_left()
    unread = found.catalog_unread
    facts = facts | {
        "judged": not (found.live or unread),
        "fault": found.catalog_fault,
        "unread": unread,
        "behind_rows": behind,
        "left_rows": left,
    }
    if found.live:
        return ok("catalog", f"{title}: not judged, a daemon writes it", **facts)
    if unread:  # says nothing against it, so nothing is advised that would replace it
        return notice("catalog", f"{title}: not judged: {unread}", "heal what the line names, then look again", **facts)
    if found.catalog_fault:
        return problem(
            "catalog", f"{title}: it cannot be trusted: {found.catalog_fault}", f"{rebuild}; the logs hold all", **facts
        )
    if found.catalog is None and (found.report.agents or found.report.pages):
        return notice("catalog", f"{title}: there is none", f"nothing: the next start makes it; or: {rebuild}", **facts)
    if behind or left:
        return notice(
            "catalog",
            f"{title}: {counted(behind, 'row')} missing or old, {left} left over",
            f"nothing: the next start corrects it; or: {rebuild}",
            **facts,
        )
    rows = 0 if found.catalog is None else len(found.catalog.pages) + len(found.catalog.agents)
    return ok("catalog", f"{title}: {counted(rows, 'row')}, as the logs and pages say", **facts)


def _leftovers(found: StoreLook, title: str, repair: str, facts: dict[str, object]) -> Check:
    orphans, temp = found.report.orphans, found.report.temp_files_deleted
    facts = facts | {
        "orphans": len(orphans),
        "orphan_bytes": found.report.orphan_bytes,
        "temp_files": list(temp),
    }
    if orphans or temp:
        return notice(
            "leftovers",
            f"{title}: {counted(len(orphans), 'page')} that no log names ({format_size(found.report.orphan_bytes)}), "
            f"{counted(len(temp), 'unfinished file')}",
            f"nothing: the next start removes them; or: {repair}",
            **facts,
        )
    return ok("leftovers", f"{title}: none", **facts)


def _deep(results: list[DeepResult], repair: str) -> Check:
    bad = {page_id: why for each in results for page_id, why in each.bad_pages.items()}
    unreadable = [path for each in results for path in each.unreadable]
    logs = [name for each in results for name in each.bad_logs]
    pages, records = sum(each.pages for each in results), sum(each.records for each in results)
    read_bytes = sum(each.read_bytes for each in results)
    facts: dict[str, object] = {
        "pages": pages,
        "records": records,
        "read_bytes": read_bytes,
        "bad_pages": bad,
        "bad_logs": logs,
        "unreadable": unreadable,
    }
    text = f"{counted(pages, 'page')} and {counted(records, 'log record')}, {format_size(read_bytes)} read"
    if unreadable:
        return problem(
            "deep", f"{text}; cannot be read: {', '.join(unreadable[:NAMED])}", "heal what the line names", **facts
        )
    if bad or logs:
        words = "; ".join([*(f"{page}: {why}" for page, why in bad.items()), *logs][:NAMED])
        return problem(
            "deep",
            f"{text}; {counted(len(bad), 'page')} and {counted(len(logs), 'log')} not as written: {words}",
            f"{repair}; nothing of them is ever served, tokens are computed again",
            **facts,
        )
    return ok("deep", f"{text}; every checksum holds", **facts)


def _agent(ref: tuple[str, str] | None) -> str:
    return "" if ref is None else "/".join(ref)


__all__ = ["check_constants", "check_deep", "check_stores"]
