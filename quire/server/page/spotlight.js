// Which request is being looked at. Pointing at a lane lights up its pages, pointing at a page
// lights up its lane; a click keeps the light on until the next click.

export class Spotlight {
  constructor() {
    this.pointed = null;
    this.pinned = null;
    this.listeners = new Set();
  }

  get id() {
    return this.pointed ?? this.pinned;
  }

  listen(listener) {
    this.listeners.add(listener);
  }

  point(id) {
    this.change(() => (this.pointed = id));
  }

  togglePin(id) {
    this.change(() => (this.pinned = this.pinned === id ? null : id));
  }

  change(apply) {
    const before = this.id;
    apply();
    if (this.id === before) return;
    for (const listener of this.listeners) listener(this.id);
  }
}
