// Elements made by code. Text becomes text nodes, never markup; nothing on this page parses HTML.

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  copy: "M9 9h10v11H9zM5 15V4h10",
  done: "M5 12.5l4.5 4.5L19 7.5",
  again: "M19 12a7 7 0 1 1-2.2-5.1M19 4v4h-4",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  remove: "M6 6l12 12M18 6L6 18",
  tool: "M14.5 6.5a4 4 0 0 0-5.4 4.9L4 16.5 7.5 20l5.1-5.1a4 4 0 0 0 4.9-5.4L15 12l-3-3z",
  fold: "M9 6l6 6-6 6",
};

/** An element. Functions in `properties` listen to the event named after "on", `true` is an empty attribute, and
 * null or false leave the attribute out. Children are nodes, text, or lists of those; null adds nothing. */
export function el(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** The same for SVG. */
export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

/** A small line drawing beside a label; screen readers skip it. */
export function icon(name) {
  const drawing = { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true", focusable: "false" };
  return svg("svg", drawing, svg("path", { d: ICONS[name] }));
}

/** The element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  // One by one: a call has room for some ten thousand arguments, an answer may have more nodes.
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) element.append(child);
  return element;
}
