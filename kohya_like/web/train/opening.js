// Settings that are opened, from a file or of a run, and fill the form. Until they are there the form takes nothing that they would
// overwrite. Talks with the route /kl/train/open of kohya_like/tabs/train.py.

import { show as showTab } from "../common/address.js";
import { findAll } from "../common/page.js";
import { post } from "../common/studio.js";
import { current } from "./settings.js";

let asked = {};
let turn = 0;
let say = (_note) => {};
let hear = (_answer) => {};

// What shows that something is awaited, and what came.
export function tellTo(note, answer) {
  say = note;
  hear = answer;
}

function wait(isBusy) {
  for (const part of findAll(document, ".kl-main, .kl-side > :not(#kl-answers)")) part.toggleAttribute("inert", isBusy);
}

/**
 * Fills the form; of several that are asked for at a time with the last.
 * @param {any} what {name, text} or {name, head, header} of a file, {where} it lies, {run} that has them, or {demo}; or a promise of it
 * @param {string} note what is said meanwhile
 * @returns {Promise<boolean>} whether the form has them
 */
export async function openSettings(what, note, more = {}) {
  const mine = ++turn;
  const focused = /** @type {HTMLElement} */ (document.activeElement);
  let answer;
  showTab("train");
  wait(true);
  say(note);
  try {
    // A file that describes data alone is for the run that is in the form.
    asked = { ...(await what), form: { run: current.run } };
    answer = await post("/kl/train/open", asked);
  } catch (error) {
    answer = { problems: [{ option: "", message: error.message }] };
  }
  if (mine !== turn) return false;
  wait(false);
  if (document.activeElement === document.body) focused.focus({ preventScroll: true });
  hear({ ...answer, ...more });
  return Boolean(answer.fill);
}

// The same file once more, as one of a program.
export const openAs = (program, note) => openSettings({ ...asked, program }, note);
