// A panel of settings for a request. A blank field is not sent, so the server's own default holds;
// that is different from sending what we believe the default to be.

import { h } from "./dom.js";
import { term } from "./hints.js";

export const KNOBS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, rest: 1, slides: true },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.01, rest: 1, slides: true },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, rest: 0, slides: true },
  { name: "top_k", label: "Top k", min: 0, max: 1000, step: 1 },
  { name: "max_tokens", label: "Max tokens", min: 1, max: 1_000_000, step: 1 },
  { name: "seed", label: "Seed", min: 0, max: 2 ** 31 - 1, step: 1 },
  { name: "repetition_penalty", label: "Repetition", min: 0.1, max: 2, step: 0.05 },
  { name: "presence_penalty", label: "Presence", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency", min: -2, max: 2, step: 0.1 },
  { name: "priority", label: "Priority", min: -100, max: 100, step: 1 },
];

export class Knobs {
  /** `names` picks from KNOBS; `extras` adds "stop", "logprobs" or "speculation"; `prefix` starts ids. */
  constructor({ prefix, names, extras = [], values = {}, onChange = () => {} }) {
    this.prefix = prefix;
    this.onChange = onChange;
    this.inputs = new Map();
    this.element = h("div", { class: "knob-grid" });
    for (const knob of KNOBS.filter(({ name }) => names.includes(name))) {
      this.element.append(this.numberRow(knob));
    }
    if (extras.includes("stop")) this.element.append(this.stopRow());
    if (extras.includes("logprobs")) this.element.append(this.checkRow("logprobs", "Token probabilities", false));
    if (extras.includes("speculation")) {
      this.speculation = this.checkRow("speculation", "Speculation", true);
      this.speculation.hidden = true;
      this.element.append(this.speculation);
    }
    this.fill(values);
  }

  numberRow(knob) {
    const id = `${this.prefix}-${knob.name}`;
    const { min, max, step } = knob;
    const field = h("input", { type: "number", id, min, max, step, placeholder: "default", inputmode: "decimal" });
    const head = h("div", { class: "knob-head" }, this.labelOf(knob.label, knob.name, id), field);
    const row = h("div", { class: knob.slides ? "knob knob-wide" : "knob" }, head);
    let slider = null;
    if (knob.slides) {
      slider = h("input", { type: "range", min, max, step, value: knob.rest, "aria-label": `${knob.label} slider` });
      slider.addEventListener("input", () => {
        field.value = slider.value;
        row.classList.remove("is-default");
        this.onChange();
      });
      row.append(slider);
    }
    const show = () => {
      row.classList.toggle("is-default", field.value === "");
      if (slider) slider.value = field.value === "" ? knob.rest : field.value;
    };
    field.addEventListener("input", () => {
      show();
      this.onChange();
    });
    this.inputs.set(knob.name, {
      read: () => (field.value === "" || !field.validity.valid ? undefined : field.valueAsNumber),
      write: (value) => {
        field.value = value ?? "";
        show();
      },
    });
    return row;
  }

  labelOf(text, hint, id) {
    return h("span", { class: "knob-label" }, h("label", { for: id }, text), term("?", hint, `About ${text}`));
  }

  stopRow() {
    const id = `${this.prefix}-stop`;
    const area = h("textarea", { id, rows: 2, placeholder: "one per line", spellcheck: "false" });
    area.addEventListener("input", () => this.onChange());
    this.inputs.set("stop", {
      read: () => {
        const stops = area.value.split("\n").filter(Boolean);
        return stops.length ? stops : undefined;
      },
      write: (value) => (area.value = (value ?? []).join("\n")),
    });
    return h("div", { class: "knob knob-wide" }, this.labelOf("Stop strings", "stop", id), area);
  }

  checkRow(name, text, isOnAtRest) {
    const id = `${this.prefix}-${name}`;
    const box = h("input", { type: "checkbox", id });
    box.checked = isOnAtRest;
    box.addEventListener("change", () => this.onChange());
    this.inputs.set(name, {
      read: () => (box.checked === isOnAtRest ? undefined : box.checked),
      write: (value) => (box.checked = value ?? isOnAtRest),
    });
    return h("div", { class: "knob knob-wide knob-check" }, box, this.labelOf(text, name, id));
  }

  /** Only the settings that were set. */
  values() {
    const entries = [...this.inputs].map(([name, input]) => [name, input.read()]);
    return Object.fromEntries(entries.filter(([, value]) => value !== undefined));
  }

  /** The fields of a request body: as `values`, in the API's words. */
  fields() {
    const { logprobs, ...fields } = this.values();
    return logprobs ? { ...fields, logprobs: true, top_logprobs: 5 } : fields;
  }

  fill(values) {
    for (const [name, input] of this.inputs) input.write(values[name]);
  }

  /** Whether the engine speculates at all decides whether the switch means anything. */
  offerSpeculation(isOffered) {
    if (this.speculation) this.speculation.hidden = !isOffered;
  }
}
