// The chat view: a conversation, its composer and its settings. Each conversation may have one
// answer under way, which goes on while another conversation is looked at. Stopping aborts the
// fetch; the server sees the connection close and frees the pages.

import { AnswerView } from "./answer.js";
import { bodyOf, complete, curlOf } from "./completion.js";
import { byId, copyText, h, icon } from "./dom.js";
import { term } from "./hints.js";
import { newChat, listChats, saveChat, titleOf } from "./history.js";
import { KNOBS, Knobs } from "./knobs.js";
import { measure } from "./metrics.js";
import { Shelf } from "./shelf.js";
import { local, session } from "./storage.js";

const NEAR_END = 80; // px from the bottom within which the view follows the text
const OPENINGS = [
  "Explain paged attention to someone who knows operating systems.",
  "Write a short Python function that merges two sorted lists, with a test.",
  "Tell a story in three sentences about a bookbinder and a missing page.",
];

export class Chat {
  constructor({ modelName }) {
    this.modelName = modelName;
    this.runs = new Map(); // chat id -> {chat, controller, row, view}
    this.scroller = byId("scroller");
    this.prompt = byId("prompt");
    this.knobs = new Knobs({
      prefix: "chat",
      names: KNOBS.map(({ name }) => name),
      extras: ["stop", "logprobs"],
      values: local.readJson("quire.settings", {}),
      onChange: () => local.set("quire.settings", JSON.stringify(this.knobs.values())),
    });
    this.shelf = new Shelf({
      onOpen: (chat) => this.open(chat, { isChosen: true }),
      onRemove: (chat) => this.removed(chat),
      onRename: (chat) => this.renamed(chat),
    });
    this.buildSettings();
    this.listen();
    this.setUpDrawers();
    this.open(listChats().find(({ id }) => id === session.get("quire.open")) ?? newChat());
  }

  buildSettings() {
    this.system = h("textarea", { id: "system", rows: 4, placeholder: "None" });
    this.system.addEventListener("input", () => {
      this.chat.system = this.system.value;
      if (this.chat.messages.length) saveChat(this.chat);
    });
    const reset = h("button", { type: "button", class: "quiet small" }, "Back to defaults");
    reset.addEventListener("click", () => {
      this.knobs.fill({});
      local.remove("quire.settings");
    });
    byId("chat-knobs").append(
      h("h2", {}, "Settings"),
      h("span", { class: "knob-label" }, h("label", { for: "system" }, "System prompt"), term("?", "system", "About the system prompt")),
      this.system, this.knobs.element, reset,
    );
    if (!local.kept) byId("chat-kept").textContent = "This browser keeps nothing: gone on reload";
  }

  listen() {
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.runs.has(this.chat.id)) this.stop();
      else this.send(this.prompt.value);
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.runs.has(this.chat.id)) this.send(this.prompt.value);
    });
    this.prompt.addEventListener("input", () => this.fitPrompt());
    byId("chat-new").addEventListener("click", () => this.open(newChat(), { isChosen: true }));
    byId("chat-curl").addEventListener("click", () => this.showCurl());
    byId("curl-copy").addEventListener("click", async () => {
      const isDone = await copyText(byId("curl-text").textContent);
      byId("curl-copy").textContent = isDone ? "Copied" : "Select and copy by hand";
    });
    addEventListener("storage", () => this.shelf.show(this.chat.id));
    addEventListener("pagehide", () => {
      for (const { chat, view } of this.runs.values()) {
        const { content = "", reasoning = "" } = view.answer ?? {};
        if (content) saveChat({ ...chat, messages: [...chat.messages, { role: "assistant", content, reasoning, stats: null }] });
      }
    });
  }

  setUpDrawers() {
    const panel = byId("panel-chat");
    const drawer = (name, button, isOpen) => {
      const show = (value) => {
        panel.dataset[name] = value ? "open" : "closed";
        button.setAttribute("aria-expanded", String(value));
      };
      button.addEventListener("click", () => show(panel.dataset[name] !== "open"));
      show(isOpen);
      return show;
    };
    byId("shelf-toggle").append(icon("menu"));
    this.showShelf = drawer("shelf", byId("shelf-toggle"), innerWidth >= 900);
    this.showKnobs = drawer("knobs", byId("knobs-toggle"), innerWidth >= 1200);
    // On a narrow screen the drawers lie over the text: touching the text puts them away.
    this.scroller.addEventListener("pointerdown", () => {
      if (innerWidth < 900) this.showShelf(false);
      if (innerWidth < 1200) this.showKnobs(false);
    });
  }

  open(chat, { isChosen = false } = {}) {
    // A conversation under way must stay the same object its answer is being written into.
    this.chat = this.runs.get(chat.id)?.chat ?? chat;
    session.set("quire.open", chat.id);
    this.system.value = this.chat.system;
    this.drawMessages();
    this.drawState();
    this.scroller.scrollTop = this.scroller.scrollHeight;
    if (!isChosen) return;
    if (innerWidth < 900) this.showShelf(false);
    this.prompt.focus();
  }

  removed(chat) {
    this.runs.get(chat.id)?.controller.abort();
    this.runs.delete(chat.id);
    if (chat.id === this.chat.id) this.open(newChat());
    else this.shelf.show(this.chat.id);
  }

  renamed(chat) {
    if (chat && chat.id === this.chat.id) this.chat.title = chat.title;
    this.drawState();
  }

  drawState() {
    const isRunning = this.runs.has(this.chat.id);
    byId("chat-title").textContent = titleOf(this.chat);
    const send = byId("send");
    send.textContent = isRunning ? "Stop" : "Send";
    send.classList.toggle("is-stop", isRunning);
    this.shelf.show(this.chat.id);
  }

  drawMessages() {
    const rows = this.chat.messages.map((message, index) => this.rowOf(message, index));
    const run = this.runs.get(this.chat.id);
    if (run) rows.push(run.row);
    if (!rows.length) rows.push(this.welcome());
    byId("messages").replaceChildren(...rows);
  }

  welcome() {
    const starters = OPENINGS.map((text) =>
      h("button", { type: "button", class: "opening", on: { click: () => this.send(text) } }, text));
    return h("li", { class: "welcome" },
      h("p", { class: "welcome-head" }, "A blank page."),
      h("p", {}, "Ask something, then look at ", h("a", { href: "#inside" }, "Inside"),
        " to see how the engine answers: pages being taken, prompts read in chunks, words written one step at a time."),
      ...starters);
  }

  rowOf(message, index) {
    if (message.role === "user") {
      return h("li", { class: "message by-user" }, h("h3", { class: "hidden-text" }, "You"), h("p", {}, message.content));
    }
    const view = new AnswerView();
    const isLast = index === this.chat.messages.length - 1;
    view.finish({ tokens: [], reasoning: "", ...message }, message.stats, isLast ? [this.retryButton()] : []);
    return answerRow(view);
  }

  retryButton() {
    return h("button", { type: "button", class: "quiet small", on: { click: () => this.retry() } }, "Try again");
  }

  retry() {
    if (this.runs.has(this.chat.id)) return;
    while (this.chat.messages.at(-1)?.role === "assistant") this.chat.messages.pop();
    this.drawMessages();
    this.answer();
  }

  send(text) {
    if (!text.trim() || this.runs.has(this.chat.id)) return;
    this.chat.messages.push({ role: "user", content: text.trim() });
    this.prompt.value = "";
    this.fitPrompt();
    this.noteSaved(saveChat(this.chat));
    this.drawMessages();
    this.answer();
  }

  noteSaved(isSaved) {
    if (!isSaved && local.kept) byId("chat-kept").textContent = "Storage is full: gone on reload";
  }

  body(messages = this.chat.messages) {
    const sent = messages.filter(({ role, content }) => role === "user" || content)
      .map(({ role, content }) => ({ role, content }));
    return bodyOf({ model: this.modelName(), system: this.chat.system, messages: sent, settings: this.knobs.fields() });
  }

  async answer() {
    const { chat } = this;
    const controller = new AbortController();
    const view = new AnswerView({ onDraw: () => this.followEnd(chat) });
    const row = answerRow(view);
    const run = { chat, controller, row, view };
    this.runs.set(chat.id, run);
    byId("messages").append(row);
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.drawState();
    byId("chat-status").textContent = "Answering";
    const answer = await complete(this.body(), { signal: controller.signal, onUpdate: (a) => view.update(a) });
    if (this.runs.get(chat.id) !== run) return; // deleted meanwhile
    this.runs.delete(chat.id);
    const { content, reasoning, error } = answer;
    const stats = answer.numPieces ? measure(answer) : null;
    chat.messages.push({ role: "assistant", content, reasoning, stats, error });
    this.noteSaved(saveChat(chat));
    view.finish(answer, stats, chat === this.chat ? [this.retryButton()] : []);
    byId("chat-status").textContent = error ? "" : answer.isStopped ? "Stopped" : "Answer finished";
    this.drawState();
  }

  /** Keeps the newest line in view, unless the reader has scrolled up to read something else. */
  followEnd(chat) {
    if (chat !== this.chat) return;
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    const grown = scrollHeight - (this.lastHeight ?? 0);
    this.lastHeight = scrollHeight;
    if (scrollHeight - scrollTop - clientHeight < NEAR_END + Math.max(0, grown)) this.scroller.scrollTop = scrollHeight;
  }

  stop() {
    this.runs.get(this.chat.id)?.controller.abort();
  }

  fitPrompt() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${Math.min(this.prompt.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  showCurl() {
    const draft = this.prompt.value.trim();
    const messages = [...this.chat.messages];
    if (draft) messages.push({ role: "user", content: draft });
    else while (messages.at(-1)?.role === "assistant") messages.pop(); // the request behind the last answer
    byId("curl-text").textContent = curlOf(this.body(messages), Boolean(session.get("quire.key")));
    byId("curl-copy").textContent = "Copy";
    byId("curl-dialog").showModal();
  }
}

function answerRow(view) {
  return h("li", { class: "message by-model" }, h("h3", { class: "hidden-text" }, "Answer"), view.element);
}
