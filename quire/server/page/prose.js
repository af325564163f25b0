// A growing text as markdown. Finished blocks are never touched again; each update reads on from
// the last block only, and a code block that merely grew gets the new characters appended. So the
// cost of a token does not grow with the length of the answer.

import { h } from "./dom.js";
import { renderBlock, splitBlocks } from "./markdown.js";

export class Prose {
  constructor() {
    this.element = h("div", { class: "prose" });
    this.text = "";
    this.tailStart = 0; // where the last block's source begins
    this.tail = null; // {block, node} of the last block
  }

  /** Shows a text, which usually continues what was shown before. */
  update(raw) {
    const text = raw.includes("\r") ? raw.replaceAll("\r\n", "\n") : raw;
    if (text === this.text) return;
    if (!text.startsWith(this.text)) this.clear();
    this.text = text;
    const source = text.slice(this.tailStart);
    const blocks = splitBlocks(source);
    if (!blocks.length) return;
    this.showFirst(blocks[0]);
    for (const block of blocks.slice(1)) this.append(block);
    this.tailStart += offsetOfLine(source, blocks.at(-1).line);
  }

  clear() {
    this.element.replaceChildren();
    this.tailStart = 0;
    this.tail = null;
  }

  showFirst(block) {
    if (!this.tail) return this.append(block);
    const { block: old, node } = this.tail;
    if (old.kind === "code" && block.kind === "code" && old.language === block.language &&
        block.text.startsWith(old.text)) {
      const added = block.text.slice(old.text.length);
      if (added) node.querySelector("code").append(added);
      this.tail = { block, node };
      return undefined;
    }
    const fresh = renderBlock(block);
    node.replaceWith(fresh);
    this.tail = { block, node: fresh };
    return undefined;
  }

  append(block) {
    const node = renderBlock(block);
    this.element.append(node);
    this.tail = { block, node };
  }
}

function offsetOfLine(text, line) {
  let offset = 0;
  for (let i = 0; i < line; i += 1) offset = text.indexOf("\n", offset) + 1;
  return offset;
}
