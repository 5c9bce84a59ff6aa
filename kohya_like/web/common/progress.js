// How far something is, as a bar that says it to a screen reader too.

import { t } from "./language.js";
import { make } from "./page.js";

export function makeBar(label = t`Progress`) {
  const inside = make("div");
  const root = make("div", { class: "kr-bar", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, inside);
  return {
    root,
    // fraction: from 0 to 1; null is not known, and the bar moves to and fro while something is under way.
    show(fraction, isRunning = true) {
      const isUnknown = fraction === null && isRunning;
      root.classList.toggle("kr-unknown", isUnknown);
      inside.style.width = isUnknown ? "" : `${(100 * (fraction || 0)).toFixed(2)}%`;
      if (isUnknown) root.removeAttribute("aria-valuenow");
      else root.setAttribute("aria-valuenow", String(Math.round(100 * (fraction || 0))));
    },
  };
}
