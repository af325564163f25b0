// Batches of the caller, newest first: how far each is, and a way to end it.

import { h, reconcile, setText } from "./dom.js";
import { age, count } from "./format.js";
import { request } from "./wire.js";

const OPEN = ["validating", "in_progress"];
const STATES = { completed: "ready", failed: "failed", expired: "failed", cancelled: "unloaded" };
const SHOWN = 20;

export class BatchesView {
  constructor(root, act) {
    this.act = act;
    this.views = new Map();
    this.rows = h("ul", { class: "rows" });
    this.none = h("p", { class: "faint" });
    root.append(h("h2", {}, "Batches"), this.none, this.rows);
  }

  async update() {
    const found = await (await request(`/v1/batches?limit=${SHOWN}`)).json();
    setText(this.none, found.data.length ? "" : "None. POST /v1/batches starts one.");
    reconcile(this.rows, this.views, found.data, ({ id }) => id, (batch) => this.rowOf(batch));
  }

  rowOf({ id, endpoint }) {
    const dot = h("span", { class: "state" });
    const facts = h("span", { class: "row-facts" });
    const done = h("span", { class: "progress-done" });
    const failed = h("span", { class: "progress-failed" });
    const bar = h("span", { class: "progress", role: "progressbar", "aria-label": `Lines of ${id}` }, done, failed);
    const cancel = h("button", { type: "button", class: "quiet small", "aria-label": `Cancel ${id}`,
      on: { click: () => this.act(`/v1/batches/${id}/cancel`, { body: {} }) } }, "cancel");
    const element = h("li", { class: "row" }, dot, h("b", { class: "row-name" }, id), facts,
      h("span", { class: "row-verbs" }, cancel), bar);
    return {
      element,
      update: ({ status, created_at, request_counts: lines, errors }) => {
        dot.dataset.state = STATES[status] ?? "loading";
        const share = (part) => (lines.total ? (100 * part) / lines.total : 0);
        done.style.width = `${share(lines.completed)}%`;
        failed.style.width = `${share(lines.failed)}%`;
        bar.setAttribute("aria-valuenow", String(Math.round(share(lines.completed + lines.failed))));
        const why = errors?.data?.[0]?.message;
        const bad = lines.failed ? `${count(lines.failed)} failed` : "";
        setText(facts, [status.replace("_", " "), `${count(lines.completed)} of ${count(lines.total)}`, bad, why,
          endpoint, `${age(created_at)} ago`].filter(Boolean).join(" · "));
        cancel.hidden = !OPEN.includes(status);
      },
    };
  }
}
