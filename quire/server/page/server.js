// The Server view: models, batches and cached answers, looked at again while it is shown. What an
// operator does here is a request like any other; who may not do it is told so.

import { BatchesView } from "./batches.js";
import { CacheView } from "./cache.js";
import { byId } from "./dom.js";
import { ModelsView } from "./models.js";
import { request } from "./wire.js";

const LOOK_MS = 2000;

export class ServerView {
  constructor({ models }) {
    const act = (path, options) => this.act(path, options);
    this.failure = byId("server-failure");
    this.views = [
      new ModelsView(byId("server-models"), models, act),
      new BatchesView(byId("server-batches"), act),
      new CacheView(byId("server-cache"), act),
    ];
    this.timer = null;
  }

  show(isShown) {
    clearTimeout(this.timer);
    this.isShown = isShown;
    if (isShown) this.look();
  }

  async look() {
    clearTimeout(this.timer);
    const results = await Promise.allSettled(this.views.map((view) => view.update()));
    // One that has nothing to show (a server that stores nothing) is not asked again.
    this.views = this.views.filter((_, i) => results[i].reason?.status !== 404);
    this.say(results.find(({ reason }) => reason)?.reason?.message);
    if (this.isShown) this.timer = setTimeout(() => this.look(), LOOK_MS);
  }

  async act(path, options) {
    try {
      await request(path, options);
      await this.look();
    } catch (error) {
      this.say(error.message);
    }
  }

  say(text) {
    this.failure.hidden = !text;
    this.failure.textContent = text ?? "";
  }

  stop() {}
}
