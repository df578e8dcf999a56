// One message of the conversation on the page. `update` brings it up to date while it grows.

import { isWhole } from "./answer.js";
import { copyButton } from "./copy.js";
import { byId, el, icon } from "./dom.js";
import { render } from "./markdown.js";

const FINISHES = {
  length: "It ends here because max_tokens or the context is used up.",
  stopped: "Stopped.",
  content_filter: "The server held back the rest.",
};

/** What a person said, with a way to say it otherwise: `edit(text)`, if given, is called with the new words. */
export class UserMessage {
  constructor(message, edit) {
    this.message = message;
    this.text = el("div", { class: "bubble" }, message.content);
    this.actions = el("div", { class: "actions" }, copyButton("Copy your message", () => message.content));
    if (edit) {
      const label = "Edit your message";
      const open = () => this.open(edit);
      this.button = el("button", { type: "button", class: "quiet edit", "aria-label": label, title: label, onclick: open }, icon("edit"));
      this.actions.append(this.button);
    }
    const name = el("h2", { class: "visually-hidden" }, "You");
    this.element = el("article", { class: "message user" }, name, this.text, this.actions);
  }

  /** Show a field in the message's place. Enter sends, Escape leaves everything as it was. */
  open(edit) {
    const field = el("textarea", { class: "edit-field", rows: "3", "aria-label": "Your message, edited" });
    field.value = this.message.content;
    const close = () => {
      form.replaceWith(this.text, this.actions);
      this.button.focus();
    };
    const send = (event) => {
      event.preventDefault();
      if (field.value.trim()) edit(field.value);
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
    });
    const cancel = el("button", { type: "button", onclick: close }, "Cancel");
    const form = el("form", { class: "edit-form", onsubmit: send }, field, cancel, el("button", { class: "primary" }, "Send"));
    this.actions.remove();
    this.text.replaceWith(form);
    field.focus();
  }

  /** `running`: an answer is on its way, so it is too late for other words. */
  update(running) {
    if (this.button) this.button.hidden = running;
  }
}

/** What the model said: thought, text, calls, an error, figures. `results` are the tool messages that follow;
 * `again` and `resolve`, if given, ask anew and go on with results of the calls. */
export class Answer {
  constructor(message, { results, again, resolve }) {
    Object.assign(this, { message, results, resolve });
    this.thought = el("div", { class: "markdown" });
    this.thoughtLabel = el("span");
    const summary = el("summary", {}, icon("fold"), this.thoughtLabel);
    this.thinking = el("details", { class: "thinking", ontoggle: () => this.update() }, summary, this.thought);
    this.text = el("div", { class: "markdown" });
    this.calls = el("div", { class: "calls" });
    this.notice = el("div", {});
    this.figures = el("span", { class: "figures" });
    this.actions = el("div", { class: "actions" }, copyButton("Copy the answer", () => message.content), this.figures);
    if (again) {
      const label = "Ask for another answer";
      this.again = el("button", { type: "button", class: "quiet again", "aria-label": label, title: label, onclick: again }, icon("again"));
      this.figures.before(this.again);
    }
    const name = el("h2", { class: "author" }, message.model || "Model");
    this.element = el("article", { class: "message assistant" }, name, this.thinking, this.text, this.calls, this.notice, this.actions);
    this.cards = [];
  }

  /** `running`: more is to come; without it, as the last time. */
  update(running = this.running) {
    this.running = Boolean(running);
    const { message } = this;
    const answering = message.content !== "" || message.calls.length > 0;
    this.element.setAttribute("aria-busy", String(this.running));
    this.element.classList.toggle("waiting", this.running && !answering && !message.reasoning);
    this.thinking.hidden = !message.reasoning;
    this.thinking.classList.toggle("now", this.running && !answering);
    this.thoughtLabel.textContent = this.running && !answering ? "Thinking…" : thoughtText(message.figures);
    // A folded thought is not worth laying out again and again.
    if (this.thinking.open) render(this.thought, message.reasoning);
    render(this.text, message.content);
    this.updateCalls();
    this.updateNotice();
    this.figures.textContent = figuresText(message.figures);
    if (this.again) this.again.hidden = this.running;
    this.actions.hidden = this.running && !message.figures.tokens;
  }

  updateCalls() {
    const { calls } = this.message;
    for (const call of calls.slice(this.cards.length)) this.cards.push(new Call(call, this.results?.get(call.id)));
    for (const card of this.cards) {
      if (!card.element.isConnected) this.calls.append(card.element);
      card.update(this.running);
    }
    const open = !this.running && this.resolve && calls.length > 0 && calls.every(isWhole);
    if (open && !this.form) this.calls.append(this.resultsForm());
  }

  /** Fields for what the tools gave, one a call; all are sent at once. */
  resultsForm() {
    const fields = this.cards.map((card) => card.askResult());
    const send = (event) => {
      event.preventDefault();
      this.resolve(fields.map((field) => field.value));
    };
    const label = fields.length > 1 ? "Send the results" : "Send the result";
    this.form = el("form", { class: "results", onsubmit: send }, el("button", { class: "primary" }, label));
    for (const field of fields) {
      field.addEventListener("keydown", (event) => {
        if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
      });
    }
    return this.form;
  }

  updateNotice() {
    const { error, finish } = this.message;
    if (error) {
      if (this.notice.className !== "error") {
        const title = el("strong", {}, error.title);
        this.notice.replaceChildren(title, el("pre", { tabindex: "0", role: "region", "aria-label": "What the server said" }, error.message));
        this.notice.className = "error";
        this.notice.setAttribute("role", "alert");
      }
    } else if (!this.running) {
      this.notice.className = "notice";
      this.notice.textContent = FINISHES[finish] ?? "";
    }
  }
}

/** A tool call: its name, its arguments as they come, and its result. */
class Call {
  constructor(call, result) {
    Object.assign(this, { call, result });
    this.name = el("span", { class: "call-name" });
    this.arguments = el("pre", { tabindex: "0", role: "region", "aria-label": "Arguments" }, el("code"));
    const copy = copyButton("Copy the arguments", () => readable(call.arguments));
    this.element = el("section", { class: "call", "aria-label": "Tool call" });
    this.element.append(el("div", { class: "call-bar" }, icon("tool"), this.name, copy), this.arguments);
    if (result) {
      const text = el("pre", { tabindex: "0", role: "region", "aria-label": "Result" }, result.content);
      this.element.append(el("div", { class: "call-result" }, el("span", {}, "Result"), text));
    }
  }

  update(running) {
    this.name.textContent = this.call.name || "…";
    this.arguments.firstChild.textContent = running ? this.call.arguments : readable(this.call.arguments);
  }

  askResult() {
    const field = el("textarea", { rows: "2", placeholder: "What the tool gave: text or JSON" });
    const label = el("label", { class: "call-result" }, el("span", {}, `Result of ${this.call.name}`), field);
    this.element.append(label);
    return field;
  }
}

/** Say something to screen readers once. */
export function announce(text) {
  byId("live").textContent = text;
}

function readable(text) {
  try {
    return JSON.stringify(JSON.parse(text || "{}"), null, 2);
  } catch {
    return text;
  }
}

function thoughtText({ thought, reasoning }) {
  const time = thought ? ` for ${seconds(thought)}` : "";
  return `Thought${time}${reasoning ? ` · ${reasoning.toLocaleString("en")} tokens` : ""}`;
}

/** Tokens and speed in one line. */
export function figuresText({ tokens, rate, ttft, prompt, cached }) {
  const parts = [
    tokens !== null && tokens !== undefined && `${tokens.toLocaleString("en")} token${tokens === 1 ? "" : "s"}`,
    rate && `${rate < 100 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en")} tokens/s`,
    ttft && `first token after ${seconds(ttft)}`,
    prompt && `prompt ${prompt.toLocaleString("en")}${cached ? `, ${cached.toLocaleString("en")} cached` : ""}`,
  ];
  return parts.filter(Boolean).join(" · ");
}

function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 60 ? `${value.toFixed(1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}
