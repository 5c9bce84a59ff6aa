// The top of the page: its name, the language and the theme.

import { translateLabels } from "./labels.js";
import { LANGUAGES, language, t } from "./language.js";
import { make } from "./page.js";
import { store, stored } from "./stored.js";
import { enter } from "./studio.js";

export function top({ root, props }) {
  const { token, title = "kohya_like", tag = t`the trainer you can trust` } = props.value || {};
  enter(token);
  translateLabels();
  if (Object.values(stored("kl.notices") || {}).some(Boolean)) import("../runs/notices.js").then(({ watch }) => watch());
  const dark = () => document.body.classList.contains("dark");
  const button = make("button", { type: "button", class: "kl-quiet kl-theme" });
  const show = () => (button.textContent = dark() ? t`Light` : t`Dark`);
  button.addEventListener("click", () => {
    document.body.classList.toggle("dark");
    store("kl.theme", dark() ? "dark" : "light");
    show();
  });
  const wanted = stored("kl.theme");
  if (wanted && !new URLSearchParams(location.search).has("__theme")) document.body.classList.toggle("dark", wanted === "dark");
  show();
  button.setAttribute("aria-label", t`Switch between the light and the dark theme`);
  root.append(make("header", { class: "kl-top" }, make("div", { class: "kl-brand" }, make("span", { class: "kl-mark", "aria-hidden": "true" }),
    make("h1", { text: title }), make("span", { class: "kl-tag", text: tag })), make("div", { class: "kl-top-end" }, palette(), Object.keys(LANGUAGES).length > 1 ? languages() : null, button)));
}

const goTo = async () => (await import("../palette/palette.js")).open();

// Everything on the page by its words, for those who know the key, and for those who see the button.
function palette() {
  document.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey || event.key.toLowerCase() !== "k") return;
    event.preventDefault();
    goTo();
  });
  return make("button", { type: "button", class: "kl-quiet", text: t`Go to`, "aria-keyshortcuts": "Control+K", title: t`Find a setting, a run, a tab or a button (Ctrl+K)`, onclick: goTo });
}

// What was typed stays: drafts are kept in the browser.
function languages() {
  const names = Object.entries(LANGUAGES).map(([value, text]) => make("option", { value, text, lang: value, selected: value === language }));
  return make("select", { class: "kl-language", "aria-label": t`Language`, onchange: (event) => {
    store("kl.language", event.target.value);
    location.reload();
  } }, ...names);
}
