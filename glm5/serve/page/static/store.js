// Conversations in the browser's localStorage, one entry each, so that two tabs do not overwrite each other's.

const PREFIX = "glm5.chat.";

export const DEFAULTS = {
  model: "",
  system: "",
  thinking: true,
  effort: "",
  temperature: "",
  top_p: "",
  max_tokens: "",
  seed: "",
  tools: "",
};

/** A conversation without messages; it is stored once it has some. */
export function newChat(settings = DEFAULTS) {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, updated: Date.now(), messages: [], settings: { ...settings } };
}

/** Every stored conversation, the latest first. An entry that cannot be read is left alone. */
export function loadChats() {
  return names()
    .filter((name) => name.startsWith(PREFIX))
    .map((name) => read(localStorage.getItem(name)))
    .filter((chat) => chat !== null)
    .sort((one, other) => other.updated - one.updated);
}

/** Store a conversation. Throws an error that says what to do when the browser refuses. */
export function saveChat(chat) {
  try {
    localStorage.setItem(PREFIX + chat.id, JSON.stringify(chat));
  } catch (error) {
    throw new Error(`This conversation is not saved (${error.name}): delete older ones to make room.`);
  }
}

export function removeChat(chat) {
  localStorage.removeItem(PREFIX + chat.id);
}

/** What a list calls the conversation: the start of its first message. */
export function titleOf(chat) {
  const first = chat.messages.find((message) => message.role === "user");
  return first ? first.content.trim().replace(/\s+/g, " ").slice(0, 60) : "New chat";
}

function names() {
  return Array.from({ length: localStorage.length }, (_, position) => localStorage.key(position));
}

function read(text) {
  try {
    const chat = JSON.parse(text);
    return Array.isArray(chat?.messages) ? { ...chat, settings: { ...DEFAULTS, ...chat.settings } } : null;
  } catch {
    return null;
  }
}
