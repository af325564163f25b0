// Light, dark, or whatever the system says. Listeners are told when the colours on screen change,
// because the canvas does not follow stylesheets by itself.

import { icon } from "./dom.js";
import { local } from "./storage.js";

const ORDER = ["auto", "light", "dark"];
const SAYS = { auto: "follow the system", light: "light", dark: "dark" };
const listeners = new Set();

export const onThemeChange = (listener) => listeners.add(listener);

function tell() {
  for (const listener of listeners) listener();
}

export function setUpTheme(button) {
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.replaceChildren(icon(theme));
    button.setAttribute("aria-label", `Theme: ${SAYS[theme]}`);
    button.dataset.tip = `Theme: ${SAYS[theme]}`;
  };
  let theme = ORDER.includes(local.get("quire.theme")) ? local.get("quire.theme") : "auto";
  show(theme);
  button.addEventListener("click", () => {
    theme = ORDER[(ORDER.indexOf(theme) + 1) % ORDER.length];
    local.set("quire.theme", theme);
    show(theme);
    tell();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);
}
