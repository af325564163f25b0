// The prefix tree along the token axis: a branch begins where its parent ends, so what two prompts
// have in common is the bar they both hang from. One mark per page, because pages are what is shared.

import { h, reconcile, setText } from "./dom.js";
import { count, plural } from "./format.js";
import { term } from "./hints.js";

const MAX_INDENT = 8;

/**
 * Nodes in reading order (a parent before its children), with depth, the token they start at, and
 * how many rows `up` their parent stands (0 for a root).
 */
export function placeNodes(nodes) {
  const children = new Map();
  const ids = new Set(nodes.map(({ id }) => id));
  for (const node of nodes) {
    const parent = ids.has(node.parent) ? node.parent : 0; // a cut-off list may lack the parent
    if (!children.has(parent)) children.set(parent, []);
    children.get(parent).push(node);
  }
  const placed = [];
  const stack = [...(children.get(0) ?? [])].reverse().map((node) => ({ node, depth: 0, start: 0, above: -1 }));
  while (stack.length && placed.length < nodes.length) {
    const { node, depth, start, above } = stack.pop();
    const row = placed.length;
    placed.push({ ...node, depth, start, up: above < 0 ? 0 : row - above });
    const below = children.get(node.id) ?? [];
    for (const child of [...below].reverse()) {
      stack.push({ node: child, depth: depth + 1, start: start + node.tokens, above: row });
    }
  }
  return placed;
}

class Branch {
  constructor() {
    this.text = h("span", { class: "branch-text" });
    this.facts = h("span", { class: "branch-facts" });
    this.bar = h("span", { class: "branch-bar" });
    this.stem = h("span", { class: "branch-stem" });
    this.element = h("li", { class: "branch" },
      h("div", { class: "branch-line" }, this.text, this.facts), h("div", { class: "branch-axis" }, this.stem, this.bar));
  }

  update({ node, length }) {
    const { text, pages, tokens, hits, live, depth, start, up } = node;
    setText(this.text, text === undefined ? `${count(tokens)} tokens, text not shown` : text.replace(/\s+/g, " "));
    this.text.classList.toggle("faint", text === undefined);
    setText(this.facts, `${plural(pages, "page")} · ${plural(hits, "hit")}`);
    this.element.classList.toggle("is-live", live > 0);
    this.element.classList.toggle("is-hit", hits > 0);
    this.text.style.paddingInlineStart = `${Math.min(depth, MAX_INDENT) * 14}px`;
    this.stem.hidden = up === 0;
    this.stem.style.left = `${(100 * start) / length}%`;
    this.stem.style.setProperty("--up", up);
    this.bar.style.left = `${(100 * start) / length}%`;
    this.bar.style.width = `${(100 * tokens) / length}%`;
    this.bar.style.setProperty("--pages", Math.max(1, pages));
    const users = live ? `${plural(live, "running request")} read it now` : "Nobody reads it now; it is kept";
    this.element.dataset.tip = `Tokens ${count(start)} to ${count(start + tokens)}, in ${plural(pages, "page")}. ` +
      `${users}. Found by ${plural(hits, "prompt")}.${text ? `\n“${text}”` : ""}`;
  }
}

export class TreeView {
  constructor(root) {
    this.branches = new Map();
    this.standfirst = h("p", { class: "standfirst" });
    this.list = h("ul", { class: "branches", "aria-label": "Prefix tree" });
    this.empty = h("p", { class: "faint" }, "Empty so far. A prompt is kept here, page by page, once it has been read.");
    root.append(h("h2", {}, term("Prefix tree", "tree")), this.standfirst, this.list, this.empty,
      h("ul", { class: "legend" },
        h("li", {}, h("span", { class: "swatch branch-live" }), term("read by a running request", "live")),
        h("li", {}, h("span", { class: "swatch is-cached" }), term("cached", "cached")),
        h("li", {}, term("hits", "hits"))));
  }

  update({ tree = [], counts = {}, pool = {} }) {
    const placed = placeNodes(tree);
    const length = Math.max(1, ...placed.map(({ start, tokens }) => start + tokens));
    reconcile(this.list, this.branches, placed.map((node) => ({ node, length })), ({ node }) => node.id, () => new Branch());
    this.empty.hidden = placed.length > 0;
    const { prefix_hit_tokens: hit = 0, prefix_query_tokens: asked = 0 } = counts;
    const saved = asked ? ` ${count(hit)} of ${count(asked)} prompt tokens did not have to be computed.` : "";
    const numGroups = pool.windows?.length ?? 1;
    const each = numGroups > 1 ? ` A page here is one in each of ${numGroups} groups of layers, where it is still needed.` : "";
    setText(this.standfirst, `What has been read and is still in memory.${saved}${each}`);
  }
}
