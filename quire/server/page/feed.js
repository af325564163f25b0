// The stream of engine snapshots. Connected only while somebody looks; when it drops it comes back
// by itself, waiting longer each time. Listeners get snapshots, watchers get the connection's state.

import { eventsOf, request } from "./wire.js";

const HZ = 5;
const MIN_WAIT_MS = 500;
const MAX_WAIT_MS = 15_000;

export class Feed {
  constructor() {
    this.listeners = new Set();
    this.watchers = new Set();
    this.last = null;
    this.controller = null;
    document.addEventListener("visibilitychange", () => this.settle());
  }

  /** `listener(snapshot)` from now on; returns the function that ends it. */
  listen(listener) {
    this.listeners.add(listener);
    this.settle();
    return () => {
      this.listeners.delete(listener);
      this.settle();
    };
  }

  /** `watcher({state, message, waitMs})`, state one of "connecting", "open", "lost" (waitMs null: for good). */
  watch(watcher) {
    this.watchers.add(watcher);
  }

  settle() {
    const isWanted = this.listeners.size > 0 && !document.hidden;
    if (isWanted && !this.controller) {
      this.controller = new AbortController();
      this.run(this.controller);
    } else if (!isWanted && this.controller) {
      this.controller.abort();
      this.controller = null;
    }
  }

  async run(controller) {
    const { signal } = controller;
    let waitMs = MIN_WAIT_MS;
    this.tell({ state: "connecting" });
    while (!signal.aborted) {
      let message = "The stream ended.";
      try {
        const response = await request(`/inside?hz=${HZ}`, { signal });
        for await (const data of eventsOf(response)) {
          if (signal.aborted) return;
          waitMs = MIN_WAIT_MS;
          this.tell({ state: "open" });
          this.take(JSON.parse(data));
        }
      } catch (error) {
        if (signal.aborted) return;
        message = error.message;
        if (error.status === 401) {
          // The person declined to give a key: asking again by itself would be a nuisance.
          this.tell({ state: "lost", message, waitMs: null });
          this.controller = null;
          return;
        }
      }
      this.tell({ state: "lost", message, waitMs });
      await pause(waitMs, signal);
      waitMs = Math.min(MAX_WAIT_MS, waitMs * 2);
    }
  }

  take(snapshot) {
    this.last = snapshot;
    for (const listener of [...this.listeners]) listener(snapshot);
  }

  tell(status) {
    for (const watcher of this.watchers) watcher(status);
  }
}

function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    }, { once: true });
  });
}
