// Ctrl+K: finds a setting, a run, a tab or a button by its words, and goes there. Fetched when it is first opened.

import { open as openRun, show as showTab } from "../common/address.js";
import { t } from "../common/language.js";
import { findAll, make } from "../common/page.js";
import { ask } from "../common/studio.js";
import { openDialog } from "../picking/dialog.js";
import { nameOf, stateWords } from "../runs/run.js";
import { goTo } from "../train/form.js";
import { current, fieldsOf } from "../train/settings.js";
import { found } from "./finding.js";

let isOpen = false;

const wordsOf = (node) => (node.getAttribute("aria-label") || node.textContent || "").replace(/\s+/g, " ").trim();
// What a menu holds is as near as its button.
const isSeen = (node) => (node.closest(".kl-menu") || node).offsetParent !== null && !node.disabled;

// What the page offers as it is now. Buttons are those in sight, so that none does what nobody has seen.
function offered() {
  const tabs = findAll(document, '[role="tab"]').filter(isSeen);
  const buttons = findAll(document, ".gradio-container button:not([role=tab]), .gradio-container a.kr-button").filter((node) => isSeen(node) && !node.closest("dialog"));
  const actions = new Map(buttons.map((node) => [wordsOf(node), node]));
  // Gradio draws the tabs a second time, out of sight; and where this leads one is already.
  for (const words of ["", t`Go to`, ...tabs.map(wordsOf)]) actions.delete(words);
  const settings = tabs.length ? fieldsOf(current.run) : [];
  return [
    ...tabs.map((node) => ({ words: wordsOf(node), kind: t`tab`, go: () => node.click() })),
    ...[...actions].map(([words, node]) => ({ words, kind: t`button`, go: () => {
      node.focus();
      node.click();
    } })),
    ...settings.map((spec) => ({ words: spec.label, also: `${spec.name} ${spec.help}`, kind: spec.name, go: () => {
      showTab("train");
      goTo(spec.name);
    } })),
  ];
}

async function runs() {
  try {
    return (await ask("/kl/runs")).runs.map((run) => ({
      words: nameOf(run), also: `${run.name} ${run.tags.join(" ")} ${stateWords(run.state)}`, kind: t`run, ${stateWords(run.state).toLowerCase()}`, go: () => openRun(run.name),
    }));
  } catch (error) {
    console.info("The palette lists no runs:", error.message);
    return [];
  }
}

export async function open() {
  if (isOpen) return;
  isOpen = true;
  let entries = offered();
  let shown = [];
  let at = 0;
  const input = make("input", { type: "text", role: "combobox", "aria-expanded": "true", "aria-controls": "kl-palette", "aria-autocomplete": "list",
    "aria-label": t`Find a setting, a run, a tab or a button`, placeholder: t`A setting, a run, a tab, a button …`, autocomplete: "off", spellcheck: "false" });
  const list = make("ul", { id: "kl-palette", class: "kl-pick-list", role: "listbox", "aria-label": t`Found` });
  const none = make("p", { class: "kl-note", role: "status" });
  const dialog = openDialog(t`Go to`, input, list, none);
  dialog.addEventListener("close", () => (isOpen = false));

  function choose(entry) {
    dialog.close();
    // The window leads back to where it was opened first.
    setTimeout(() => entry.go());
  }

  function mark(place) {
    at = Math.max(0, Math.min(place, shown.length - 1));
    [...list.children].forEach((node, index) => node.setAttribute("aria-selected", String(index === at)));
    const node = list.children[at];
    if (node) {
      input.setAttribute("aria-activedescendant", node.id);
      node.scrollIntoView({ block: "nearest" });
    } else input.removeAttribute("aria-activedescendant");
  }

  function draw() {
    shown = found(entries, input.value);
    list.replaceChildren(...shown.map((entry, index) => make("li", { id: `kl-palette-${index}`, role: "option", onclick: () => choose(entry) },
      make("span", { text: entry.words }), make("span", { class: "kl-facts", text: entry.kind }))));
    none.textContent = shown.length ? "" : t`Nothing has these words.`;
    mark(0);
  }

  input.addEventListener("input", draw);
  dialog.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8 }[event.key];
    if (step) {
      event.preventDefault();
      mark(at + step);
    } else if (event.key === "Enter" && shown[at]) {
      event.preventDefault();
      choose(shown[at]);
    }
  });
  draw();
  input.focus();
  const more = await runs();
  if (!isOpen) return;
  entries = [...entries, ...more];
  draw();
}
