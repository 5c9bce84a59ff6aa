// What opens over the page: it keeps the focus, closes with Escape, and leads back to where it was opened.

import { bring, make } from "../common/page.js";

let opened = 0; // windows may stand over one another

/**
 * @param {string} title
 * @param {...(Node | null)} inside
 * @returns {HTMLDialogElement} shown already; it is gone once it is closed
 */
export function openDialog(title, ...inside) {
  const opener = document.activeElement;
  const heading = `kl-dialog-${++opened}`;
  const dialog = make("dialog", { class: "kl-part kl-dialog", "aria-labelledby": heading }, make("h2", { id: heading, text: title }), ...inside);
  // Files that are dropped here are for nobody else.
  dialog.addEventListener("dragover", (event) => {
    event.preventDefault();
    event.stopPropagation();
  });
  dialog.addEventListener("drop", (event) => {
    event.preventDefault();
    event.stopPropagation();
  });
  dialog.addEventListener("close", () => {
    dialog.remove();
    // The page may have been scrolled behind it.
    if (opener) bring(opener.closest(".kl-field") || opener);
  });
  document.querySelector(".gradio-container").append(dialog);
  dialog.showModal();
  return dialog;
}
