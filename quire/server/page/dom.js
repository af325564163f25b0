// Building DOM nodes without markup strings: text given here can never become HTML.

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  menu: "M4 6h16M4 12h16M4 18h16",
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2.5M12 19.5V22M2 12h2.5M19.5 12H22M5 5l1.7 1.7M17.3 17.3 19 19M19 5l-1.7 1.7M6.7 17.3 5 19",
  dark: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  remove: "M6 6l12 12M18 6L6 18",
};

/** An element. `on` holds listeners, `data` dataset entries, other keys are attributes. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    } else if (name === "data") {
      Object.assign(element.dataset, value);
    } else {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes = {}) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export function icon(name) {
  const drawing = svg("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" });
  drawing.append(svg("path", { d: ICONS[name] }));
  return drawing;
}

export const byId = (id) => document.getElementById(id);

/** Writes text only when it differs: ten times a second over hundreds of nodes, this is the cost. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/**
 * Makes `parent`'s children follow `items`, one element per key, reusing those already there.
 * `create(item)` returns an object with `element` and `update(item)`; `views` is the caller's Map.
 */
export function reconcile(parent, views, items, keyOf, create) {
  const wanted = new Set();
  let cursor = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    wanted.add(key);
    let view = views.get(key);
    if (!view) {
      view = create(item);
      views.set(key, view);
    }
    view.update(item);
    if (view.element === cursor) cursor = cursor.nextElementSibling;
    else parent.insertBefore(view.element, cursor);
  }
  for (const [key, view] of views) {
    if (wanted.has(key)) continue;
    view.element.remove();
    views.delete(key);
  }
}

/** Copies to the clipboard, also where the page is not a secure context (plain http on a LAN). */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Permission refused: the old way may still work.
    }
  }
  const area = h("textarea", { class: "hidden-text", readonly: true });
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

/** A button that copies what `read()` returns and says so for a moment. */
export function copyButton(read, label = "Copy", className = "quiet small") {
  const button = h("button", { type: "button", class: className }, label);
  button.addEventListener("click", async () => {
    button.textContent = (await copyText(read())) ? "Copied" : "Select and copy by hand";
    setTimeout(() => (button.textContent = label), 1600);
  });
  return button;
}
