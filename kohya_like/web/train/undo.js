// Undo and redo of the form: what was typed, chosen, loaded or filled in, a kind of run and mode with its settings at a time.

import schema from "../schema.js";
import { t } from "../common/language.js";
import { make } from "../common/page.js";
import { History } from "./history.js";
import { current, onChange, values } from "./settings.js";

const PAUSE_SECONDS = 0.5; // what follows one another faster is one change

const isText = (node) => node.matches("textarea, [contenteditable=true], input:not([type=checkbox], [type=radio], [type=range], [type=button])");

// put(run, mode, values) fills the form. Two buttons, and the usual keys while no text is being written.
export function makeUndo(put) {
  const now = () => ({ ...values(), mode: current.mode.name });
  const history = new History(now());
  let timer = 0;
  const undo = make("button", { type: "button", class: "kl-quiet kl-undo", text: "↶", "aria-label": t`Undo`, title: t`Undo (Ctrl+Z)`, onclick: () => turn(history.back()) });
  const redo = make("button", { type: "button", class: "kl-quiet kl-undo", text: "↷", "aria-label": t`Redo`, title: t`Redo (Ctrl+Shift+Z)`, onclick: () => turn(history.forth()) });
  const show = () => {
    undo.disabled = history.past.length < 2;
    redo.disabled = !history.future.length;
  };
  const settle = () => {
    clearTimeout(timer);
    history.note(now());
    show();
  };

  function turn(to) {
    clearTimeout(timer);
    if (to) put(to.run, schema.modes.find((each) => each.name === to.mode), to.values);
    clearTimeout(timer);
    show();
  }

  onChange(() => {
    clearTimeout(timer);
    // Another kind of run is a change of its own, however fast the next one follows.
    if (history.past.at(-1).run !== current.run) settle();
    else timer = setTimeout(settle, 1000 * PAUSE_SECONDS);
  });
  document.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey || !["z", "y"].includes(event.key.toLowerCase())) return;
    const target = /** @type {Element} */ (event.target);
    if (!undo.offsetParent || isText(target) || target.closest("dialog")) return;
    event.preventDefault();
    settle();
    turn(event.key.toLowerCase() === "y" || event.shiftKey ? history.forth() : history.back());
  });
  show();
  return [undo, redo];
}
