// The model picker, and the list of models it is made from. Of several models each has a state;
// choosing one that is not ready loads it with its first answer.

import { byId, h, reconcile, setText } from "./dom.js";
import { bytes } from "./format.js";
import { request } from "./wire.js";

const RETRY_MS = 3000;
const STATES_MS = 5000;
const SAYS = {
  ready: "Ready",
  loading: "Loading",
  parked: "Parked: its process waits without weights. The next request brings them back.",
  unloaded: "Not loaded. The next request loads it.",
  failed: "Failed",
};
const VERBS = {
  ready: ["park", "unload"], loading: ["unload"], parked: ["load", "unload"], unloaded: ["load"], failed: ["load"],
};

const brief = ({ state, reason }) => SAYS[state ?? "ready"].split(/[:.]/)[0] + (reason ? `: ${reason}` : "");
const meaning = (model) => (model.reason ? brief(model) : SAYS[model.state]);

export class Models {
  constructor(select, dot) {
    this.select = select;
    this.dot = dot;
    this.list = [];
    select.addEventListener("change", () => this.describe());
  }

  get name() {
    return this.select.value;
  }

  async load() {
    const notice = byId("notice");
    try {
      await this.refresh();
      notice.hidden = true;
      if (this.list.some(({ state }) => state)) setInterval(() => this.refresh().catch(() => {}), STATES_MS);
    } catch (error) {
      notice.textContent = error.message;
      notice.hidden = false;
      if (error.status !== 401) setTimeout(() => this.load(), RETRY_MS);
    }
  }

  async refresh() {
    this.list = (await (await request("/v1/models")).json()).data;
    const names = [...this.select.options].map(({ value }) => value);
    if (names.join("\n") !== this.list.map(({ id }) => id).join("\n")) {
      const chosen = this.name;
      this.select.replaceChildren(...this.list.map(({ id }) => h("option", { value: id })));
      if (names.includes(chosen)) this.select.value = chosen;
    }
    this.list.forEach((model, i) => setText(this.select.options[i], label(model)));
    this.describe();
  }

  describe() {
    const model = this.list.find(({ id }) => id === this.name);
    if (!model) return;
    this.dot.hidden = !model.state;
    if (model.state) this.dot.dataset.state = model.state;
    const length = model.max_model_len;
    const size = length ? `Reads and writes up to ${length.toLocaleString("en")} tokens` : "";
    const tip = [model.state ? meaning(model) : "", size].filter(Boolean).join("\n");
    if (tip) this.select.dataset.tip = tip;
  }
}

const label = ({ id, state }) => (state && state !== "ready" ? `${id} (${state})` : id);

/** The same models as a list with what can be done to each. */
export class ModelsView {
  constructor(root, models, act) {
    this.models = models;
    this.act = act;
    this.views = new Map();
    this.rows = h("ul", { class: "rows" });
    root.append(h("h2", {}, "Models"), this.rows);
  }

  async update() {
    await this.models.refresh();
    reconcile(this.rows, this.views, this.models.list, ({ id }) => id, (model) => this.rowOf(model));
  }

  rowOf({ id }) {
    const dot = h("span", { class: "state" });
    const facts = h("span", { class: "row-facts" });
    const verbs = h("span", { class: "row-verbs" });
    const element = h("li", { class: "row" }, dot, h("b", { class: "row-name" }, id), facts, verbs);
    let shown = null;
    return {
      element,
      update: ({ state, memory, parent, root, reason }) => {
        dot.dataset.state = state ?? "ready";
        const about = root === null ? "chooses one of the others" : parent ? `adapter of ${parent}` : "";
        const size = memory ? bytes(memory) : "";
        setText(facts, [brief({ state, reason }), size, about].filter(Boolean).join(" · "));
        if (shown === state) return;
        shown = state;
        const offered = parent || root === null ? [] : VERBS[state] ?? [];
        verbs.replaceChildren(...offered.map((verb) => h("button", { type: "button", class: "quiet small",
          "aria-label": `${verb} ${id}`, on: { click: () => this.act(`/admin/models/${verb}`, { body: { model: id } }) } }, verb)));
      },
    };
  }
}
