"""Measures how smooth the page is with many pages: `python -m tests.gateway.frames` prints one JSON object.

A made-up daemon changes some agents four times a second; a headless Chromium shows the page, still at first and then
scrolling. Frames are the times between two animation frames (16.7 ms at 60 a second); a long task is what the browser
calls so, work of more than 50 ms that nothing can interrupt. Not a test: figures depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from threading import Event, Thread

from tests.front.service import serving
from tests.gateway.monitored import MonitoredDaemon
from tests.gateway.serving import gateway
from tests.support.chromium import browser, find_chromium, why_not
from tests.support.daemon import short_folder

OBSERVE = """(() => {
  globalThis.long = [];
  new PerformanceObserver((list) => long.push(...list.getEntries().map((each) => each.duration)))
    .observe({ type: "longtask", buffered: false });
})()"""
FRAMES = """((seconds, scroll) => new Promise((done) => {
  const frames = [];
  const box = document.getElementById("map-scroll");
  let last = performance.now();
  const end = last + 1000 * seconds;
  long.length = 0;
  const frame = (now) => {
    frames.push(now - last);
    last = now;
    if (scroll) box.scrollTop = (box.scrollTop + 9) % (box.scrollHeight - box.clientHeight);
    if (now < end) requestAnimationFrame(frame);
    else done({ frames, long: [...long] });
  };
  requestAnimationFrame(frame);
}))"""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--pages", type=int, default=200, help="of each agent")
    parser.add_argument("--changing", type=int, default=20, help="agents that change, four times a second")
    parser.add_argument("--seconds", type=float, default=10.0)
    wanted = parser.parse_args()
    program = find_chromium()
    if program is None:
        print(why_not(), file=sys.stderr)
        return 1
    daemon = MonitoredDaemon(agents=wanted.agents, pages=wanted.pages)
    over = Event()

    def churn() -> None:
        while not over.wait(0.25):
            daemon.do(lambda: daemon.churn(wanted.changing))

    with (
        short_folder() as folder,
        serving(folder / "kvd.sock", daemon),
        gateway(folder / "kvd.sock") as served,
        browser(program) as chromium,
    ):
        page = chromium.page()
        started_s = time.monotonic()
        page.open(served.url + "/")
        page.until("kvd.map.drawn > 0", "the map is drawn")
        told: dict[str, object] = {"agents": wanted.agents, "pages": wanted.agents * wanted.pages}
        told["first_map_ms"] = round(1000 * (time.monotonic() - started_s))
        page.run(OBSERVE)
        thread = Thread(target=churn)
        thread.start()
        try:
            for name, scroll in (("still", "false"), ("scrolling", "true")):
                found = page.run(f"{FRAMES}({wanted.seconds}, {scroll})")
                frames = sorted(found["frames"])
                told[name] = {
                    "frames": len(frames),
                    "median_ms": round(frames[len(frames) // 2], 1),
                    "p95_ms": round(frames[int(len(frames) * 0.95)], 1),
                    "longest_ms": round(frames[-1], 1),
                    "long_tasks": len(found["long"]),
                    "longest_task_ms": round(max(found["long"], default=0.0), 1),
                }
        finally:
            over.set()
            thread.join()
        told["complaints"] = page.complaints()
    print(json.dumps(told, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
