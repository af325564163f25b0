// The running batch: one lane per request, drawn along its tokens, and above them the last step as
// one bar, to show how its budget of tokens was spent. Below, those who wait.

import { h, reconcile, setText } from "./dom.js";
import { count, duration, plural } from "./format.js";
import { term } from "./hints.js";
import { dye } from "./palette.js";

const MAX_QUEUE_SHOWN = 12;

/** A scale that grows in jumps, so that lanes do not shrink a little with every token. */
export function scaleFor(longest) {
  let scale = 64;
  while (scale < longest) scale *= 1.5;
  return scale;
}

/** Where along the tokens each part of a lane lies: [from, to) in tokens. */
export function partsOf({ prompt, computed, known, fed, cached, drafted = 0, accepted = 0 }) {
  const fedFrom = Math.max(0, computed - fed);
  const found = Math.min(cached ?? 0, fedFrom);
  return {
    cached: [0, found],
    read: [found, Math.min(fedFrom, prompt)],
    written: [Math.max(found, Math.min(fedFrom, prompt)), fedFrom],
    fed: [fedFrom, computed],
    guessed: [computed - accepted, computed],
    refused: [computed, computed + drafted - accepted],
    pending: [computed, Math.max(known, prompt)],
  };
}

/** Reading its prompt (or, after a preemption, its own words again), as opposed to writing. */
export function isReading({ kind, prompt, computed, known, fed }) {
  // A step that checks guessed tokens feeds several as well, but leaves nothing known behind it.
  return kind === "prefill" && (computed - fed < prompt || computed < known - 1);
}

function layAlong(element, [from, to], scale) {
  element.style.left = `${(100 * from) / scale}%`;
  element.style.width = `${(100 * Math.max(0, to - from)) / scale}%`;
}

class Lane {
  constructor({ id }, spotlight) {
    this.parts = new Map(["cached", "read", "written", "pending", "fed", "guessed", "refused"].map((name) =>
      [name, h("span", { class: `part part-${name}` })]));
    this.mark = h("span", { class: "prompt-end" });
    this.adapter = h("span", { class: "lane-adapter" });
    this.doing = h("span", { class: "lane-doing" });
    this.element = h("button", { type: "button", class: "lane", "aria-pressed": "false" },
      h("span", { class: "lane-name" }, `#${id}`),
      h("span", { class: "track" }, ...this.parts.values(), this.mark, this.adapter), this.doing);
    dye(this.element, id);
    this.element.addEventListener("pointerenter", () => spotlight.point(id));
    this.element.addEventListener("pointerleave", () => spotlight.point(null));
    this.element.addEventListener("focus", () => spotlight.point(id));
    this.element.addEventListener("blur", () => spotlight.point(null));
    this.element.addEventListener("click", () => {
      spotlight.togglePin(id);
      this.element.setAttribute("aria-pressed", String(spotlight.pinned === id));
    });
  }

  update({ lane, scale }) {
    const parts = partsOf(lane);
    for (const [name, element] of this.parts) layAlong(element, parts[name], scale);
    layAlong(this.mark, [lane.prompt, lane.prompt], scale);
    const reads = isReading(lane);
    this.element.classList.toggle("is-reading", reads);
    setText(this.doing, doingOf(lane, reads));
    setText(this.adapter, lane.adapter ?? "");
    this.element.dataset.tip = tipOf(lane);
  }
}

function doingOf({ fed, drafted, accepted }, reads) {
  if (!fed) return "waits";
  const guesses = drafted ? ` · ${count(accepted)}/${count(drafted)}` : "";
  return `${reads ? "reads" : "writes"} +${count(fed)}${guesses}`;
}

function tipOf(lane) {
  const { id, prompt, computed, output, cached, pages, preempted } = lane;
  const doing = isReading(lane)
    ? `has read ${count(Math.min(computed, prompt))} of ${plural(prompt, "prompt token")}`
    : `has written ${plural(output, "token")} after a prompt of ${count(prompt)}`;
  const found = cached ? ` The first ${count(cached)} were found in memory.` : "";
  const again = preempted ? ` Pushed out ${plural(preempted, "time")} for want of pages.` : "";
  const adapted = lane.adapter ? ` It runs with the adapter ${lane.adapter}.` : "";
  const kept = lane.drafted ? ` In this step ${count(lane.accepted)} of ${plural(lane.drafted, "guess", "guesses")} were right.` : "";
  return `Request ${id} ${doing}. It holds ${plural(pages, "page")}.${found}${again}${adapted}${kept}`;
}

export class LanesView {
  constructor(root, spotlight) {
    this.spotlight = spotlight;
    this.lanes = new Map();
    this.shares = new Map();
    this.waiters = new Map();
    this.stepText = h("p", { class: "standfirst" });
    this.budget = h("div", { class: "budget", role: "img" });
    this.list = h("div", { class: "lane-list" });
    this.empty = h("p", { class: "faint" }, "Nothing is running. Start the demo load above, or ask something in Chat.");
    this.queueHead = h("h3", {}, term("Queue", "queue"), " ");
    this.queueCount = h("span", { class: "faint" });
    this.queueHead.append(this.queueCount);
    this.queue = h("ul", { class: "queue" });
    const key = (part, ...says) => h("li", {}, h("span", { class: `swatch part-${part}` }), ...says);
    this.guessKeys = [key("guessed", "guessed right"), key("refused", "guessed wrong")];
    root.append(h("h2", {}, term("This step", "batch")), this.stepText, this.budget, this.list, this.empty,
      h("ul", { class: "legend lane-legend" }, key("cached", "found in memory"), key("read", "prompt read"),
        key("written", "written"), key("fed", "fed in this step: ", term("prefill", "prefill"), " or ", term("decode", "decode")),
        key("pending", "prompt to read"), ...this.guessKeys),
      this.queueHead, this.queue);
    spotlight.listen(() => this.light());
  }

  update(snapshot) {
    const { lanes = [], limits = {} } = snapshot;
    const scale = scaleFor(Math.max(0, ...lanes.map(({ known, prompt }) => Math.max(known, prompt))));
    reconcile(this.list, this.lanes, lanes.map((lane) => ({ lane, scale })), ({ lane }) => lane.id,
      ({ lane }) => new Lane(lane, this.spotlight));
    this.empty.hidden = lanes.length > 0;
    for (const key of this.guessKeys) key.hidden = !snapshot.spec;
    this.showBudget(snapshot, lanes, limits.max_num_batched_tokens ?? 0);
    this.showQueue(snapshot);
    this.light();
  }

  showBudget({ step, step_ms: stepMs }, lanes, budget) {
    const fedTo = (some) => some.reduce((sum, lane) => sum + lane.fed, 0);
    const reading = fedTo(lanes.filter(isReading));
    const writing = fedTo(lanes) - reading;
    const took = stepMs ? `, ${duration(stepMs)}` : "";
    setText(this.stepText, `Step ${count(step)}${took}: ${plural(reading, "prompt token")} and ` +
      `${plural(writing, "token")} being written, of at most ${count(budget)}.`);
    this.budget.setAttribute("aria-label", this.stepText.textContent);
    reconcile(this.budget, this.shares, lanes.filter((lane) => lane.fed > 0), ({ id }) => id, ({ id }) => {
      const element = h("span", { class: "share" });
      dye(element, id);
      return { element, update: (lane) => {
        element.style.flexGrow = lane.fed;
        element.dataset.tip = `Request ${lane.id}: ${plural(lane.fed, "token")} of this step`;
      } };
    });
    const rest = Math.max(0, budget - reading - writing);
    this.budget.style.setProperty("--spent", budget ? `${Math.max(2, (100 * (budget - rest)) / budget)}%` : "0%");
    this.budget.classList.toggle("is-empty", reading + writing === 0);
  }

  showQueue({ waiting = [], num_waiting: numWaiting = waiting.length }) {
    setText(this.queueCount, numWaiting ? plural(numWaiting, "request") : "nobody waits");
    reconcile(this.queue, this.waiters, waiting.slice(0, MAX_QUEUE_SHOWN), ({ id }) => id, ({ id }) => {
      const element = h("li", {});
      dye(element, id);
      return { element, update: (one) =>
        setText(element, `#${id} · ${plural(one.prompt, "token")} · ${duration(1000 * one.waited_s)}`) };
    });
  }

  light() {
    for (const [id, { element }] of this.lanes) {
      element.classList.toggle("is-dim", this.spotlight.id !== null && this.spotlight.id !== id);
      element.setAttribute("aria-pressed", String(this.spotlight.pinned === id));
    }
  }
}
