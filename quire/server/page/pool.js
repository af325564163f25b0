// The page pool as a grid on a canvas: one square per page, coloured by owner. States differ in
// drawing as well as in colour: free is an outline, cached is hatched, shared has a hole, live is
// solid. A square that changed in the last snapshot has a dark rim, so that taking and giving back
// can be followed by eye.

import { h, setText } from "./dom.js";
import { count, plural } from "./format.js";
import { term } from "./hints.js";
import { isReading } from "./lanes.js";
import { colourIndex, isSecondRound, resolveColours } from "./palette.js";
import { onThemeChange } from "./theme.js";

const FREE = 0;
const CACHED = -1;
const SHARED = -2;
const MIN_SIZE = 4;
const MAX_SIZE = 22;

/** Size of a square and number of columns so that `n` squares fill a wide, not too tall box. */
export function layOut(n, width) {
  const height = Math.min(400, Math.max(170, width * 0.5));
  const size = Math.max(MIN_SIZE, Math.min(MAX_SIZE, Math.floor(Math.sqrt((width * height) / Math.max(1, n)))));
  const columns = Math.max(1, Math.floor(width / size));
  return { size, columns, rows: Math.ceil(n / columns) };
}

/** What a page is where layers see different distances: the tokens of one group of layers. */
export function groupsOf({ page_size: size, windows = [null] }) {
  const seen = [...new Set(windows.filter((window) => window !== null))].map(count).join(" or ");
  if (windows.length === 1) return seen ? ` Layers see the last ${seen} tokens; pages behind those are given back.` : "";
  const few = windows.filter((window) => window !== null).length;
  return ` A page serves one of ${windows.length} groups of layers, so ${plural(size, "token")} take ${windows.length} pages;` +
    ` ${few === windows.length ? "all" : few} of the groups see the last ${seen} tokens and give back the pages behind.`;
}

export class PoolView {
  constructor(root, spotlight) {
    this.spotlight = spotlight;
    this.pool = { cells: [], page_size: 0, num_pages: 0, pages_per_cell: 1 };
    this.before = [];
    this.lanes = new Map();
    this.cursor = -1;
    this.colours = null;
    this.build(root);
    spotlight.listen(() => this.draw());
    onThemeChange(() => {
      this.colours = null;
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  build(root) {
    this.standfirst = h("p", { class: "standfirst" });
    this.canvas = h("canvas", { class: "pool", tabindex: "0", role: "application",
      "aria-label": "Page grid. Arrow keys walk from page to page.", "aria-describedby": "pool-says" });
    this.frame = h("div", { class: "pool-frame" }, this.canvas);
    this.says = h("p", { class: "pool-says", id: "pool-says", role: "status" });
    const key = (state, label) => h("li", {}, h("span", { class: `swatch is-${state}` }), term(label, state));
    this.legend = h("ul", { class: "legend" }, key("live", "live"), key("shared", "shared"), key("cached", "cached"), key("free", "free"));
    root.append(h("h2", {}, term("Pages", "page")), this.standfirst, this.frame, this.says, this.legend);
    this.canvas.addEventListener("pointermove", (event) => this.pointAt(this.cellUnder(event)));
    this.canvas.addEventListener("pointerdown", (event) => this.pointAt(this.cellUnder(event)));
    this.canvas.addEventListener("pointerleave", ({ pointerType }) => {
      if (pointerType !== "touch") this.pointAt(-1); // a finger leaves as soon as it has tapped
    });
    this.canvas.addEventListener("blur", () => this.pointAt(-1));
    this.canvas.addEventListener("keydown", (event) => this.walk(event));
  }

  update({ pool, lanes = [] }) {
    if (!pool) return;
    this.before = this.pool.cells.length === pool.cells.length ? this.pool.cells : pool.cells;
    this.pool = pool;
    this.lanes = new Map(lanes.map((lane) => [lane.id, lane]));
    const each = pool.pages_per_cell > 1 ? ` Each square stands for ${pool.pages_per_cell} of them.` : "";
    const whole = `The memory for keys and values: ${count(pool.num_pages)} pages of ${plural(pool.page_size, "token")}.`;
    setText(this.standfirst, whole + groupsOf(pool) + each);
    this.draw();
    this.say();
  }

  cellUnder({ offsetX, offsetY }) {
    const column = Math.floor(offsetX / this.grid.size);
    const cell = Math.floor(offsetY / this.grid.size) * this.grid.columns + column;
    return column < this.grid.columns && cell < this.pool.cells.length ? cell : -1;
  }

  walk(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.grid.columns, ArrowDown: this.grid.columns };
    if (event.key === "Escape") this.pointAt(-1);
    if (!(event.key in steps)) return;
    event.preventDefault();
    const last = this.pool.cells.length - 1;
    this.pointAt(this.cursor < 0 ? 0 : Math.max(0, Math.min(last, this.cursor + steps[event.key])));
  }

  pointAt(cell) {
    if (cell === this.cursor) return;
    this.cursor = cell;
    const owner = this.pool.cells[cell] ?? FREE;
    this.spotlight.point(owner > 0 ? owner : null);
    this.draw();
    this.say();
  }

  say() {
    setText(this.says, this.cursor < 0 ? "Point at a square to see whose it is." : this.describe(this.cursor));
  }

  describe(cell) {
    const owner = this.pool.cells[cell];
    const each = this.pool.pages_per_cell;
    const name = each > 1 ? `Pages ${cell * each} to ${cell * each + each - 1}` : `Page ${cell}`;
    if (owner === FREE) return `${name}: free.`;
    if (owner === CACHED) return `${name}: cached. Nobody uses it now; a prompt that begins the same way will.`;
    if (owner === SHARED) return `${name}: shared by several running requests, stored once.`;
    const lane = this.lanes.get(owner);
    if (!lane) return `${name}: live, request ${owner}.`;
    const doing = isReading(lane) ? "reading its prompt" : "writing";
    return `${name}: live, request ${owner}, which is ${doing} and holds ${plural(lane.pages, "page")}.`;
  }

  draw() {
    const width = Math.floor(this.frame.clientWidth);
    if (!width) return; // the view is hidden
    this.colours ??= resolveColours();
    this.grid = layOut(this.pool.cells.length, width);
    const { size, columns, rows } = this.grid;
    const scale = devicePixelRatio || 1;
    const pen = this.canvas.getContext("2d");
    this.canvas.width = Math.ceil(columns * size * scale); // assigning also clears
    this.canvas.height = Math.ceil(Math.max(1, rows) * size * scale);
    this.canvas.style.width = `${columns * size}px`;
    this.canvas.style.height = `${Math.max(1, rows) * size}px`;
    pen.scale(scale, scale);
    const gap = size >= 8 ? 2 : 1;
    const lit = this.spotlight.id;
    this.pool.cells.forEach((owner, i) => {
      const x = (i % columns) * size;
      const y = Math.floor(i / columns) * size;
      pen.globalAlpha = lit !== null && owner !== lit ? 0.22 : 1;
      this.drawCell(pen, owner, { x, y, side: size - gap });
      if (owner !== this.before[i] && owner !== FREE) rim(pen, this.colours.ink, { x, y, side: size - gap }, 1);
    });
    pen.globalAlpha = 1;
    if (this.cursor >= 0) {
      const x = (this.cursor % columns) * size;
      const y = Math.floor(this.cursor / columns) * size;
      rim(pen, this.colours.accent, { x, y, side: size - gap }, 2);
    }
  }

  drawCell(pen, owner, { x, y, side }) {
    const { colours } = this;
    if (owner === FREE) {
      rim(pen, colours.line, { x, y, side }, 1);
      return;
    }
    pen.fillStyle = owner > 0 ? colours.requests[colourIndex(owner)] : owner === SHARED ? colours.ink : colours.cached;
    pen.fillRect(x, y, side, side);
    if (owner === CACHED && side >= 5) {
      pen.strokeStyle = colours.cachedLine;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x, y + side);
      pen.lineTo(x + side, y);
      pen.stroke();
    }
    if (owner > 0 && isSecondRound(owner) && side >= 5) {
      pen.fillStyle = colours.paper;
      const notch = Math.ceil(side / 4);
      pen.fillRect(x + side - notch, y, notch, notch);
    }
    if (owner === SHARED && side >= 3) {
      const hole = Math.max(1, Math.round(side / 3));
      pen.fillStyle = colours.paper;
      pen.fillRect(x + (side - hole) / 2, y + (side - hole) / 2, hole, hole);
    }
  }
}

function rim(pen, colour, { x, y, side }, width) {
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.strokeRect(x + width / 2, y + width / 2, side - width, side - width);
}
