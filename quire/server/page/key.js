// Asking for the API key. Several requests may be refused at once; they share one dialog.

import { byId } from "./dom.js";

let asking = null;

/** The key typed, or "" when the person declined. */
export function askForKey(reason) {
  asking ??= ask(reason).finally(() => (asking = null));
  return asking;
}

function ask(reason) {
  const dialog = byId("key-dialog");
  const input = byId("key-input");
  byId("key-reason").textContent = reason;
  input.value = "";
  dialog.returnValue = "";
  // Enter in the field would press the first button of the form, which is Cancel.
  const onEnter = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    dialog.close("use");
  };
  input.addEventListener("keydown", onEnter);
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    dialog.addEventListener(
      "close",
      () => {
        input.removeEventListener("keydown", onEnter);
        const key = dialog.returnValue === "use" ? input.value.trim() : "";
        input.value = "";
        resolve(key);
      },
      { once: true },
    );
  });
}
