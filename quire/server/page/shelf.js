// The list of conversations beside the chat: open, rename in place, delete with a second look.

import { byId, h, icon } from "./dom.js";
import { exportChats, listChats, removeChat, renameChat, titleOf } from "./history.js";

export class Shelf {
  /** `onOpen(chat)` and `onRemove(chat)` tell the chat view. */
  constructor({ onOpen, onRemove, onRename }) {
    this.list = byId("chat-list");
    this.onOpen = onOpen;
    this.onRemove = onRemove;
    this.onRename = onRename;
    byId("chat-export").addEventListener("click", () => exportChats(listChats()));
  }

  show(currentId) {
    const chats = listChats();
    this.list.replaceChildren(...chats.map((chat) => this.rowOf(chat, chat.id === currentId)));
    byId("chat-export").disabled = !chats.length;
  }

  rowOf(chat, isCurrent) {
    const title = titleOf(chat);
    const open = h("button", { type: "button", class: "chat-open", "aria-current": isCurrent ? "true" : null,
      on: { click: () => this.onOpen(chat) } }, title);
    const row = h("li", {}, open);
    row.append(
      h("button", { type: "button", class: "icon-button tiny", "aria-label": `Rename ${title}`,
        on: { click: () => this.rename(row, chat) } }, icon("edit")),
      h("button", { type: "button", class: "icon-button tiny", "aria-label": `Delete ${title}`,
        on: { click: () => this.confirm(row, chat) } }, icon("remove")),
    );
    return row;
  }

  rename(row, chat) {
    const input = h("input", { type: "text", "aria-label": "New name", maxlength: 120 });
    input.value = titleOf(chat);
    let isOver = false;
    const end = (isKept) => {
      if (isOver) return; // removing a focused field blurs it, which would end twice
      isOver = true;
      if (isKept && input.value.trim()) {
        renameChat(chat, input.value.trim());
        this.onRename(chat);
      } else this.onRename(null);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      end(event.key === "Enter");
    });
    input.addEventListener("blur", () => end(true));
    row.replaceChildren(input);
    input.select();
  }

  confirm(row, chat) {
    const yes = h("button", { type: "button", class: "quiet small danger", on: { click: () => {
      removeChat(chat);
      this.onRemove(chat);
    } } }, "Delete");
    const no = h("button", { type: "button", class: "quiet small", on: { click: () => this.onRename(null) } }, "Keep");
    row.replaceChildren(h("span", { class: "chat-ask" }, titleOf(chat)), yes, no);
    yes.focus();
  }
}
