// The page's first module: builds the three views and tells each when it is shown. Everything the
// page knows about the server is in wire.js, completion.js and feed.js.

import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { byId, h } from "./dom.js";
import { Feed } from "./feed.js";
import { setUpHints } from "./hints.js";
import { Inside } from "./inside.js";
import { setUpTabs } from "./tabs.js";
import { setUpTheme } from "./theme.js";
import { request } from "./wire.js";

const MODELS_RETRY_MS = 3000;
const STATES_MS = 5000;

const models = byId("model");
const modelName = () => models.value;
const feed = new Feed();

async function loadModels() {
  const notice = byId("notice");
  try {
    const { data } = await (await request("/v1/models")).json();
    models.replaceChildren(...data.map((model) => h("option", { value: model.id }, label(model))));
    if (data.some(({ state }) => state)) setTimeout(showStates, STATES_MS);
    notice.hidden = true;
    describeModel(data);
    models.onchange = () => describeModel(data);
  } catch (error) {
    notice.textContent = error.message;
    notice.hidden = false;
    if (error.status !== 401) setTimeout(loadModels, MODELS_RETRY_MS);
  }
}

// Of several models, those that are not ready say so; choosing one loads it with its first answer.
function label({ id, state }) {
  return state && state !== "ready" ? `${id} (${state})` : id;
}

async function showStates() {
  try {
    const { data } = await (await request("/v1/models")).json();
    for (const option of models.options) {
      const found = data.find(({ id }) => id === option.value);
      if (found) option.textContent = label(found);
    }
  } catch {
    // The server is away; the labels stay as they were.
  }
  setTimeout(showStates, STATES_MS);
}

function describeModel(data) {
  const length = data.find(({ id }) => id === models.value)?.max_model_len;
  if (length) models.dataset.tip = `Reads and writes up to ${length.toLocaleString("en")} tokens`;
}

setUpHints();
setUpTheme(byId("theme"));
const views = {
  chat: new Chat({ modelName }),
  inside: new Inside({ feed, modelName }),
  compare: new Compare({ root: byId("panel-compare"), feed, modelName }),
};
let current = "chat";

setUpTabs(document.querySelector('[role="tablist"]'), (name) => {
  current = name;
  views.inside.show(name === "inside");
  views.compare.show(name === "compare");
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) views[current].stop();
});
addEventListener("quire:key", () => models.length || loadModels());
loadModels();
