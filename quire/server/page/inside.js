// The Inside view: one snapshot in, every picture redrawn. While the view is hidden the feed is
// closed, so that looking costs the engine nothing when nobody looks.

import { Demo } from "./demo.js";
import { byId, setText } from "./dom.js";
import { FiguresView } from "./figures.js";
import { duration } from "./format.js";
import { LanesView } from "./lanes.js";
import { LatencyView } from "./latency.js";
import { PlacesView } from "./places.js";
import { PoolView } from "./pool.js";
import { Spotlight } from "./spotlight.js";
import { TreeView } from "./tree.js";

export class Inside {
  constructor({ feed, modelName }) {
    this.feed = feed;
    this.unlisten = null;
    this.isFrozen = false;
    const spotlight = new Spotlight();
    this.views = [
      new FiguresView(byId("figures")),
      new PoolView(byId("pool"), spotlight),
      new LanesView(byId("lanes"), spotlight),
      new TreeView(byId("tree")),
      new PlacesView(byId("places")),
      new LatencyView(byId("latency")),
    ];
    this.demo = new Demo({ modelName });
    feed.watch((status) => this.showStatus(status));
    byId("freeze").addEventListener("click", () => this.toggleFreeze());
  }

  show(isShown) {
    if (isShown && !this.unlisten) this.unlisten = this.feed.listen((snapshot) => this.take(snapshot));
    if (!isShown && this.unlisten) {
      this.unlisten();
      this.unlisten = null;
    }
  }

  take(snapshot) {
    if (this.isFrozen) return;
    if (!snapshot.ready) {
      this.say("waiting", "Engine restarting. The picture below is the last one.");
      return;
    }
    this.say("open", `${snapshot.model ?? "Engine"}, up ${duration(1000 * (snapshot.uptime_s ?? 0))}`);
    for (const view of this.views) view.update(snapshot);
  }

  showStatus({ state, message, waitMs }) {
    if (state === "connecting") this.say("waiting", "Connecting to the engine");
    if (state === "lost") this.say("lost", waitMs === null ? message : `${message} Trying again in ${duration(waitMs)}.`);
  }

  say(state, text) {
    // The line itself changes every second; only a change of state is worth reading out.
    if (byId("pulse").dataset.state !== state) setText(byId("pulse-status"), text);
    byId("pulse").dataset.state = this.isFrozen ? "frozen" : state;
    setText(byId("pulse-text"), this.isFrozen ? "Frozen. The engine goes on." : text);
  }

  toggleFreeze() {
    this.isFrozen = !this.isFrozen;
    byId("freeze").setAttribute("aria-pressed", String(this.isFrozen));
    setText(byId("freeze"), this.isFrozen ? "Go on" : "Freeze");
    this.say("open", "");
  }

  stop() {
    this.demo.stop();
  }
}
