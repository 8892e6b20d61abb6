// The time line: evictions, reads and writes of the last minutes as bars, one lane a kind, and the latest as a list.
//
// A bar's height tells how many pages, in powers of two; lanes have names, so colour only repeats. It moves on once a
// second and never in between: nothing here is an animation.

import { clock } from "/static/link.js";
import { bytes, count, plural } from "/static/state.js";

const SPAN_S = 300;
const NARROW_SPAN_S = 120;
const NARROW = 600;
const LISTED = 40;
const AXIS = 18;
const SHORTEST_MS = 450;
const LANES = [
  { kind: "eviction", words: "evicted", color: "--dirty" },
  { kind: "fault", words: "faults", color: "--ram" },
  { kind: "prefetch", words: "read ahead", color: "--moving" },
  { kind: "swap_out", words: "written", color: "--disk" },
  { kind: "miss", words: "misses", color: "--lost" },
];

export class TimeLine {
  #state;
  #canvas = document.getElementById("time");
  #info = document.getElementById("time-info");
  #list = document.getElementById("time-list");
  #count = document.getElementById("time-count");
  #paper = this.#canvas.getContext("2d");
  #asked = 0;
  #drawn_ms = 0;
  #listed = 0;
  #pointer = null;

  constructor(state) {
    this.#state = state;
    new ResizeObserver(() => this.#now()).observe(this.#canvas);
    setInterval(() => this.#now(), 1000);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#now());
    for (const kind of ["pointermove", "pointerdown"]) {
      this.#canvas.addEventListener(kind, (event) => {
        this.#pointer = event.offsetX;
        this.#now();
      });
    }
    this.#canvas.addEventListener("pointerleave", () => (this.#pointer = null));
  }

  /** Events came: they are drawn at once, but not more often than twice a second. */
  ask() {
    if (performance.now() - this.#drawn_ms > SHORTEST_MS) this.#now();
  }

  #now() {
    if (!this.#asked) this.#asked = requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#asked = 0;
    this.#drawn_ms = performance.now();
    const width = this.#canvas.clientWidth;
    const height = this.#canvas.clientHeight;
    if (!width) return;
    const scale = devicePixelRatio;
    if (this.#canvas.width !== Math.round(width * scale) || this.#canvas.height !== Math.round(height * scale)) {
      this.#canvas.width = Math.round(width * scale);
      this.#canvas.height = Math.round(height * scale);
    }
    const style = getComputedStyle(document.documentElement);
    const names = ["--ink", "--line", "--quiet", ...LANES.map((each) => each.color)];
    const colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(name).trim()]));
    const color = (name) => colors[name];
    const paper = this.#paper;
    paper.setTransform(scale, 0, 0, scale, 0, 0);
    paper.clearRect(0, 0, width, height);
    paper.font = "11px system-ui, sans-serif";
    const span = width < NARROW ? NARROW_SPAN_S : SPAN_S;
    const left = 66;
    const lane = (height - AXIS) / LANES.length;
    const now = this.#state.now();
    const xOf = (time_s) => left + ((width - left) * (time_s - now + span)) / span;
    LANES.forEach((each, at) => {
      paper.fillStyle = color("--ink");
      paper.textBaseline = "middle";
      paper.fillText(each.words, 0, lane * (at + 0.5));
      paper.fillStyle = color("--line");
      paper.fillRect(left, Math.round(lane * (at + 1)) - 1, width - left, 1);
    });
    this.#axis(span, now, xOf, height, color);
    let nearest = null;
    const totals = LANES.map(() => 0);
    for (const event of this.#state.events) {
      if (event.time_s < now - span) continue;
      const at = LANES.findIndex((each) => each.kind === event.type);
      const x = xOf(event.time_s);
      if (at < 0) {
        if (event.type !== "turn_preempted") {
          paper.fillStyle = color("--quiet");
          paper.fillRect(x, 0, 1, height - AXIS);
        }
      } else {
        totals[at] += event.pages ?? 1;
        const part = Math.min(1, (1 + Math.log2(event.pages ?? 4)) / 10);
        const tall = Math.max(3, Math.round((lane - 3) * part));
        paper.fillStyle = color(LANES[at].color);
        paper.fillRect(x - 1, Math.round(lane * (at + 1)) - 1 - tall, 3, tall);
      }
      const far = this.#pointer === null ? Infinity : Math.abs(x - this.#pointer);
      if (far < 8 && far <= (nearest?.far ?? Infinity)) nearest = { event, far };
    }
    const told = LANES.map((each, at) => `${count(totals[at])} ${each.words}`).join(", ");
    if (this.#canvas.getAttribute("aria-label") !== told) this.#canvas.setAttribute("aria-label", told);
    const words = `last ${span / 60} minutes: ${plural(totals[0], "page")} evicted, ${count(totals[1])} faulted in`;
    if (this.#count.textContent !== words) this.#count.textContent = words;
    const info = nearest ? `${clock(new Date(nearest.event.time_s * 1000))} ${tellEvent(nearest.event, this.#state)}` : "";
    if (this.#info.textContent !== info) this.#info.textContent = info;
    this.#write();
  }

  #axis(span, now, xOf, height, color) {
    const step = span === NARROW_SPAN_S ? 60 : span / 5;
    this.#paper.fillStyle = color("--quiet");
    this.#paper.textBaseline = "bottom";
    for (let ago = 0; ago <= span; ago += step) {
      const words = ago === 0 ? "now" : `${ago < 60 ? `${ago} s` : `${ago / 60} min`} ago`;
      const half = this.#paper.measureText(words).width / 2;
      const x = Math.min(xOf(now) - 2 * half, Math.max(xOf(now - span), xOf(now - ago) - half));
      this.#paper.fillText(words, x, height);
    }
  }

  #write() {
    const latest = this.#state.events.at(-1)?.number ?? 0;
    if (latest === this.#listed) return;
    const fresh = this.#state.events.filter((event) => event.number > this.#listed).slice(-LISTED);
    this.#listed = latest;
    for (const event of fresh) {
      const item = document.createElement("li");
      const time = document.createElement("time");
      const words = document.createElement("span");
      time.textContent = clock(new Date(event.time_s * 1000));
      words.textContent = tellEvent(event, this.#state);
      item.dataset.kind = event.type;
      item.append(time, words);
      this.#list.prepend(item);
    }
    while (this.#list.children.length > LISTED) this.#list.lastChild.remove();
  }

  /** Begin the list anew: the events were replaced. */
  clear() {
    this.#list.replaceChildren();
    this.#listed = 0;
    this.#now();
  }
}

/** An event in words. */
export function tellEvent(event, state) {
  const agent = state.daemon.namespace === null && event.namespace ? `${event.namespace}/${event.agent}` : event.agent;
  const who = event.agent === undefined ? "" : `${agent}: `;
  const pages = `${plural(event.pages ?? 0, "page")}${event.bytes ? `, ${bytes(event.bytes)}` : ""}`;
  switch (event.type) {
    case "eviction":
      return `${who}${pages} evicted (${EVICTIONS[event.reason] ?? event.reason})`;
    case "fault":
      return `${who}${pages} faulted in`;
    case "prefetch":
      return `${who}${pages} read ahead (${event.reason})`;
    case "swap_out":
      return `${who}${pages} written to disk`;
    case "miss":
      return `${who}miss, ${count(event.cached_tokens)} of ${plural(event.prompt_tokens, "token")} reused${place(event.divergence)}`;
    case "turn_preempted":
      return `${who}made way for an interactive request`;
    case "page_lost":
      return `${who}${pages} lost: ${event.reason ?? event.fault}`;
    case "page_files_lost":
      return `${who}${plural(event.pages ?? 0, "page file")} gone or changed by others' doing`;
    case "disk":
      return `disk ${event.disk}${event.disk_reason ? `: ${event.disk_reason}` : ""}`;
    case "memory":
      return `memory pressure ${event.memory_pressure}`;
    case "budget":
      return `budget is ${bytes(event.budget_bytes)}`;
    case "reload":
      return `configuration ${event.outcome}: ${event.reason ?? (event.outcome === "done" ? event.settings?.join(", ") : "the daemon's log says why")}`;
    case "draining":
      return "the daemon is going down";
    case "gap":
      return GAPS[event.reason] ?? `events are missing (${event.reason})`;
    default:
      return `${who}${event.type}`;
  }
}

const EVICTIONS = {
  room: "others needed the room",
  background: "above the marks",
  asked: "asked for",
  window: "behind the window",
  quota: "disk quota",
};
const GAPS = {
  slow: "events are missing: they came faster than they were read",
  old: "older events are not remembered",
  restart: "the daemon was started again",
};

/** Where a prompt and the stored text part, in words. */
export function place(divergence) {
  return divergence ? `, parts at character ${count(divergence.character)} (token ${count(divergence.token)})` : "";
}
