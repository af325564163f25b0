// Short explanations on hover, focus or tap. `data-hint` names an entry of the glossary below,
// `data-tip` carries its own text. One floating note serves the whole page.

import { byId, h } from "./dom.js";

const GLOSSARY = {
  page: "A page holds the keys and values of a fixed run of tokens (16, say) in every layer, or in every layer of a group where layers see different distances. A request's pages can lie anywhere: a table says which page comes next, as in virtual memory. So no memory is set aside for text that is never written.",
  free: "Holds nothing anyone could use. The first to be handed out.",
  live: "Being read and written by one running request. The colour is that request's colour everywhere on this view.",
  shared: "Several running requests begin with the same tokens and read the same page. It is stored once, and copied only if one of them must write into it.",
  cached: "The request that filled it has finished, but its contents still match the start of some prompt. If such a prompt comes, the page is used as it is and those tokens are not computed again. Under pressure the page least recently used is given away first.",
  pool: "All the memory for keys and values, taken once when the engine starts and cut into pages of equal size.",
  places: "A page that leaves the pool is not lost: its keys and values go to memory of the machine or to a disk, which outlives a restart. When a prompt begins with its tokens again it is brought back, where that is faster than computing it. Engines that read prompts for others hand their pages over the same way.",
  tree: "Every branch is a run of tokens that has been computed and is still in memory. A new prompt walks down from the left as far as its tokens agree; everything it passes need not be computed. Bars are drawn to scale, one mark per page.",
  hits: "How many prompts found this piece in memory and skipped computing it.",
  batch: "A step is one pass through the model. All running requests share it: some feed a piece of their prompt, some a single token. Together they may feed only so many tokens.",
  prefill: "A prompt must be read before the first word can be written. Long prompts are read in chunks, a chunk per step, so that others can go on writing meanwhile.",
  decode: "Writing: each step feeds the last token and yields the next one. Cheap in arithmetic, but all the weights must be read for it, which is why many requests share a step.",
  queue: "Requests that are waiting for a place in the batch or for pages.",
  preempted: "Pages ran out, so this request had to give its pages back and will compute them again later.",
  ttft: "Time to first token: from sending the request until the first piece of the answer. Queueing plus reading the prompt.",
  itl: "Inter-token latency: the pause between two pieces of an answer. People read at about 100 to 200 ms a word.",
  tps: "Tokens written per second. A token is about three quarters of an English word.",
  hitrate: "The share of prompt tokens that were found in memory instead of being computed.",
  speculation: "A cheap guesser proposes several tokens, the model checks them all in one step, and keeps those it would have written itself. The answer does not change, only the speed.",
  experts: "Layers of this model have many feed-forward blocks, and a router sends each token to a few of them. The fuller the busiest one, the longer the others wait for it: 1 is perfectly even.",
  accepted: "How many of the guessed tokens the model kept.",
  wasted: "Slots taken but not yet written: the unfilled end of each request's last page.",
  temperature: "How boldly to choose. 0 always takes the likeliest token; 1 follows the model's own odds.",
  top_p: "Choose only among the likeliest tokens that together make up this much probability.",
  top_k: "Choose only among this many likeliest tokens.",
  min_p: "Drop tokens less likely than this fraction of the likeliest.",
  max_tokens: "The longest answer, in tokens.",
  seed: "The same seed and the same settings give the same answer.",
  repetition_penalty: "Above 1: tokens already used become less likely.",
  presence_penalty: "Lowers a token once it has appeared in the answer.",
  frequency_penalty: "Lowers a token more each time it appears in the answer.",
  stop: "The answer ends before any of these strings. One per line.",
  priority: "Lower numbers go first when the server schedules by priority.",
  logprobs: "Asks for the probability of each token. The answer can then be shown with its doubts coloured in.",
  system: "Instructions the model reads before the conversation.",
};

/** A word with an explanation: focusable, so that keyboards and fingers reach it too. */
export function term(label, hint, says = null) {
  return h("button", { type: "button", class: "term", "aria-label": says, data: { hint } }, label);
}

const MARGIN = 10;

function place(tip, target) {
  const box = target.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.min(Math.max(MARGIN, box.left), innerWidth - width - MARGIN);
  const isRoomBelow = box.bottom + height + MARGIN < innerHeight;
  const top = isRoomBelow ? box.bottom + 6 : Math.max(MARGIN, box.top - height - 6);
  tip.style.left = `${Math.max(MARGIN, left)}px`;
  tip.style.top = `${top}px`;
}

export function setUpHints() {
  const tip = byId("tip");
  let owner = null;

  const hide = () => {
    if (!owner) return;
    owner.removeAttribute("aria-describedby");
    owner = null;
    tip.hidden = true;
  };
  const show = (target) => {
    const text = target.dataset.tip ?? GLOSSARY[target.dataset.hint];
    if (!text) return;
    if (owner !== target) hide();
    owner = target;
    tip.textContent = text;
    tip.hidden = false;
    // Inside a modal dialog only the dialog's own children are visible.
    (target.closest("dialog") ?? document.body).append(tip);
    target.setAttribute("aria-describedby", "tip");
    place(tip, target);
  };
  const targetOf = (event) => event.target.closest?.("[data-hint], [data-tip]");

  document.addEventListener("pointerover", (event) => {
    const target = targetOf(event);
    if (target) show(target);
    else hide();
  });
  document.addEventListener("focusin", (event) => {
    const target = targetOf(event);
    if (target?.matches(":focus-visible")) show(target);
    else if (target !== owner) hide();
  });
  document.addEventListener("click", (event) => {
    const target = targetOf(event);
    if (target?.dataset.hint) show(target);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
  });
  document.addEventListener("scroll", hide, { capture: true, passive: true });
}
