// "Explain my settings": a sentence for each value of the form that differs from its default, with what it does and who chose it.

import schema from "../schema.js";
import { shownDefault } from "../common/field.js";
import { bracketed, ended, joined, phrased, t, translated } from "../common/language.js";
import { find, make, rich } from "../common/page.js";
import { plural } from "../common/words.js";
import { openDialog } from "../picking/dialog.js";
import { goTo } from "../train/form.js";
import { condition, current, drafts, fieldsOf, hindrance, isChanged } from "../train/settings.js";
import { reasons } from "./reasons.js";

const words = (text) => (typeof text === "boolean" ? (text ? t`on` : t`off`) : phrased(text.trim().split("\n")) || t`empty`);

function sentence(spec) {
  const now = words(drafts[current.run][spec.name]);
  const unit = spec.unit ? ` ${spec.unit}` : "";
  const usual = spec.required || spec.default === "" ? "" : t` instead of ${shownDefault(spec)}`;
  const chosen = reasons.get(spec.name);
  const why = chosen && words(chosen.value) === now ? bracketed(translated(chosen.why)) : "";
  const idle = hindrance(spec);
  return joined([ended(`${now}${unit}${usual}${why}`), idle && t`It has no effect until ${condition(idle)}.`]);
}

export function explain() {
  const changed = fieldsOf(current.run).filter(isChanged);
  const groups = [...new Set(changed.map((spec) => spec.group))];
  const close = make("button", { type: "button", class: "kl-button", text: t`Close`, "aria-label": t`Close the explanation`, onclick: () => dialog.close() });
  const item = (spec) => make("li", {}, make("button", { type: "button", class: "kl-link", text: spec.label, "aria-label": t`Go to ${spec.label}`, onclick: () => {
    // After the dialog has led back to what opened it.
    dialog.addEventListener("close", () => goTo(spec.name));
    dialog.close();
  } }), ` ${t`is ${sentence(spec)}`} `, make("span", { class: "kl-help" }, ...rich(spec.help)));
  const recipe = reasons.get("Recipe");
  const head = changed.length ? t`A run of ${schema.runs[current.run].label} in which ${plural(changed.length, "setting differs", "settings differ")} from the default.` : t`Everything is as it is by default for ${schema.runs[current.run].label}.`;
  const dialog = openDialog(t`Your settings`, make("p", { text: joined([head, recipe ? t`The guide began with the recipe "${translated(recipe.value)}": ${translated(recipe.why)}.` : ""]) }),
    make("div", { class: "kl-explained", tabindex: "0", role: "region", "aria-label": t`Settings that differ` }, ...groups.flatMap((title) => [make("h3", { text: translated(title) }), make("ul", {}, ...changed.filter((spec) => spec.group === title).map(item))])),
    make("div", { class: "kl-row" }, close));
  find(dialog, ".kl-explained").focus();
}
