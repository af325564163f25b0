// How long people waited: histograms of the first token and of the pauses after it, the course of
// tokens per second, how many guesses speculation got right, how evenly experts are used.

import { h, reconcile, setText, svg } from "./dom.js";
import { count, duration, percent, plural, rate } from "./format.js";
import { term } from "./hints.js";

const SPAN_S = 60;
const MIN_SPAN_S = 5;
const MIN_BUCKETS = 8;

/** The value below which a share `q` of the counts lies, read off the buckets; null when empty. */
export function quantile({ le, counts }, q) {
  const total = counts.reduce((sum, n) => sum + n, 0);
  if (!total) return null;
  let seen = 0;
  for (let i = 0; i < counts.length; i += 1) {
    if (counts[i] && seen + counts[i] >= q * total) {
      const low = i ? le[i - 1] : 0;
      if (i >= le.length) return low; // beyond the last bound: at least that
      return low + (le[i] - low) * ((q * total - seen) / counts[i]);
    }
    seen += counts[i];
  }
  return le.at(-1);
}

/** The buckets worth drawing: those that hold something and a neighbour on either side. */
export function shownRange(counts) {
  const last = counts.findLastIndex((n) => n > 0);
  if (last < 0) return [0, Math.min(MIN_BUCKETS, counts.length)];
  const from = Math.max(0, counts.findIndex((n) => n > 0) - 1);
  const to = Math.min(counts.length, Math.max(last + 2, from + MIN_BUCKETS));
  return [Math.max(0, Math.min(from, to - MIN_BUCKETS)), to];
}

class Histogram {
  constructor(title, hint, unit) {
    this.unit = unit;
    this.bars = new Map();
    this.says = h("p", { class: "histogram-says" });
    this.plot = h("div", { class: "bars" });
    this.low = h("span");
    this.high = h("span");
    this.element = h("section", { class: "histogram" }, h("h3", {}, term(title, hint)), this.says, this.plot,
      h("div", { class: "axis faint", "aria-hidden": "true" }, this.low, this.high));
  }

  update(data) {
    const { le = [], counts = [] } = data ?? {};
    const total = counts.reduce((sum, n) => sum + n, 0);
    const most = Math.max(1, ...counts);
    const at = (q) => duration(1000 * quantile({ le, counts }, q));
    setText(this.says, total ? `half within ${at(0.5)}, 95% within ${at(0.95)}` : "none yet");
    const [from, to] = shownRange(counts);
    const shown = counts.slice(from, to).map((n, i) => ({ n, i: from + i, share: n / most, range: rangeOf(le, from + i) }));
    reconcile(this.plot, this.bars, shown, ({ i }) => i, () => {
      const fill = h("span", { class: "bar-fill" });
      const element = h("span", { class: "bar" }, fill);
      return { element, update: ({ n, share, range }) => {
        fill.style.height = n ? `${Math.max(3, 100 * share)}%` : "0";
        element.dataset.tip = `${range}: ${plural(n, this.unit)}`;
      } };
    });
    setText(this.low, le.length ? (from ? duration(1000 * le[from - 1]) : "0") : "");
    setText(this.high, le.length ? duration(1000 * le[Math.min(to, le.length) - 1]) : "");
    this.plot.setAttribute("role", "img");
    this.plot.setAttribute("aria-label", `${plural(total, this.unit)}, ${this.says.textContent}`);
  }
}

function rangeOf(le, i) {
  if (i >= le.length) return `above ${duration(1000 * le.at(-1))}`;
  return `${i ? duration(1000 * le[i - 1]) : "0"} to ${duration(1000 * le[i])}`;
}

class Course {
  constructor() {
    this.points = [];
    this.now = h("b");
    this.since = h("span");
    this.reading = h("span", { class: "faint" });
    this.path = svg("path", { class: "course-line" });
    this.area = svg("path", { class: "course-area" });
    this.drawing = svg("svg", { viewBox: "0 0 300 60", preserveAspectRatio: "none", class: "course-plot", "aria-hidden": "true" });
    this.drawing.append(this.area, this.path);
    this.element = h("section", { class: "course" }, h("h3", {}, term("Tokens per second", "tps")),
      h("p", { class: "histogram-says" }, this.now, " written, ", this.reading), this.drawing,
      h("div", { class: "axis faint", "aria-hidden": "true" }, this.since, h("span", {}, "now")));
  }

  update(t, { tokens_per_s: written = 0, prompt_tokens_per_s: read = 0 }) {
    if (this.points.length && t < this.points.at(-1).t) this.points = []; // the server began anew
    this.points.push({ t, written });
    while (this.points[0].t < t - SPAN_S) this.points.shift();
    setText(this.now, rate(written));
    setText(this.reading, `${rate(read)} read`);
    const most = Math.max(1, ...this.points.map((point) => point.written));
    const span = Math.max(MIN_SPAN_S, t - this.points[0].t);
    const across = (point) => 300 * (1 - (t - point.t) / span);
    const line = this.points.map((point) => {
      const x = across(point);
      return `${x.toFixed(1)} ${(58 - (54 * point.written) / most).toFixed(1)}`;
    }).join("L");
    setText(this.since, `${Math.round(span)} s ago`);
    this.path.setAttribute("d", `M${line}`);
    this.area.setAttribute("d", `M${line}L300 60L${across(this.points[0]).toFixed(1)} 60Z`);
  }
}

class Speculation {
  constructor() {
    this.says = h("p", { class: "histogram-says" });
    this.cost = h("p", { class: "histogram-says" });
    this.rows = h("ul", { class: "positions" });
    this.views = new Map();
    this.element = h("section", { class: "speculation", hidden: true },
      h("h3", {}, term("Speculation", "speculation")), this.says, this.cost, this.rows);
  }

  update(spec) {
    this.element.hidden = !spec;
    if (!spec) return;
    const { proposer, drafted, accepted, seconds = 0, by_position: positions = [] } = spec;
    setText(this.says, `${proposer}: ${percent(accepted, drafted)} of ${count(drafted)} guesses kept`);
    setText(this.cost, `${plural(accepted, "step")} saved for ${duration(1000 * seconds)} of guessing`);
    reconcile(this.rows, this.views, positions.map((share, i) => ({ share, i })), ({ i }) => i, ({ i }) => {
      const fill = h("span", { class: "position-fill" });
      const says = h("span", { class: "faint" });
      const element = h("li", { data: { tip: `How often guess number ${i + 1} of a draft is kept` } },
        h("span", {}, `${i + 1}`), h("span", { class: "position-track" }, fill), says);
      return { element, update: ({ share }) => {
        fill.style.width = `${100 * share}%`;
        setText(says, percent(share, 1));
      } };
    });
  }
}

class Experts {
  constructor() {
    this.says = h("p", { class: "histogram-says" });
    this.element = h("section", { class: "experts", hidden: true }, h("h3", {}, term("Experts", "experts")), this.says);
  }

  update(experts) {
    this.element.hidden = !experts;
    if (!experts) return;
    const { worst_layer: layer, worst_imbalance: worst, average_imbalance: usual, idle } = experts;
    const unused = idle ? `; ${count(idle)} without a token` : "";
    setText(this.says, `last minute: the busiest had ${times(worst)} its share in layer ${layer}, ${times(usual)} on average over the layers${unused}`);
  }
}

const times = (value) => `${value.toFixed(1)} times`;

export class LatencyView {
  constructor(root) {
    this.course = new Course();
    this.ttft = new Histogram("Time to first token", "ttft", "answer");
    this.itl = new Histogram("Time between tokens", "itl", "pause");
    this.speculation = new Speculation();
    this.experts = new Experts();
    root.append(h("h2", {}, "Speed"), this.course.element, this.ttft.element, this.itl.element,
      this.speculation.element, this.experts.element);
  }

  update({ t, api = {}, spec = null }) {
    if (t !== undefined) this.course.update(t, api); // the engine has not been heard of yet
    this.ttft.update(api.ttft);
    this.itl.update(api.itl);
    this.speculation.update(spec);
    this.experts.update(api.experts);
  }
}
