// The place of a sweep beside the form; what is in it is fetched when somebody opens it.

import { t } from "../common/language.js";
import { bring, make } from "../common/page.js";

export function sweep({ root }) {
  const body = make("div", { class: "kl-body" });
  const open = async (event) => {
    if (!event.target.open) return;
    if (!body.firstChild) (await import("./sweep.js")).fill(body);
    bring(body);
  };
  root.append(make("details", { class: "kl-card kl-section kl-sweeping", ontoggle: open },
    make("summary", {}, make("h2", { class: "kl-title", text: t`Sweep` }), make("span", { class: "kl-hint", text: t`several values of a setting` })), body));
}
