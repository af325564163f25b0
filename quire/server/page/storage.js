// localStorage or sessionStorage where the browser lends one, a Map where it does not (private
// modes, full disks, blocked cookies). Callers never see an exception; `kept` says which it is.

export class Store {
  constructor(kind) {
    this.memory = new Map();
    this.kept = true;
    try {
      this.backing = window[kind];
      this.backing.setItem("quire.probe", "1");
      this.backing.removeItem("quire.probe");
    } catch {
      this.backing = null;
      this.kept = false;
    }
  }

  get(key) {
    if (this.memory.has(key)) return this.memory.get(key);
    return this.backing ? this.backing.getItem(key) : null;
  }

  /** Returns whether the value will survive a reload. */
  set(key, value) {
    try {
      if (!this.backing) throw new Error("no storage");
      this.backing.setItem(key, value);
      this.memory.delete(key);
      return true;
    } catch {
      this.memory.set(key, value);
      return false;
    }
  }

  remove(key) {
    this.memory.delete(key);
    if (this.backing) this.backing.removeItem(key);
  }

  keys() {
    const kept = this.backing ? Object.keys(this.backing) : [];
    return [...new Set([...kept, ...this.memory.keys()])];
  }

  readJson(key, fallback) {
    try {
      return JSON.parse(this.get(key)) ?? fallback;
    } catch {
      return fallback;
    }
  }
}

export const local = new Store("localStorage");
export const session = new Store("sessionStorage");
