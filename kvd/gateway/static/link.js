// The connection to the gateway: server-sent events read with fetch, since EventSource can send no key.
//
// One request at a time. It is made again when it ends, when nothing came for too long (the gateway pings), when the
// network is back and when the page is looked at again; waits grow to ten seconds. Last-Event-ID lets the gateway send
// only what changed in between.

const SILENT_MS = 40_000;
const FIRST_WAIT_MS = 500;
const LAST_WAIT_MS = 10_000;
const HIDDEN_MS = 60_000;
const STORED = "kvd-key";

/** What a Link tells: `picture(object)`, `status(state, words)`, `key(wrong)` when a key is wanted. */
export class Link {
  #tell;
  #lastId = null;
  #wait = FIRST_WAIT_MS;
  #abort = null;
  #timer = 0;
  #silent = 0;
  #hidden = 0;
  #awaySince = null;
  #asking = false;
  #again = false;
  reconnects = 0;

  constructor(tell) {
    this.#tell = tell;
    addEventListener("online", () => this.#now());
    document.addEventListener("visibilitychange", () => this.#seen());
  }

  start() {
    void this.#run();
  }

  /** Use a key; kept for this tab alone. */
  useKey(key) {
    sessionStorage.setItem(STORED, key);
    this.#asking = false;
    this.#lastId = null;
    this.start();
  }

  async #run() {
    if (this.#abort) return;
    clearTimeout(this.#timer);
    const abort = (this.#abort = new AbortController());
    let words = "the stream ended";
    try {
      await this.#read(abort);
    } catch (error) {
      words = error instanceof Refused ? error.message : "the gateway does not answer";
    }
    clearTimeout(this.#silent);
    this.#abort = null;
    if (this.#asking || this.#hidden < 0) return;
    this.#awaySince ??= new Date();
    this.#tell.status("away", `${words}, since ${clock(this.#awaySince)}; trying again`);
    this.#timer = setTimeout(() => this.#run(), this.#wait);
    this.#wait = Math.min(LAST_WAIT_MS, this.#wait * 2) * (0.9 + 0.2 * Math.random());
  }

  async #read(abort) {
    const headers = { accept: "text/event-stream" };
    const key = sessionStorage.getItem(STORED);
    if (key) headers["x-api-key"] = key;
    if (this.#lastId) headers["last-event-id"] = this.#lastId;
    this.#listen(abort);
    const response = await fetch("/monitor/stream", { headers, signal: abort.signal, cache: "no-store" });
    if (response.status === 401) {
      this.#asking = true;
      sessionStorage.removeItem(STORED);
      this.#tell.status("warn", "needs an API key");
      this.#tell.key(key !== null);
      return;
    }
    if (!response.ok) throw new Refused((await response.json()).error.message);
    if (this.#again) this.reconnects += 1;
    this.#again = true;
    this.#awaySince = null;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      this.#listen(abort);
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      blocks.forEach((block) => this.#event(block));
    }
  }

  #event(block) {
    let id = null;
    let data = null;
    for (const line of block.split("\n")) {
      if (line.startsWith("id: ")) id = line.slice(4);
      else if (line.startsWith("data: ")) data = line.slice(6);
    }
    if (data === null) return;
    this.#wait = FIRST_WAIT_MS;
    this.#tell.picture(JSON.parse(data));
    this.#lastId = id;
  }

  #listen(abort) {
    clearTimeout(this.#silent);
    this.#silent = setTimeout(() => abort.abort(), SILENT_MS);
  }

  #now() {
    if (this.#asking || this.#abort) return;
    this.#wait = FIRST_WAIT_MS;
    this.start();
  }

  // a page that nobody looks at lets go of its place; `#hidden` is -1 once it has
  #seen() {
    clearTimeout(this.#hidden);
    if (document.hidden) {
      this.#hidden = setTimeout(() => {
        this.#hidden = -1;
        clearTimeout(this.#timer);
        this.#abort?.abort();
      }, HIDDEN_MS);
    } else {
      this.#hidden = 0;
      this.#now();
    }
  }
}

class Refused extends Error {}

/** Hours, minutes and seconds of a date. */
export function clock(date) {
  return times.format(date);
}

// a formatter is dear to make and cheap to use
const times = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
