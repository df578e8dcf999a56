// Text to the clipboard.

import { el, icon } from "./dom.js";

/** A button that copies what `text()` gives, and says so. */
export function copyButton(label, text) {
  const button = el("button", { type: "button", class: "quiet", "aria-label": label, title: label }, icon("copy"));
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    button.replaceChildren(icon(copied ? "done" : "remove"));
    button.setAttribute("aria-label", copied ? "Copied" : "The browser does not allow copying");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}

async function copy(text) {
  // Browsers give this only to pages from https or this machine; a server in the local network is neither.
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return false;
    }
  }
  const field = el("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  const focused = document.activeElement;
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return copied;
}
