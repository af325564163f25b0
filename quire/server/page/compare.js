// The same prompt under two settings, side by side, with what each cost. Running both at once is
// how a server is used; running them in turn keeps them out of each other's timings.

import { AnswerView } from "./answer.js";
import { bodyOf, complete, curlOf } from "./completion.js";
import { byId, h } from "./dom.js";
import { count, duration, rate } from "./format.js";
import { term } from "./hints.js";
import { Knobs } from "./knobs.js";
import { measure } from "./metrics.js";
import { local, session } from "./storage.js";

const NAMES = ["temperature", "top_p", "min_p", "top_k", "max_tokens", "seed", "repetition_penalty"];
const STARTS = [{ temperature: 0, max_tokens: 256 }, { temperature: 1, seed: 7, max_tokens: 256 }];
const ROWS = [
  { label: "Time to first token", hint: "ttft", of: ({ ttftMs }) => ttftMs, says: duration },
  { label: "Tokens per second", hint: "tps", of: ({ tokensPerS }) => tokensPerS, says: rate },
  { label: "Tokens written", hint: "decode", of: ({ numTokens }) => numTokens, says: count },
  { label: "Prompt tokens found in memory", hint: "hitrate", of: ({ numCached }) => numCached ?? 0, says: count },
  { label: "Whole time", of: ({ totalMs }) => totalMs, says: duration },
];

class Side {
  constructor(name, values, onChange) {
    this.name = name;
    this.knobs = new Knobs({ prefix: `compare-${name}`, names: NAMES, extras: ["speculation"], values, onChange });
    this.place = h("div", { class: "side-answer" }, h("p", { class: "faint" }, "The answer will stand here."));
    this.curl = h("button", { type: "button", class: "quiet small" }, "curl");
    this.element = h("section", { class: "side", "aria-label": `Settings ${name}` },
      h("div", { class: "side-head" }, h("h2", {}, name), this.curl), this.knobs.element, this.place);
  }

  async run(body, signal) {
    const view = new AnswerView();
    this.place.replaceChildren(view.element);
    const answer = await complete(body, { signal, onUpdate: (partial) => view.update(partial) });
    const stats = answer.numPieces ? measure(answer) : null;
    view.finish(answer, stats);
    return { answer, stats };
  }
}

export class Compare {
  constructor({ root, feed, modelName }) {
    this.feed = feed;
    this.modelName = modelName;
    this.controller = null;
    const kept = local.readJson("quire.compare", STARTS);
    const save = () => local.set("quire.compare", JSON.stringify(this.sides.map(({ knobs }) => knobs.values())));
    this.sides = ["A", "B"].map((name, i) => new Side(name, kept[i] ?? STARTS[i], save));
    this.build(root);
    for (const side of this.sides) side.curl.addEventListener("click", () => this.showCurl(side));
  }

  build(root) {
    this.system = h("textarea", { id: "compare-system", rows: 2, placeholder: "None" });
    this.prompt = h("textarea", { id: "compare-prompt", rows: 3, placeholder: "The prompt both are given" });
    this.prompt.value = "In three sentences: why do libraries bind loose sheets into quires?";
    this.inTurn = h("input", { type: "checkbox", id: "compare-turn" });
    this.go = h("button", { type: "submit", class: "primary" }, "Run both");
    this.table = h("div", { class: "verdict", "aria-live": "polite" });
    const form = h("form", { class: "compare-form", on: { submit: (event) => this.submit(event) } },
      h("label", { for: "compare-prompt" }, "Prompt"), this.prompt,
      h("details", {}, h("summary", {}, "System prompt"), h("label", { for: "compare-system", class: "hidden-text" }, "System prompt"), this.system),
      h("div", { class: "row-end" },
        h("label", { class: "check", data: { tip: "One after the other, so that neither slows the other down. The second may then find the first one's prompt in memory." } },
          this.inTurn, " one after the other"), this.go));
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.controller) form.requestSubmit();
    });
    root.append(h("p", { class: "lede" }, "One prompt, two settings. What differs, and what does it cost?"),
      form, h("div", { class: "sides" }, ...this.sides.map(({ element }) => element)), this.table);
  }

  show(isShown) {
    if (!isShown || this.unlisten) return;
    // One snapshot is enough to learn whether the engine speculates.
    this.unlisten = this.feed.listen(({ ready, spec }) => {
      if (!ready) return;
      for (const { knobs } of this.sides) knobs.offerSpeculation(Boolean(spec));
      this.unlisten?.();
      this.unlisten = null;
    });
  }

  submit(event) {
    event.preventDefault();
    if (this.controller) this.stop();
    else if (this.prompt.value.trim()) this.run();
  }

  body(side) {
    const messages = [{ role: "user", content: this.prompt.value.trim() }];
    return bodyOf({ model: this.modelName(), system: this.system.value, messages, settings: side.knobs.fields() });
  }

  async run() {
    this.controller = new AbortController();
    const { signal } = this.controller;
    this.setRunning(true);
    this.table.replaceChildren();
    const [a, b] = this.sides;
    const start = (side) => side.run(this.body(side), signal);
    let results;
    if (this.inTurn.checked) {
      const first = await start(a);
      results = signal.aborted ? [first] : [first, await start(b)];
    } else results = await Promise.all([start(a), start(b)]);
    this.controller = null;
    this.setRunning(false);
    if (results.length === 2 && results.every(({ stats }) => stats)) this.showVerdict(results);
  }

  setRunning(isRunning) {
    this.go.textContent = isRunning ? "Stop" : "Run both";
    this.go.classList.toggle("is-stop", isRunning);
  }

  showVerdict(results) {
    const rows = ROWS.map((row) => {
      const values = results.map(({ stats }) => row.of(stats));
      const most = Math.max(...values, 1e-9);
      return h("tr", {}, h("th", { scope: "row" }, row.hint ? term(row.label, row.hint) : row.label),
        ...values.map((value, i) => h("td", {}, h("span", { class: "verdict-value" }, value === null ? "–" : row.says(value)),
          meterOf(value, most, i))));
    });
    this.table.replaceChildren(
      h("table", {}, h("thead", {}, h("tr", {}, h("td"), h("th", { scope: "col" }, "A"), h("th", { scope: "col" }, "B"))), h("tbody", {}, ...rows)),
      h("p", { class: "faint" }, agreement(results.map(({ answer }) => answer.content))));
  }

  showCurl(side) {
    byId("curl-text").textContent = curlOf(this.body(side), Boolean(session.get("quire.key")));
    byId("curl-copy").textContent = "Copy";
    byId("curl-dialog").showModal();
  }

  stop() {
    this.controller?.abort();
  }
}

function meterOf(value, most, i) {
  const fill = h("span", { class: `meter-fill side-${i}` });
  fill.style.width = `${(100 * (value ?? 0)) / most}%`;
  return h("span", { class: "meter", "aria-hidden": "true" }, fill);
}

/** How long two texts agree, in words. */
export function agreement([a, b]) {
  if (a === b) return "Both answers are the same, letter by letter.";
  const words = [a, b].map((text) => text.split(/\s+/));
  let same = 0;
  while (same < words[0].length && words[0][same] === words[1][same]) same += 1;
  if (!same) return "The answers differ from the first word.";
  return `The answers agree for ${same === 1 ? "one word" : `${same} words`}, then part.`;
}
