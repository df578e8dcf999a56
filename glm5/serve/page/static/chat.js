// The chat page, put together: which conversation is shown, which answers run, what keys and buttons do.

import { answer, emptyAnswer } from "./answer.js";
import { errorRecord, models, samplingDefaults } from "./api.js";
import { copyButton } from "./copy.js";
import { byId, el, icon } from "./dom.js";
import { Drawer } from "./drawer.js";
import { announce } from "./message.js";
import { Settings } from "./settings.js";
import { loadChats, newChat, removeChat, saveChat, titleOf } from "./store.js";
import { Transcript } from "./transcript.js";

const EXAMPLES = [
  "Explain sparse attention to someone who knows matrices.",
  "Write a Python function that checks whether brackets are balanced.",
  "How many days are there between 3 March and 17 June?",
  "Give me three names for a small model, with reasons.",
];
const prompt = byId("prompt");
const picker = byId("model");
const running = new Map(); // id of a conversation -> AbortController of its answer
let chats = loadChats();
let chat = newChat(chats[0]?.settings);
let cards = [];

const transcript = new Transcript({ edit, again, resolve });
const settings = new Settings({ changed: save, keyChanged: showModels });
const sidebar = new Drawer("sidebar", { open: true });
const panel = new Drawer("settings");

function show(next) {
  chat = next;
  settings.show(chat);
  if (cards.some((card) => card.id === chat.settings.model)) picker.value = chat.settings.model;
  transcript.warn("");
  refresh();
}

function refresh() {
  transcript.show(chat, running.has(chat.id));
  showList();
  showState();
}

function save() {
  if (chat.messages.length > 0) keep(chat);
}

function keep(which) {
  try {
    saveChat(which);
    transcript.warn("");
  } catch (error) {
    transcript.warn(error.message);
  }
}

// --- asking

function say(text) {
  chat.messages.push({ role: "user", content: text });
  ask();
}

function edit(position, text) {
  chat.messages.length = position;
  say(text);
}

function again() {
  chat.messages.pop();
  ask();
}

function resolve(texts) {
  const { calls } = chat.messages.at(-1);
  for (const [position, { id, name }] of calls.entries()) {
    chat.messages.push({ role: "tool", id, name, content: texts[position] });
  }
  ask();
}

/** Let the model go on with the conversation that is shown; it does so also while another one is. */
async function ask() {
  const mine = chat;
  const message = emptyAnswer(picker.value);
  const controller = new AbortController();
  mine.settings.model = picker.value;
  mine.messages.push(message);
  mine.updated = Date.now();
  running.set(mine.id, controller);
  if (!chats.includes(mine)) chats.unshift(mine);
  chats.sort((one, other) => other.updated - one.updated);
  keep(mine);
  refresh();
  // The button that asked may be gone; whoever went on by keyboard stays in the conversation.
  if (document.activeElement === document.body) byId("log").focus({ preventScroll: true });
  announce("The model is answering.");
  let told = 0;
  await answer(mine, message, controller.signal, () => {
    transcript.grow(message);
    if (mine === chat) told = announceParagraphs(message.content, told);
  });
  running.delete(mine.id);
  // A conversation that was deleted meanwhile stays deleted.
  if (chats.includes(mine)) keep(mine);
  showList();
  if (mine !== chat) return;
  const stopped = document.activeElement === byId("stop");
  transcript.update(false);
  showState();
  if (stopped) focusPrompt();
  announce(message.error ? "" : `${message.content.slice(told)} ${message.finish === "stopped" ? "Stopped." : "End of the answer."}`);
}

/** Screen readers get whole paragraphs; every token anew would drown them. */
function announceParagraphs(text, told) {
  const end = text.lastIndexOf("\n\n");
  if (end <= told) return told;
  announce(text.slice(told, end));
  return end;
}

function stop() {
  running.get(chat.id)?.abort();
}

// --- the box for messages

/** Not where that would bring up a keyboard on the screen. */
function focusPrompt() {
  if (matchMedia("(pointer: fine)").matches) prompt.focus();
}

function send() {
  const text = prompt.value.trim();
  if (!text || running.has(chat.id)) return;
  prompt.value = "";
  grow();
  say(text);
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  showState();
}

function showState() {
  const busy = running.has(chat.id);
  byId("send").hidden = busy;
  byId("send").disabled = prompt.value.trim() === "";
  byId("stop").hidden = !busy;
  const { prompt: before, tokens } = chat.messages.findLast((message) => message.figures?.tokens)?.figures ?? {};
  const most = cards.find((card) => card.id === picker.value)?.max_model_len;
  const used = before ? (before + tokens).toLocaleString("en") : "0";
  byId("context").textContent = most ? `${used} of ${most.toLocaleString("en")} tokens` : "";
}

// --- conversations

function showList() {
  const rows = chats.map((one) => {
    const title = titleOf(one);
    const current = one === chat ? "true" : null;
    const opener = el("button", { type: "button", class: "title", "aria-current": current, onclick: () => open(one) }, title);
    return el("li", { class: running.has(one.id) ? "running" : null }, opener, removeButton(one, title));
  });
  byId("chats").replaceChildren(...rows);
  document.title = chat.messages.length ? `${titleOf(chat)} · glm5` : "glm5";
}

function open(next) {
  show(next);
  if (sidebar.isOverlay) sidebar.set(false);
  focusPrompt();
}

/** The first press asks, the second deletes. */
function removeButton(which, title) {
  const label = `Delete the conversation: ${title}`;
  const button = el("button", { type: "button", class: "quiet remove", "aria-label": label, title: "Delete" }, icon("remove"));
  let asked = false;
  const reset = () => {
    asked = false;
    button.classList.remove("sure");
    button.replaceChildren(icon("remove"));
    button.setAttribute("aria-label", label);
  };
  button.addEventListener("blur", reset);
  button.addEventListener("click", () => {
    if (asked) return remove(which);
    asked = true;
    button.classList.add("sure");
    button.replaceChildren("Delete");
    button.setAttribute("aria-label", `Really delete: ${title}`);
    return undefined;
  });
  return button;
}

function remove(which) {
  running.get(which.id)?.abort();
  chats = chats.filter((one) => one !== which);
  removeChat(which);
  if (which === chat) show(chats[0] ?? newChat(which.settings));
  else showList();
  byId("new").focus();
}

// --- models

async function showModels() {
  const status = byId("status");
  try {
    cards = await models();
    picker.replaceChildren(...cards.map((card) => el("option", { value: card.id }, card.id)));
    picker.value = cards.some((card) => card.id === chat.settings.model) ? chat.settings.model : (cards[0]?.id ?? "");
    status.textContent = "";
    transcript.warn("");
    settings.showDefaults(await samplingDefaults());
  } catch (error) {
    const { title, message } = errorRecord(error);
    cards = [];
    picker.replaceChildren();
    status.textContent = "no models";
    transcript.warn(`${title}: ${message}`);
    if (error.status === 401 || error.status === 403) {
      panel.set(true);
      byId("set-key").focus();
    }
  }
  picker.disabled = cards.length === 0;
  showState();
}

// --- keys and buttons

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && prompt.value === "") {
    const button = document.querySelector(".edit");
    if (button) event.preventDefault();
    button?.click();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
byId("stop").addEventListener("click", stop);
byId("new").addEventListener("click", () => open(newChat(chat.settings)));
picker.addEventListener("change", () => {
  chat.settings.model = picker.value;
  save();
  showState();
});
// An answer that is still running is worth keeping when the tab goes.
addEventListener("pagehide", () => chats.filter((one) => running.has(one.id)).forEach(keep));
addEventListener("storage", () => {
  const stored = loadChats();
  const open = new Map(chats.filter((one) => one === chat || running.has(one.id)).map((one) => [one.id, one]));
  chats = stored.map((one) => open.get(one.id) ?? one);
  for (const one of open.values()) if (!chats.includes(one)) chats.push(one);
  showList();
});

byId("examples").append(
  ...EXAMPLES.map((text) => el("li", {}, el("button", { type: "button", onclick: () => running.has(chat.id) || say(text) }, text))),
);
const address = new URL("v1", document.baseURI).href;
byId("address").textContent = address;
byId("address").after(copyButton("Copy the address", () => address));
show(chat);
showModels();
focusPrompt();
