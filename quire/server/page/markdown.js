// Markdown as models write it, split into top-level blocks and built as DOM nodes. No HTML passes
// through: `<b>` in an answer is four characters on screen. inline.js reads what is inside a line.
// A fence left open is a code block that has not ended, which is how every one looks in streaming.

import { copyButton, h } from "./dom.js";
import { inline } from "./inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\s]*)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const MAX_DEPTH = 12; // quotes in lists in quotes: deeper than this is an attack, not a text

const isBlank = (line) => line.trim() === "";
const indentOf = (line) => line.length - line.trimStart().length;

function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|");
  return cells.map((cell) => cell.trim());
}

function isTableAt(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length) return false;
  const marks = cellsOf(lines[at + 1]);
  return lines[at + 1].includes("-") && marks.every((mark) => /^:?-+:?$/.test(mark)) &&
    marks.length === cellsOf(lines[at]).length;
}

function startsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) ||
    ITEM.test(line) || isTableAt(lines, at);
}

function takeFence(lines, at, [, fence, language]) {
  const indent = indentOf(lines[at]);
  const strip = (line) => line.slice(Math.min(indent, indentOf(line)));
  let end = at + 1;
  const closes = (line) => {
    const text = line.trim();
    return text.length >= fence.length && text === fence[0].repeat(text.length);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).map(strip).join("\n");
  return { kind: "code", language, text, end: Math.min(end + 1, lines.length) };
}

function takeWhile(lines, at, belongs) {
  let end = at;
  while (end < lines.length && belongs(end)) end += 1;
  return end;
}

function takeList(lines, at) {
  const [, lead, marker] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(marker);
  const isSibling = (line) => {
    const match = ITEM.exec(line);
    return match && match[1].length <= lead.length + 1 && /\d/.test(match[2]) === isOrdered &&
      !RULE.test(line);
  };
  const items = [];
  let end = at;
  while (end < lines.length) {
    const match = isSibling(lines[end]) ? ITEM.exec(lines[end]) : null;
    if (match) {
      const width = match[0].length;
      items.push({ width, lines: [lines[end].slice(width)] });
    } else if (isBlank(lines[end])) {
      const next = takeWhile(lines, end, (i) => isBlank(lines[i]));
      const goesOn = next < lines.length &&
        (isSibling(lines[next]) || indentOf(lines[next]) > lead.length + 1);
      if (!goesOn) break;
      items.at(-1).lines.push("");
    } else if (indentOf(lines[end]) > lead.length || !startsBlock(lines, end)) {
      const cut = Math.min(items.at(-1).width, indentOf(lines[end]));
      items.at(-1).lines.push(lines[end].slice(cut));
    } else break;
    end += 1;
  }
  const start = isOrdered ? Number.parseInt(marker, 10) : null;
  return { kind: "list", start, items: items.map((item) => item.lines.join("\n")), end };
}

function takeTable(lines, at) {
  const end = takeWhile(lines, at + 2, (i) => lines[i].includes("|") && !isBlank(lines[i]));
  const align = cellsOf(lines[at + 1]).map((mark) => {
    if (!mark.endsWith(":")) return "left";
    return mark.startsWith(":") ? "center" : "right";
  });
  return { kind: "table", align, rows: [at, ...range(at + 2, end)].map((i) => cellsOf(lines[i])), end };
}

const range = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, i) => from + i);

function takeBlock(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return takeFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = line.slice(heading[0].length).trim().replace(/ #{1,6}$/, "");
    return { kind: "heading", level: heading[1].length, text, end: at + 1 };
  }
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(line)) {
    const end = takeWhile(lines, at, (i) => QUOTE.test(lines[i]));
    const text = lines.slice(at, end).map((quoted) => quoted.replace(QUOTE, "")).join("\n");
    return { kind: "quote", text, end };
  }
  if (ITEM.test(line)) return takeList(lines, at);
  if (isTableAt(lines, at)) return takeTable(lines, at);
  const end = takeWhile(lines, at + 1, (i) => !isBlank(lines[i]) && !startsBlock(lines, i));
  return { kind: "text", text: lines.slice(at, end).join("\n"), end };
}

/** The blocks of a text; `line` says where each begins. */
export function splitBlocks(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) at += 1;
    else {
      const block = takeBlock(lines, at);
      block.line = at;
      blocks.push(block);
      at = block.end;
    }
  }
  return blocks;
}

function codeBlock({ language, text }) {
  const code = h("code", {}, text);
  const bar = h("div", { class: "code-bar" }, h("span", {}, language), copyButton(() => code.textContent));
  return h("figure", { class: "code" }, bar, h("pre", { tabindex: "0" }, code));
}

function tableOf({ align, rows }) {
  const rowOf = (tag) => (cells) => h("tr", {}, ...align.map((side, i) =>
    h(tag, { class: `to-${side}` }, ...inline(cells[i] ?? ""))));
  const [head, ...body] = rows;
  return h("div", { class: "table-scroll", tabindex: "0" }, h("table", {},
    h("thead", {}, rowOf("th")(head)), h("tbody", {}, ...body.map(rowOf("td")))));
}

function listOf({ start, items }, depth) {
  const children = items.map((item) => {
    const blocks = splitBlocks(item);
    // A one-line item is bare text: a paragraph inside would double its spacing.
    if (blocks[0]?.kind === "text") {
      return h("li", {}, ...inline(blocks[0].text), ...blocks.slice(1).map((b) => renderBlock(b, depth + 1)));
    }
    return h("li", {}, ...blocks.map((block) => renderBlock(block, depth + 1)));
  });
  const tag = start === null ? "ul" : "ol";
  return h(tag, start !== null && start !== 1 ? { start } : {}, ...children);
}

export function renderBlock(block, depth = 0) {
  if (depth > MAX_DEPTH) return h("p", {}, block.text ?? (block.items ?? []).join("\n"));
  switch (block.kind) {
    case "code": return codeBlock(block);
    // The page's own headings are h1 and h2, so an answer's start below them.
    case "heading": return h(`h${Math.min(6, block.level + 2)}`, { class: "md-heading" }, ...inline(block.text));
    case "rule": return h("hr");
    case "quote": return h("blockquote", {}, ...splitBlocks(block.text).map((b) => renderBlock(b, depth + 1)));
    case "list": return listOf(block, depth);
    case "table": return tableOf(block);
    default: return h("p", {}, ...inline(block.text));
  }
}
