// Markdown inside a line: code, emphasis, links, line breaks. One pass from left to right; a
// search that failed once is remembered, so hostile text cannot make it quadratic. Links leave
// only for http, https and mailto; pictures become links, because loading one would tell a
// stranger's server that the answer was read.

import { h } from "./dom.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;
const MAX_LABEL = 2000;
const MAX_DEPTH = 8;

/** The address if it is one we are willing to link to, else null. */
export function safeHref(address) {
  try {
    const url = new URL(address); // absolute only: a relative link would point into this server
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function linkTo(address, ...children) {
  const href = safeHref(address);
  if (!href) return null;
  return h("a", { href, rel: "noopener noreferrer nofollow", target: "_blank" }, ...children);
}

class Reader {
  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
    this.at = 0;
    this.plain = "";
    this.nodes = [];
    this.absent = new Set(); // closers of emphasis known not to occur in the rest of the text
  }

  flush() {
    if (this.plain) this.nodes.push(document.createTextNode(this.plain));
    this.plain = "";
  }

  emit(node, end) {
    this.flush();
    this.nodes.push(node);
    this.at = end;
  }

  literal(length = 1) {
    this.plain += this.text.slice(this.at, this.at + length);
    this.at += length;
  }

  runLength(char) {
    let end = this.at;
    while (this.text[end] === char) end += 1;
    return end - this.at;
  }

  code() {
    const ticks = this.runLength("`");
    const mark = "`".repeat(ticks);
    let end = this.text.indexOf(mark, this.at + ticks);
    while (end >= 0 && this.text[end + ticks] === "`") { // a longer run does not close this one
      while (this.text[end] === "`") end += 1;
      end = this.text.indexOf(mark, end);
    }
    if (end < 0) return this.literal(ticks);
    const inside = this.text.slice(this.at + ticks, end).replaceAll("\n", " ");
    const isPadded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim() !== "";
    return this.emit(h("code", {}, isPadded ? inside.slice(1, -1) : inside), end + ticks);
  }

  emphasis(char) {
    const run = this.runLength(char);
    const width = char === "~" ? 2 : Math.min(run, 2);
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + width] ?? " ";
    const opens = run >= width && run <= 3 && !/\s/.test(after) && !(char === "_" && WORD.test(before));
    const end = opens && this.depth < MAX_DEPTH ? this.closer(char, width, this.at + width) : -1;
    if (end < 0) return this.literal(run);
    const tag = char === "~" ? "s" : width === 2 ? "strong" : "em";
    const children = inline(this.text.slice(this.at + width, end), this.depth + 1);
    return this.emit(h(tag, {}, ...children), end + width);
  }

  closer(char, width, from) {
    const mark = char.repeat(width);
    if (this.absent.has(mark)) return -1;
    for (let end = this.text.indexOf(mark, from); end >= 0; end = this.text.indexOf(mark, end + 1)) {
      const before = this.text[end - 1];
      let after = end;
      while (this.text[after] === char) after += 1;
      const isInWord = char === "_" && WORD.test(this.text[after] ?? " ");
      const isOther = width === 1 && after - end === 2; // a ** is not the end of a *
      if (end > from && !/\s/.test(before) && before !== "\\" && !isInWord && !isOther) {
        return after - width; // in `*a **b***` the last star is the outer one
      }
      end = after - 1;
    }
    this.absent.add(mark);
    return -1;
  }

  link() {
    const label = this.bracketed(this.at, "[", "]");
    if (label < 0 || this.text[label + 1] !== "(") return this.literal();
    const close = this.bracketed(label + 1, "(", ")");
    if (close < 0) return this.literal();
    const address = this.text.slice(label + 2, close).trim().split(/\s/)[0].replace(/^<|>$/g, "");
    const inside = this.text.slice(this.at + 1, label);
    const children = this.depth < MAX_DEPTH ? inline(inside, this.depth + 1, true) : [inside];
    const anchor = linkTo(address, ...children);
    return anchor ? this.emit(anchor, close + 1) : this.literal();
  }

  bracketed(from, open, close) {
    const end = Math.min(this.text.length, from + MAX_LABEL);
    let nesting = 0;
    for (let i = from; i < end; i += 1) {
      if (this.text[i] === "\\") i += 1;
      else if (this.text[i] === open) nesting += 1;
      else if (this.text[i] === close && (nesting -= 1) === 0) return i;
    }
    return -1;
  }

  bareAddress() {
    const before = this.text[this.at - 1] ?? " ";
    const match = /^https?:\/\/[^\s<>"'`]{1,2000}/.exec(this.text.slice(this.at, this.at + MAX_LABEL));
    if (WORD.test(before) || !match) return this.literal();
    let address = match[0].replace(/[.,;:!?*_~]+$/, "");
    if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
    const anchor = linkTo(address, address);
    return anchor ? this.emit(anchor, this.at + address.length) : this.literal();
  }
}

/** Nodes for a run of inline markdown. Inside a link no further links are made. */
export function inline(text, depth = 0, isInLink = false) {
  const reader = new Reader(text, depth);
  while (reader.at < text.length) {
    const char = text[reader.at];
    if (char === "\\" && PUNCTUATION.test(text[reader.at + 1] ?? "")) {
      reader.at += 1;
      reader.literal();
    } else if (char === "`") reader.code();
    else if (char === "*" || char === "_" || char === "~") reader.emphasis(char);
    else if (char === "[" && !isInLink) reader.link();
    else if (char === "h" && !isInLink && text.startsWith("http", reader.at)) reader.bareAddress();
    else if (char === "\n") {
      reader.plain = reader.plain.replace(/[ \\]+$/, "");
      reader.emit(h("br"), reader.at + 1);
    } else reader.literal();
  }
  reader.flush();
  return reader.nodes;
}
