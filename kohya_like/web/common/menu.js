// A button that opens a list of further ones, for what is needed rarely. A choice, Escape and a press elsewhere close it.

import { make } from "./page.js";

/**
 * @param {string} text what the button says
 * @param {...HTMLButtonElement} choices
 * @returns {HTMLDetailsElement}
 */
export function makeMenu(text, ...choices) {
  const summary = make("summary", { class: "kl-button", text });
  const menu = make("details", { class: "kl-menu" }, summary, make("div", { class: "kl-menu-list" }, ...choices));
  const isOutside = (node) => node instanceof Node && !menu.contains(node);
  // Before the choice is heard: a window that it opens leads back to where the focus is.
  menu.addEventListener("click", (event) => {
    if (!(event.target instanceof Element) || !event.target.closest("button")) return;
    menu.open = false;
    summary.focus();
  }, { capture: true });
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    summary.focus();
  });
  menu.addEventListener("focusout", (event) => {
    if (isOutside(event.relatedTarget)) menu.open = false;
  });
  document.addEventListener("pointerdown", (event) => {
    if (isOutside(event.target)) menu.open = false;
  });
  return menu;
}
