// What gradio itself writes, the names of tabs and of the large buttons, in the reader's language.

import { language, t } from "./language.js";
import { find, findAll } from "./page.js";

const LABELS = {
  Train: t`Train`, Data: t`Data`, Runs: t`Runs`, Tools: t`Tools`, Generate: t`Generate`, Help: t`Help`,
  "Start training": t`Start training`, Stop: t`Stop`, "Print command": t`Print command`, "Check data set": t`Check data set`,
  "More tabs": t`More tabs`,
};

function put(root) {
  for (const button of findAll(root, "button")) {
    const named = LABELS[button.ariaLabel ?? ""];
    if (named && named !== button.ariaLabel) button.ariaLabel = named;
    for (const node of button.childNodes) {
      const own = node instanceof Text && LABELS[node.data.trim()];
      if (own && own !== node.data) node.data = own;
    }
  }
}

// A page has its tabs some time after it is loaded, and its buttons some time after the row that they stand in; tabs that have no room come
// and go with its width.
function begin() {
  const tabs = find(document, ".tab-wrapper");
  const buttons = find(document, ".kl-buttons");
  if (!tabs || !buttons) return false;
  for (const place of [buttons, tabs]) {
    put(place);
    new MutationObserver(() => put(place)).observe(place, { childList: true, subtree: true });
  }
  // Gradio measures again what has room.
  dispatchEvent(new Event("resize"));
  return true;
}

export function translateLabels() {
  if (language === "en" || begin()) return;
  const waiting = new MutationObserver(() => begin() && waiting.disconnect());
  waiting.observe(document.documentElement, { childList: true, subtree: true });
}
