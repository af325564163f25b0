// An answer on screen while it grows: thinking, text, then what it cost. Chunks may come faster
// than frames; whatever arrived is drawn once per frame.

import { copyButton, h } from "./dom.js";
import { percent } from "./format.js";
import { figuresOf } from "./metrics.js";
import { Prose } from "./prose.js";

export class AnswerView {
  /** `onDraw` runs after each change on screen: the place to keep a scroll position. */
  constructor({ onDraw = () => {} } = {}) {
    this.onDraw = onDraw;
    this.answer = null;
    this.frame = 0;
    this.prose = new Prose();
    this.thinking = new Prose();
    this.thinkingBox = h("details", { class: "thinking", hidden: true }, h("summary", {}, "Thinking"), this.thinking.element);
    this.caret = h("span", { class: "caret", "aria-hidden": "true" });
    this.heat = h("p", { class: "heat", hidden: true });
    this.failure = h("p", { class: "failure", role: "alert", hidden: true });
    this.foot = h("div", { class: "answer-foot" });
    this.element = h("div", { class: "answer is-waiting" }, this.thinkingBox, this.prose.element, this.heat,
      this.caret, this.failure, this.foot);
  }

  update(answer) {
    this.answer = answer;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const { content, reasoning } = this.answer;
    this.element.classList.toggle("is-waiting", !content && !reasoning);
    this.thinkingBox.hidden = !reasoning;
    // Open while it is all there is; the person's own choice holds once the answer begins.
    if (reasoning && !content && !this.wasOpened) this.thinkingBox.open = this.wasOpened = true;
    if (content && this.wasOpened === true) {
      this.thinkingBox.open = false;
      this.wasOpened = "and closed";
    }
    this.thinking.update(reasoning);
    this.prose.update(content);
    this.onDraw();
  }

  /** The last state. `actions` are buttons to set beside the numbers. */
  finish(answer, stats, actions = []) {
    this.answer = answer;
    this.draw();
    this.element.classList.remove("is-waiting");
    this.caret.remove();
    if (answer.error) this.fail(answer.error);
    this.foot.replaceChildren(...stats ? [figureList(stats)] : [], this.actionsOf(answer, actions));
    this.onDraw();
  }

  fail({ message }) {
    this.failure.textContent = message;
    this.failure.hidden = false;
  }

  actionsOf(answer, actions) {
    const buttons = [...actions];
    if (answer.tokens?.length) buttons.unshift(this.heatButton(answer.tokens));
    if (answer.content) buttons.unshift(copyButton(() => answer.content));
    return h("div", { class: "answer-actions" }, ...buttons);
  }

  heatButton(tokens) {
    const button = h("button", { type: "button", class: "quiet small", "aria-pressed": "false" }, "Probabilities");
    button.addEventListener("click", () => {
      if (!this.heat.childElementCount) this.heat.append(...tokens.map(heatToken));
      this.heat.hidden = !this.heat.hidden;
      this.prose.element.hidden = !this.heat.hidden;
      button.setAttribute("aria-pressed", String(!this.heat.hidden));
    });
    return button;
  }
}

const HEAT_STEPS = [0.9, 0.6, 0.3, 0.1]; // the surer, the paler

function heatToken({ token, logprob, top }) {
  const likely = Math.exp(logprob);
  const found = HEAT_STEPS.findIndex((bound) => likely >= bound);
  const others = top.map((rival) => `${JSON.stringify(rival.token)} ${percent(Math.exp(rival.logprob), 1)}`);
  const tip = `${percent(likely, 1)} likely.${others.length ? ` The choice was among: ${others.join(", ")}` : ""}`;
  return h("span", { class: `heat-${found < 0 ? HEAT_STEPS.length : found}`, data: { tip } }, token);
}

export function figureList(stats) {
  return h("ul", { class: "answer-figures" }, ...figuresOf(stats).map(({ label, value, hint, tip }) =>
    h("li", { data: hint ? { hint } : tip ? { tip } : {} }, h("b", {}, value), label ? ` ${label}` : "")));
}
