// Markdown to elements: what models write, a subset of CommonMark with tables. Markup in the text stays text.
//
// Text is cut into blocks by lines, blocks into spans by characters. Both look ahead a bounded distance or remember
// what they did not find, so the time grows in proportion to the text whatever it is made of.

import { copyButton } from "./copy.js";
import { el } from "./dom.js";
import { spans } from "./spans.js";

const MAX_DEPTH = 12; // of lists and quotes in each other; deeper ones are shown as text
const MARKER = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const shown = new WeakMap(); // parent element -> blocks that it holds

/** Make `parent` show the text. Blocks that have not changed since the last call keep their elements, so a growing text
 * costs its last block. */
export function render(parent, text) {
  const before = shown.get(parent) ?? [];
  const blocks = cut(text.split("\n"));
  let same = 0;
  while (same < before.length && same < blocks.length && before[same].source === blocks[same].source) same += 1;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  for (const block of blocks.slice(same)) parent.append(block.build());
  shown.set(parent, blocks);
}

/** The blocks of some lines: `source`, and `build` that makes the element. */
function cut(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const [next, build] = blockAt(lines, at, depth);
    blocks.push({ source: lines.slice(at, next).join("\n"), build });
    at = next;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  if (fenceOf(line)) return fenced(lines, at);
  if (headingLevel(line)) return heading(lines, at);
  if (isRule(line)) return [at + 1, () => el("hr")];
  if (depth < MAX_DEPTH && isQuote(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && MARKER.test(line)) return list(lines, at, depth);
  if (isTable(lines, at)) return table(lines, at);
  return paragraph(lines, at, depth);
}

function startsBlock(lines, at, depth) {
  const line = lines[at];
  const nested = depth < MAX_DEPTH && (isQuote(line) || MARKER.test(line));
  return nested || fenceOf(line) !== null || headingLevel(line) > 0 || isRule(line) || isTable(lines, at);
}

function paragraph(lines, at, depth) {
  let next = at + 1;
  while (next < lines.length && lines[next].trim() !== "" && !startsBlock(lines, next, depth)) next += 1;
  return [next, () => el("p", {}, spans(lines.slice(at, next).map((line) => line.trim()).join("\n")))];
}

function headingLevel(line) {
  const found = /^ {0,3}(#{1,6})(?: |$)/.exec(line);
  return found ? found[1].length : 0;
}

function heading(lines, at) {
  const level = headingLevel(lines[at]);
  const text = lines[at].trim().slice(level).trim();
  // The page has h1 and h2 of its own.
  return [at + 1, () => el(`h${Math.min(level + 2, 6)}`, { class: `level-${level}` }, spans(text))];
}

function isRule(line) {
  const marks = line.replaceAll(" ", "");
  return marks.length >= 3 && "-*_".includes(marks[0]) && marks === marks[0].repeat(marks.length);
}

function fenceOf(line) {
  const found = FENCE.exec(line);
  return found && !(found[1][0] === "`" && found[2].includes("`")) ? found : null;
}

function fenced(lines, at) {
  const [, fence, info] = fenceOf(lines[at]);
  const indent = lines[at].indexOf(fence[0]);
  let next = at + 1;
  const ends = (line) => line.trim().length >= fence.length && line.trim() === fence[0].repeat(line.trim().length);
  while (next < lines.length && !ends(lines[next])) next += 1;
  // A fence that is not closed is one that is still being written.
  const code = lines.slice(at + 1, next).map((line) => line.slice(Math.min(indent, indentOf(line)))).join("\n");
  return [Math.min(next + 1, lines.length), () => codeBlock(code, info.trim().split(/\s/)[0])];
}

/** Code with its language and a button that copies it. */
export function codeBlock(code, language) {
  const bar = el("div", { class: "code-bar" }, el("span", {}, language || "text"), copyButton("Copy code", () => code));
  const text = el("pre", { tabindex: "0", role: "region", "aria-label": `Code, ${language || "text"}` }, el("code", {}, code));
  return el("div", { class: "code" }, bar, text);
}

function isQuote(line) {
  return /^ {0,3}>/.test(line);
}

function quote(lines, at, depth) {
  let next = at;
  while (next < lines.length && isQuote(lines[next])) next += 1;
  const inner = lines.slice(at, next).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return [next, () => el("blockquote", {}, cut(inner, depth + 1).map((block) => block.build()))];
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function markerOf(line) {
  const found = MARKER.exec(line);
  if (!found) return null;
  const ordered = found[2].length > 1;
  return { indent: found[1].length, width: found[0].length, kind: found[2].at(-1), ordered, number: parseInt(found[2], 10) };
}

function list(lines, at, depth) {
  const first = markerOf(lines[at]);
  const items = [];
  let next = at;
  let loose = false;
  for (;;) {
    const marker = next < lines.length && !isRule(lines[next]) ? markerOf(lines[next]) : null;
    if (marker === null || marker.kind !== first.kind || marker.indent < first.indent) break;
    const [end, inner] = itemLines(lines, next, marker, depth);
    items.push(inner);
    next = end;
    while (next < lines.length && lines[next].trim() === "") next += 1;
    const follows = next < lines.length && markerOf(lines[next])?.kind === first.kind;
    loose ||= follows && next > end;
    if (!follows) next = end;
  }
  const build = () => {
    const rows = items.map((inner) => el("li", {}, itemNodes(inner, depth)));
    const start = first.ordered && first.number !== 1 ? String(first.number) : null;
    return el(first.ordered ? "ol" : "ul", { start, class: loose ? "loose" : null }, rows);
  };
  return [next, build];
}

/** The lines of one item without its indent. Two columns more than the marker's are enough to belong to it: models
 * indent less than the standard asks. */
function itemLines(lines, at, marker, depth) {
  const inner = [lines[at].slice(marker.width)];
  let next = at + 1;
  while (next < lines.length) {
    let filled = next;
    while (filled < lines.length && lines[filled].trim() === "") filled += 1;
    if (filled === lines.length) break;
    const indent = indentOf(lines[filled]);
    if (indent >= marker.indent + 2) {
      for (; next < filled; next += 1) inner.push("");
      inner.push(lines[next].slice(Math.min(indent, marker.width)));
    } else if (filled > next || startsBlock(lines, next, depth)) {
      break;
    } else {
      inner.push(lines[next].trimStart());
    }
    next += 1;
  }
  return [next, inner];
}

/** A lone paragraph in an item stands without its element. */
function itemNodes(inner, depth) {
  const nodes = cut(inner, depth + 1).map((block) => block.build());
  return nodes[0]?.tagName === "P" ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes;
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !/^[\s|:-]+$/.test(lines[at + 1])) return false;
  const rules = cells(lines[at + 1]);
  return rules.every((cell) => /^:?-+:?$/.test(cell)) && rules.length === cells(lines[at]).length;
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, at) {
  const aligned = cells(lines[at + 1]).map((rule) => (rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : null));
  let next = at + 2;
  while (next < lines.length && lines[next].includes("|")) next += 1;
  const row = (line, tag) => {
    const found = cells(line);
    return el("tr", {}, aligned.map((side, column) => el(tag, { class: side }, spans(found[column] ?? ""))));
  };
  const build = () => {
    const head = el("thead", {}, row(lines[at], "th"));
    const body = el("tbody", {}, lines.slice(at + 2, next).map((line) => row(line, "td")));
    return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", {}, head, body));
  };
  return [next, build];
}
