// Conversations kept in this browser, one storage entry each, so that two open tabs do not
// overwrite each other's list and a long conversation does not make the others expensive to save.

import { local } from "./storage.js";

const PREFIX = "quire.chat.";
const MAX_TITLE = 60;

/** {id, title, created, updated, system, messages: [{role, content, reasoning?, stats?, error?}]} */
export function newChat() {
  // randomUUID exists in secure contexts only; plain http on a LAN is not one.
  const id = `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
  return { id, title: "", created: Date.now(), updated: Date.now(), system: "", messages: [] };
}

export function titleOf(chat) {
  if (chat.title) return chat.title;
  const first = chat.messages.find(({ role }) => role === "user")?.content.trim().split("\n")[0] ?? "";
  return first.length > MAX_TITLE ? `${first.slice(0, MAX_TITLE)}…` : first || "New conversation";
}

const isChat = (value) => value && typeof value.id === "string" && Array.isArray(value.messages);

/** Newest first. Entries we cannot read are left where they are and not shown. */
export function listChats() {
  const chats = local.keys().filter((key) => key.startsWith(PREFIX))
    .map((key) => local.readJson(key, null)).filter(isChat);
  return chats.sort((a, b) => b.updated - a.updated);
}

/** Returns whether the conversation will survive a reload. */
export function saveChat(chat) {
  chat.updated = Date.now();
  return local.set(PREFIX + chat.id, JSON.stringify(chat));
}

/** As `saveChat`, but a new name does not move it to the top. */
export function renameChat(chat, title) {
  chat.title = title;
  return local.set(PREFIX + chat.id, JSON.stringify(chat));
}

export const removeChat = (chat) => local.remove(PREFIX + chat.id);

/** Hands the browser a JSON file to save. */
export function exportChats(chats) {
  const text = JSON.stringify({ format: "quire-chats", version: 1, chats }, null, 2);
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = address;
  link.download = `quire-chats-${new Date().toISOString().slice(0, 10)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
