// The cache of answers, the caller's own part of it: how much, how old, how often used.

import { h, setText } from "./dom.js";
import { age, bytes, count, plural } from "./format.js";
import { request } from "./wire.js";

const FIGURES = {
  mode: (cache) => cache.mode,
  entries: (cache) => count(cache.entries),
  hits: (cache) => count(cache.hits),
  size: (cache) => bytes(cache.bytes),
  oldest: (cache) => (cache.oldest_at ? age(cache.oldest_at) : "–"),
};
const SHOWN = 12;

export class CacheView {
  constructor(root, act) {
    this.act = act;
    this.says = h("p", { class: "standfirst" });
    this.figures = h("dl", { class: "figures" });
    this.values = Object.fromEntries(Object.keys(FIGURES).map((name) => [name, h("dd")]));
    for (const [name, value] of Object.entries(this.values)) {
      this.figures.append(h("div", { class: "figure" }, h("dt", {}, name), value));
    }
    this.rows = h("ul", { class: "rows" });
    this.verbs = h("p", { class: "row-verbs" });
    root.append(h("h2", {}, "Cache of answers"), this.says, this.figures, this.rows, this.verbs);
    this.offer();
  }

  async update() {
    const cache = await (await request(`/v1/answer_cache?limit=${SHOWN}`)).json();
    const isOff = cache.mode === "off";
    this.figures.hidden = isOff;
    this.verbs.hidden = !cache.entries;
    setText(this.says, isOff ? "Off. quire serve --answer-cache draft switches it on."
      : `At most ${plural(cache.max_entries, "entry", "entries")}, for ${Math.round(cache.max_age_s / 86_400)} days; only this key sees them.`);
    if (!isOff) for (const [name, of] of Object.entries(FIGURES)) setText(this.values[name], of(cache));
    this.rows.replaceChildren(...cache.data.map((entry) => h("li", { class: "row" },
      h("span", { class: "row-name" }, entry.text || "(a conversation)"),
      h("span", { class: "row-facts" }, `${plural(entry.hits, "hit")} · ${plural(entry.tokens, "token")} · ${age(entry.created_at)} old`))));
  }

  offer() {
    this.verbs.replaceChildren(h("button", { type: "button", class: "quiet small danger", on: { click: () => this.confirm() } }, "Forget all"));
  }

  confirm() {
    const yes = h("button", { type: "button", class: "quiet small danger", on: { click: () => {
      this.offer();
      this.act("/v1/answer_cache", { method: "DELETE" });
    } } }, "Forget them");
    const no = h("button", { type: "button", class: "quiet small", on: { click: () => this.offer() } }, "Keep");
    this.verbs.replaceChildren(yes, no);
    yes.focus();
  }
}
