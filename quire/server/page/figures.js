// The row of headline numbers above the Inside view.

import { h, setText } from "./dom.js";
import { count, duration, percent, rate } from "./format.js";
import { term } from "./hints.js";

const FIGURES = [
  { label: "tokens/s", hint: "tps", of: ({ api }) => rate(api?.tokens_per_s) },
  { label: "running", hint: "batch", of: ({ counts, limits }) => [count(counts?.num_running), limits?.max_num_seqs] },
  { label: "waiting", hint: "queue", of: ({ counts }) => count(counts?.num_waiting) },
  { label: "pages live", hint: "pool", of: ({ counts }) => percent(counts?.pages_live ?? 0, counts?.pages_total) },
  { label: "found in memory", hint: "hitrate", of: ({ counts }) => percent(counts?.prefix_hit_tokens ?? 0, counts?.prefix_query_tokens) },
  { label: "step", hint: "batch", of: ({ step_ms: ms }) => duration(ms) },
  { label: "pushed out", hint: "preempted", of: ({ counts }) => count(counts?.num_preempted) },
  { label: "slots unused", hint: "wasted", of: ({ counts }) => count(counts?.slots_wasted) },
  { label: "guesses kept", hint: "accepted", of: ({ spec }) => (spec ? percent(spec.accepted, spec.drafted) : null) },
];

export class FiguresView {
  constructor(root) {
    this.rows = FIGURES.map(({ label, hint, of }) => {
      const value = h("dd");
      const element = h("div", { class: "figure" }, h("dt", {}, term(label, hint)), value);
      root.append(element);
      return { element, value, of };
    });
  }

  update(snapshot) {
    for (const { element, value, of } of this.rows) {
      const said = of(snapshot);
      element.hidden = said === null;
      const [text, limit] = Array.isArray(said) ? said : [said];
      setText(value, limit === undefined ? (text ?? "") : `${text} / ${limit}`);
    }
  }
}
