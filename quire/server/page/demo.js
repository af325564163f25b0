// A demo load: several answers at once, asked for by this browser. All share a long system prompt, so
// the prefix tree grows one trunk with many branches, and their lengths differ, so that some still
// read while others write. A browser opens at most six connections to a server; one shows this view
// and one stays free for the chat, so above four a connection asks for several answers (`n`).

import { bodyOf, complete } from "./completion.js";
import { byId } from "./dom.js";
import { plural } from "./format.js";

const SYSTEM = [
  "You are the librarian of a small town library, patient and exact.",
  "You answer in plain language, in complete sentences, without lists unless one is asked for.",
  "When a question touches on a book, you name its author and the year it first appeared.",
  "When you are not sure of a fact you say so, and you say where one could look it up.",
  "You never guess at dates, you never invent titles, and you keep every answer under two pages.",
  "You know the library's rules: books go out for four weeks, newspapers stay in the reading room,",
  "the archive opens on Tuesdays and Thursdays, and anyone may ask for a book from another town.",
].join(" ");

const MAX_CONNECTIONS = 4;

const TOPICS = [
  "how books were made before the printing press",
  "what a quire is and how bookbinders sew them together",
  "why paper turns yellow",
  "the history of the index at the end of a book",
  "how a library decides which books to keep",
  "what the first encyclopaedias left out",
  "the difference between a codex and a scroll",
  "how to read a map that is three hundred years old",
];

const LENGTHENERS = [
  "",
  " Begin with a short summary, then tell the story in order, and end with what a visitor to our library could read next on the subject.",
  " I am writing a talk for the evening club. They have heard about this before, so please leave out what everybody knows, "
    + "and tell me about the people involved: where they lived, what they did for a living, whom they argued with, what they got wrong, "
    + "and what became of their work afterwards. Please also explain any word of the trade when it first occurs, because half of the "
    + "audience will be children, and mention one thing in the story that is still being argued about today.",
];

/** The i-th prompt of a round; rounds differ, so that not everything is found in memory. */
export function demoPrompt(i, round) {
  const topic = TOPICS[(i + round * 3) % TOPICS.length];
  return `Please tell me about ${topic}.${LENGTHENERS[(i + round) % LENGTHENERS.length]}`;
}

/** How many answers each connection asks for, so that they add up to `number`. */
export function sharesOf(number) {
  const connections = Math.min(number, MAX_CONNECTIONS);
  return Array.from({ length: connections }, (_, i) => Math.ceil((number - i) / connections));
}

export class Demo {
  constructor({ modelName }) {
    this.modelName = modelName;
    this.controller = null;
    const countInput = byId("demo-count");
    countInput.addEventListener("input", () => (byId("demo-value").textContent = countInput.value));
    byId("demo").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.controller) this.stop();
      else this.start(countInput.valueAsNumber);
    });
  }

  async start(number) {
    this.controller = new AbortController();
    this.tally = { sent: 0, answered: 0, refused: 0, reason: "" };
    this.show();
    await Promise.all(sharesOf(number).map((share, i) => this.visit(i, share, this.controller.signal)));
    this.controller = null;
    this.show();
  }

  async visit(i, share, signal) {
    for (let round = 0; !signal.aborted && (round === 0 || byId("demo-repeat").checked); round += 1) {
      this.tally.sent += share;
      this.show();
      const messages = [{ role: "user", content: demoPrompt(i, round) }];
      const settings = { max_tokens: 64 + 32 * (i % 4), temperature: 0.8, ...(share > 1 ? { n: share } : {}) };
      const body = bodyOf({ model: this.modelName(), system: SYSTEM, messages, settings });
      const { error, isStopped } = await complete(body, { signal });
      if (error) {
        this.tally.refused += share;
        this.tally.reason = error.message;
        await new Promise((resolve) => setTimeout(resolve, 1000)); // do not hammer a server that refuses
      } else if (!isStopped) this.tally.answered += share;
      this.show();
    }
  }

  show() {
    byId("demo-go").textContent = this.controller ? "Stop" : "Start";
    byId("demo-go").classList.toggle("is-stop", Boolean(this.controller));
    const { sent, answered, refused, reason } = this.tally;
    const failed = refused ? `, ${refused} refused: ${reason}` : "";
    byId("demo-status").textContent = `${answered} of ${plural(sent, "answer")}${failed}`;
  }

  stop() {
    this.controller?.abort();
  }
}
