// Gauges of budget and disk, the sparkline of swap traffic, and the counts of turns.

import { bytes, count, percent, plural } from "/static/state.js";

const SPAN_S = 120;
const SPEED_S = 5;
const [WIDTH, HEIGHT] = [120, 36];
const WARN = 0.85;
const FULL = 0.97;

export class Figures {
  #state;
  #asked = 0;

  constructor(state) {
    this.#state = state;
    setInterval(() => this.ask(), 1000);
  }

  ask() {
    if (!this.#asked) this.#asked = requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#asked = 0;
    const { figures } = this.#state;
    if (figures.budget_bytes === undefined) return;
    gauge("budget", figures.resident_bytes, figures.budget_bytes);
    const pressure = figures.memory_pressure && figures.memory_pressure !== "none" ? `, memory pressure ${figures.memory_pressure}` : "";
    say("budget-more", `${plural(figures.frames, "frame")}, ${count(figures.evictions)} evictions, ${count(figures.faults)} faults${pressure}`);
    const swapped = figures.swap !== "off";
    gauge("disk", figures.disk_used_bytes, figures.quota_bytes);
    const trouble = figures.disk && figures.disk !== "ok" ? `disk ${figures.disk}: ${figures.disk_reason ?? ""}` : "";
    say("disk-more", trouble || (swapped ? `pages ${bytes(figures.swap_bytes)}, disk is well` : "swap is off: nothing is written"));
    this.#traffic();
    say("running", count(figures.running));
    say("queued", count(figures.queued));
    const paused = figures.preempted ? `, ${count(figures.preempted)} preempted` : "";
    const rate = figures.prompt_tokens ? figures.cached_tokens / figures.prompt_tokens : null;
    const thrashing = figures.thrashing ? ", thrashing" : "";
    say("turns-more", `${percent(rate)} of prompts reused, ${plural(figures.turns, "turn")}${paused}${thrashing}`);
  }

  #traffic() {
    const rates = this.#state.rates(SPAN_S);
    const now = this.#state.now();
    const most = Math.max(1, ...rates.map((rate) => Math.max(rate.read, rate.written)));
    const points = (name) =>
      rates
        .map((rate) => {
          const x = WIDTH * (1 - (now - rate.time_s) / SPAN_S);
          return `${x.toFixed(1)},${(HEIGHT - 1 - (HEIGHT - 3) * (rate[name] / most)).toFixed(1)}`;
        })
        .join(" ");
    const spark = document.getElementById("traffic");
    spark.querySelector(".in").setAttribute("points", points("read"));
    spark.querySelector(".out").setAttribute("points", points("written"));
    const lately = rates.filter((rate) => rate.time_s > now - SPEED_S);
    const mean = (name) => (lately.length ? lately.reduce((sum, rate) => sum + rate[name], 0) / lately.length : 0);
    say("in-text", `${bytes(mean("read"))}/s`);
    say("out-text", `${bytes(mean("written"))}/s`);
    say("speed", mean("tokens").toFixed(1));
    const { figures } = this.#state;
    say("traffic-more", `top ${bytes(most === 1 ? 0 : most)}/s; since the start ${bytes(figures.bytes_read)} in, ${bytes(figures.bytes_written)} out`);
    spark.setAttribute("aria-label", `swap traffic: ${bytes(mean("read"))} a second in, ${bytes(mean("written"))} a second out`);
  }
}

function gauge(id, used, most) {
  const element = document.getElementById(id);
  const part = most ? Math.min(1, used / most) : 0;
  element.firstElementChild.style.transform = `scaleX(${part.toFixed(4)})`;
  element.dataset.state = part > FULL ? "full" : part > WARN ? "warn" : "ok";
  element.setAttribute("aria-valuemax", most || used || 1);
  element.setAttribute("aria-valuenow", Math.min(used, most || used));
  const words = most ? `${bytes(used)} of ${bytes(most)}, ${percent(used / most)}` : bytes(used);
  element.setAttribute("aria-valuetext", words);
  say(`${id}-text`, words);
}

function say(id, words) {
  const element = document.getElementById(id);
  if (element.textContent !== words) element.textContent = words;
}
