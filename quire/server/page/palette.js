// Colours of requests. A request keeps its colour for life, and requests that run together have
// neighbouring ids, so walking through the palette keeps them apart. Every second time round the
// mark differs as well (a notch, a double line). The colours themselves are in style.css (--r0 ...
// --r11), spread in lightness as well as hue for those who see fewer hues.

const NUM_COLOURS = 12;

export const colourIndex = (id) => ((id % NUM_COLOURS) + NUM_COLOURS) % NUM_COLOURS;

export const isSecondRound = (id) => Math.floor(id / NUM_COLOURS) % 2 === 1;

/** For DOM nodes: everything inside may use var(--own). */
export function dye(element, id) {
  element.style.setProperty("--own", `var(--r${colourIndex(id)})`);
  element.classList.toggle("is-second", isSecondRound(id));
}

/** For the canvas: the colours as the current theme resolves them. */
export function resolveColours() {
  const probe = document.createElement("span");
  document.body.append(probe);
  const resolve = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  const colours = {
    requests: Array.from({ length: NUM_COLOURS }, (_, i) => resolve(`--r${i}`)),
    ink: resolve("--ink"),
    paper: resolve("--sheet"),
    line: resolve("--line"),
    cached: resolve("--cached"),
    cachedLine: resolve("--cached-line"),
    accent: resolve("--accent"),
  };
  probe.remove();
  return colours;
}
