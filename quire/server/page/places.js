// Where pages go that leave the pool: memory of the host, a disk, other engines. Shown where there
// is any; each place says how full it is and how many pages came back from it.

import { h, reconcile, setText } from "./dom.js";
import { bytes, plural } from "./format.js";
import { term } from "./hints.js";

const NAMES = { memory: "Memory", disk: "Disk", engines: "Other engines" };

class Place {
  constructor({ name }) {
    this.fill = h("span", { class: "position-fill" });
    this.track = h("span", { class: "position-track" }, this.fill);
    this.facts = h("span", { class: "faint" });
    this.element = h("li", {}, h("span", {}, NAMES[name] ?? name), this.track, this.facts);
  }

  update({ bytes: held, limit, loads }) {
    this.track.classList.toggle("is-bare", limit === 0);
    this.fill.style.width = limit ? `${Math.min(100, (100 * held) / limit)}%` : "0";
    const full = limit ? `${bytes(held)} of ${bytes(limit)} · ` : "";
    setText(this.facts, `${full}${plural(loads, "page")} came back`);
  }
}

export class PlacesView {
  constructor(root) {
    this.root = root;
    this.places = new Map();
    this.list = h("ul", { class: "places", "aria-label": "Places outside the pool" });
    root.append(h("h2", {}, term("Beyond the pool", "places")), this.list);
  }

  update({ places = [] }) {
    this.root.hidden = places.length === 0;
    reconcile(this.list, this.places, places, ({ name }) => name, (place) => new Place(place));
  }
}
