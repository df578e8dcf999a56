// Markdown within a block: code, emphasis, links, line breaks. Gives text nodes and elements.

import { el } from "./dom.js";

const MAX_DEPTH = 6; // of emphasis in emphasis
const MAX_LABEL = 500; // characters of a link's text
const MAX_ADDRESS = 2000;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;
const SAFE = ["http:", "https:", "mailto:"];

/** The nodes of a text. */
export function spans(text, depth = 0, linked = false) {
  if (depth > MAX_DEPTH) return [document.createTextNode(text)];
  const reader = new Reader(text, depth, linked);
  while (reader.at < text.length) reader.step();
  reader.flush();
  return reader.nodes;
}

/** The address, if a click on it is harmless: a web page or mail, never a script. Else null. */
export function safeAddress(address) {
  try {
    const url = new URL(address);
    return SAFE.includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

class Reader {
  constructor(text, depth, linked) {
    Object.assign(this, { text, depth, linked, at: 0, plain: "", nodes: [] });
    this.unclosed = new Set(); // markers that nothing closes from here on
  }

  step() {
    const { text, at } = this;
    switch (text[at]) {
      case "\\":
        if (PUNCTUATION.test(text[at + 1] ?? "")) return this.literal(2, text[at + 1]);
        return this.literal(1);
      case "\n":
        return this.node(el("br"), at + 1);
      case "`":
        return this.code();
      case "*":
      case "_":
      case "~":
        return this.emphasis();
      case "!":
        return text[at + 1] === "[" ? this.link(at + 1, "image: ") : this.literal(1);
      case "[":
        return this.link(at, "");
      case "h":
        return this.address();
      default:
        return this.literal(1);
    }
  }

  literal(length, shown = this.text.slice(this.at, this.at + length)) {
    this.plain += shown;
    this.at += length;
  }

  node(element, end) {
    this.flush();
    this.nodes.push(element);
    this.at = end;
  }

  flush() {
    if (this.plain) this.nodes.push(document.createTextNode(this.plain));
    this.plain = "";
  }

  runLength(at) {
    let end = at;
    while (this.text[end] === this.text[at]) end += 1;
    return end - at;
  }

  /** Where the code that opens at `at` ends, after its closing run of as many backticks; null if nothing closes it. */
  codeEnd(at) {
    const length = this.runLength(at);
    const mark = "`".repeat(length);
    if (this.unclosed.has(mark)) return null;
    for (let found = this.text.indexOf(mark, at + length); found >= 0; ) {
      const run = this.runLength(found);
      if (run === length) return found + length;
      found = this.text.indexOf(mark, found + run);
    }
    this.unclosed.add(mark);
    return null;
  }

  code() {
    const length = this.runLength(this.at);
    const end = this.codeEnd(this.at);
    if (end === null) return this.literal(length);
    let code = this.text.slice(this.at + length, end - length).replaceAll("\n", " ");
    if (/^ .*[^ ].* $/.test(code)) code = code.slice(1, -1);
    return this.node(el("code", {}, code), end);
  }

  emphasis() {
    const { text, at } = this;
    const width = this.runLength(at);
    const after = text[at + width] ?? " ";
    const inWord = text[at] === "_" && WORD.test(text[at - 1] ?? " ");
    if (width > 3 || (text[at] === "~" && width !== 2) || /\s/.test(after) || inWord) return this.literal(width);
    const end = this.emphasisEnd(at, width);
    if (end === null) return this.literal(width);
    const inner = spans(text.slice(at + width, end - width), this.depth + 1, this.linked);
    if (text[at] === "~") return this.node(el("del", {}, inner), end);
    if (width === 1) return this.node(el("em", {}, inner), end);
    const strong = el("strong", {}, inner);
    return this.node(width === 2 ? strong : el("em", {}, strong), end);
  }

  /** Where emphasis of this width ends, after its closing run; null if nothing closes it. Code hides markers. */
  emphasisEnd(start, width) {
    const { text } = this;
    const mark = text[start].repeat(width);
    if (this.unclosed.has(mark)) return null;
    for (let at = start + width; at < text.length; ) {
      if (text[at] === "\\") at += 2;
      else if (text[at] === "`") at = this.codeEnd(at) ?? at + this.runLength(at);
      else if (text[at] !== text[start]) at += 1;
      else {
        const run = this.runLength(at);
        const end = at + run;
        const fits = width === 1 ? run % 2 === 1 : run >= width;
        const leavesWord = text[start] !== "_" || !WORD.test(text[end] ?? " ");
        if (fits && leavesWord && !/\s/.test(text[at - 1])) return end;
        at = end;
      }
    }
    this.unclosed.add(mark);
    return null;
  }

  /** [text](address "title"). Pictures become links: the page loads nothing from elsewhere. */
  link(open, before) {
    const { text } = this;
    const close = this.linked ? null : this.labelEnd(open);
    if (close === null || text[close + 1] !== "(") return this.literal(1);
    const rest = text.slice(close + 2, close + 2 + MAX_ADDRESS);
    const found = /^\s*(?:<([^<>\n]*)>|([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/.exec(rest);
    const address = found && safeAddress(found[1] ?? found[2]);
    if (!address) return this.literal(1);
    const label = text.slice(open + 1, close);
    const shown = label ? spans(label, this.depth + 1, true) : [address];
    return this.node(anchor(address, before, shown), close + 2 + found[0].length);
  }

  labelEnd(open) {
    let depth = 0;
    for (let at = open; at < Math.min(open + MAX_LABEL, this.text.length); at += 1) {
      if (this.text[at] === "\\") at += 1;
      else if (this.text[at] === "[") depth += 1;
      else if (this.text[at] === "]") depth -= 1;
      if (depth === 0) return at;
    }
    return null;
  }

  /** A bare address; punctuation at its end belongs to the sentence. */
  address() {
    const { text, at } = this;
    if (this.linked || !/^https?:\/\/[^\s]/.test(text.slice(at, at + 9)) || WORD.test(text[at - 1] ?? " ")) return this.literal(1);
    let found = /^[^\s<>"`]+/.exec(text.slice(at, at + MAX_ADDRESS))[0];
    while (/[.,;:!?'*_~\]]$/.test(found) || (found.endsWith(")") && !found.includes("("))) found = found.slice(0, -1);
    const address = safeAddress(found);
    return address ? this.node(anchor(address, found), at + found.length) : this.literal(1);
  }
}

function anchor(address, ...children) {
  return el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}
