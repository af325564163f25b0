// The page's first module: builds the views and tells each when it is shown. Everything the page
// knows about the server is in wire.js, completion.js and feed.js.

import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { byId } from "./dom.js";
import { Feed } from "./feed.js";
import { setUpHints } from "./hints.js";
import { Inside } from "./inside.js";
import { Models } from "./models.js";
import { ServerView } from "./server.js";
import { setUpTabs } from "./tabs.js";
import { setUpTheme } from "./theme.js";

const models = new Models(byId("model"), byId("model-state"));
const modelName = () => models.name;
const feed = new Feed();

setUpHints();
setUpTheme(byId("theme"));
const views = {
  chat: new Chat({ modelName }),
  inside: new Inside({ feed, modelName }),
  compare: new Compare({ root: byId("panel-compare"), feed, modelName }),
  server: new ServerView({ models }),
};
let current = "chat";

setUpTabs(document.querySelector('[role="tablist"]'), (name) => {
  current = name;
  views.inside.show(name === "inside");
  views.compare.show(name === "compare");
  views.server.show(name === "server");
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) views[current].stop();
});
addEventListener("quire:key", () => models.list.length || models.load());
models.load();
