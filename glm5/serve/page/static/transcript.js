// The conversation on the page: one view a message, kept at its end while it grows unless the reader scrolled up.

import { byId, el } from "./dom.js";
import { Answer, UserMessage } from "./message.js";

const NEAR_END = 80; // pixels

/** `actions`: edit(position, text), again(), resolve(texts). */
export class Transcript {
  constructor(actions) {
    this.actions = actions;
    this.log = byId("log");
    this.list = byId("messages");
    this.toEnd = byId("to-end");
    this.views = new Map();
    this.growing = new Set();
    this.log.addEventListener("scroll", () => this.showToEnd(), { passive: true });
    this.toEnd.addEventListener("click", () => this.scrollToEnd());
  }

  /** Show a conversation from the start. `running`: its last message still grows. */
  show(chat, running) {
    const { messages } = chat;
    const last = messages.at(-1);
    const lastUser = messages.findLast((message) => message.role === "user");
    const results = new Map(messages.filter((message) => message.role === "tool").map((message) => [message.id, message]));
    const before = this.views;
    this.views = new Map();
    for (const [position, message] of messages.entries()) {
      if (message.role === "user") {
        const edit = message === lastUser ? (text) => this.actions.edit(position, text) : null;
        this.views.set(message, new UserMessage(message, edit));
      } else if (message.role === "assistant") {
        const { again, resolve } = message === last ? this.actions : {};
        const view = new Answer(message, { results, again, resolve });
        view.thinking.open = before.get(message)?.thinking.open ?? false;
        this.views.set(message, view);
      }
    }
    byId("welcome").hidden = messages.length > 0;
    this.list.replaceChildren(...Array.from(this.views.values(), (view) => view.element));
    this.update(running);
    this.scrollToEnd();
  }

  /** Tell the views whether the last message still grows. */
  update(running) {
    const atEnd = this.isAtEnd();
    const last = [...this.views.keys()].at(-1);
    for (const [message, view] of this.views) view.update(running && (message === last || message.role === "user"));
    if (atEnd) this.scrollToEnd();
  }

  /** Bring a growing message up to date before the next frame. Nothing happens if it is not shown. */
  grow(message) {
    if (!this.views.has(message)) return;
    if (this.growing.size === 0) requestAnimationFrame(() => this.flush());
    this.growing.add(message);
  }

  flush() {
    const atEnd = this.isAtEnd();
    for (const message of this.growing) this.views.get(message)?.update();
    this.growing.clear();
    if (atEnd) this.scrollToEnd();
    else this.showToEnd();
  }

  /** Say that something outside the conversation went wrong. */
  warn(text) {
    byId("warning").replaceChildren(text ? el("div", { class: "error", role: "alert" }, text) : "");
  }

  isAtEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END;
  }

  scrollToEnd() {
    this.log.scrollTop = this.log.scrollHeight;
    this.showToEnd();
  }

  showToEnd() {
    this.toEnd.hidden = this.isAtEnd();
  }
}
