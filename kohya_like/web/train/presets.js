// Where a form begins: model family and training mode, presets, the first visit.

import schema from "../schema.js";
import { makeChoice, shownText } from "../common/field.js";
import { joined, listed, t, translated } from "../common/language.js";
import { make, say } from "../common/page.js";
import { store, stored } from "../common/stored.js";
import { ask } from "../common/studio.js";
import { addImages, choose, fill } from "./form.js";
import { openSettings } from "./opening.js";
import { current, drafts, familyOf, hasDraft, keyOf, onChange } from "./settings.js";

const FEW = 3; // families that a sentence names

export function kinds({ root }) {
  const family = () => familyOf(current.run);
  const families = makeChoice(t`Model family`, "kl-family", Object.entries(schema.families), (name) => choose(name, current.mode.name));
  const modes = makeChoice(t`What is trained`, "kl-mode", schema.modes.map(({ name, label }) => [name, label]), (name) => choose(family(), name));
  const about = make("p", { class: "kl-note", id: "kl-mode-about", role: "status" });
  const having = (each) => Object.entries(schema.families).filter(([name]) => schema.runs[keyOf(name, each)]).map(([, label]) => label);
  const show = () => {
    families.radios.get(family()).checked = true;
    modes.radios.get(current.mode.name).checked = true;
    const absent = schema.modes.filter((each) => !schema.runs[keyOf(family(), each)]);
    for (const each of schema.modes) modes.radios.get(each.name).disabled = absent.includes(each);
    // Where it is for nearly all, a list of families says nothing.
    const common = absent.filter((each) => having(each).length > FEW).map(({ label }) => label);
    const words = [current.mode.about, ...absent.filter(({ label }) => !common.includes(label)).map((each) => t`${each.label} is for ${listed(having(each))}.`)];
    if (common.length) words.push(t`Not for ${schema.families[family()]}: ${listed(common)}.`);
    say(about, joined(words));
  };
  onChange(show);
  root.append(make("div", { class: "kl-kinds" }, families.root, modes.root), about);
  show();
}

// Four questions that fill the form. done() is called once it is filled.
const guideButton = (look = "", done = () => {}) => make("button", { type: "button", class: `kl-button ${look}`, text: t`Guide me`, onclick: async () => (await import("../guide/guide.js")).guide(done) });

// ---- presets: choose, see what would change, use; keep one's own

export function presets({ root, props, trigger, watch }) {
  const picker = make("select", { id: "kl-preset" });
  const view = make("div", { class: "kl-preset", "aria-live": "polite" });
  const name = make("input", { type: "text", id: "kl-preset-name", placeholder: t`Name of your preset`, "aria-label": t`Name of your preset`, autocomplete: "off" });
  const keep = () => trigger("keep_preset", { name: name.value });
  const form = make("div", { class: "kl-row" }, name, make("button", { type: "button", class: "kl-button", text: t`Save my settings`, onclick: keep }));
  const own = make("details", { class: "kl-own" }, make("summary", { text: t`Save these settings as a preset` }), form);
  // Seen with the keyboard only: past all the settings.
  const start = () => document.getElementById("kl-start").focus();
  const skip = make("button", { type: "button", class: "kl-button kl-skip", text: t`Skip to Start training`, onclick: start });
  name.addEventListener("keydown", (event) => event.key === "Enter" && keep());
  picker.addEventListener("change", () => (picker.value ? trigger("choose_preset", { name: picker.value, run: current.run }) : view.replaceChildren()));
  const asking = make("div", { class: "kl-row" }, guideButton(), make("button", { type: "button", class: "kl-button", text: t`Explain my settings`, onclick: async () => (await import("../guide/explain.js")).explain() }));
  root.append(asking, make("div", { class: "kl-pick" }, make("label", { for: "kl-preset", text: t`Preset` }), picker), view, own, skip);

  function list() {
    const chosen = picker.value;
    const offered = ((props.value || {}).presets || []).filter((preset) => preset.run === current.run);
    const group = (label, items) => (items.length ? [make("optgroup", { label }, ...items.map((item) => make("option", { value: item.name, text: translated(item.title) })))] : []);
    picker.replaceChildren(make("option", { value: "", text: t`Choose a starting point …` }),
      ...group(t`Built in`, offered.filter((item) => !item.own)), ...group(t`Yours`, offered.filter((item) => item.own)));
    picker.value = offered.some((item) => item.name === chosen) ? chosen : "";
  }

  function show() {
    const value = props.value || {};
    list();
    // The list alone, which may come after somebody has chosen: that stays.
    if (!value.message && !value.chosen) return;
    view.replaceChildren();
    if (value.message) view.append(make("p", { class: "kl-note", text: translated(value.message) }));
    const chosen = value.chosen;
    if (!chosen) return;
    picker.value = chosen.name;
    view.append(make("p", { class: "kl-note", text: translated(chosen.about) }));
    const use = () => {
      // As they are by now: somebody may have written more since the preset was chosen.
      fill(chosen.run, { ...chosen.texts, ...Object.fromEntries(chosen.keeps.map((name) => [name, drafts[chosen.run][name]])) });
      picker.value = "";
      view.replaceChildren(make("p", { class: "kl-note", text: t`The form now has the settings of ${translated(chosen.title)}. Your folders, prompts and names stayed where the preset does not set them.` }));
      picker.focus();
    };
    const drop = () => {
      picker.value = "";
      view.replaceChildren();
      picker.focus();
    };
    const rows = chosen.changes.map((change) => make("tr", {}, make("th", { scope: "row", text: translated(change.label) }),
      make("td", { text: shownText(change.before) }), make("td", { text: shownText(change.after) })));
    if (rows.length) {
      view.append(make("div", { class: "kl-scroll", tabindex: "0", role: "region", "aria-label": t`What the preset changes` },
        make("table", { class: "kl-table" }, make("thead", {}, make("tr", {}, make("th", { scope: "col", text: t`Setting` }),
          make("th", { scope: "col", text: t`Now` }), make("th", { scope: "col", text: t`With the preset` }))), make("tbody", {}, ...rows))));
    } else {
      view.append(make("p", { class: "kl-note", text: t`The form has these settings already.` }));
    }
    view.append(make("div", { class: "kl-row" },
      make("button", { type: "button", class: "kl-button kl-strong", text: t`Use this preset`, onclick: use }),
      make("button", { type: "button", class: "kl-quiet", text: t`Not now`, onclick: drop })));
  }
  watch("value", show);
  let drawnFor = current.run;
  onChange(() => {
    // What was said about a preset is about another kind of run.
    if (current.run !== drawnFor) view.replaceChildren();
    drawnFor = current.run;
    list();
  });
  show();
}

// ---- first visit

export function welcome({ root }) {
  if (hasDraft() || stored("kl.seen") !== null) return;
  const card = make("section", { class: "kl-card kl-welcome", "aria-labelledby": "kl-welcome" });
  const close = () => {
    store("kl.seen", true);
    card.remove();
  };
  const demo = async () => {
    close();
    if (await openSettings({ demo: true }, t`Opening the settings of the demo …`)) document.getElementById("kl-start").click();
  };
  card.append(make("h2", { id: "kl-welcome", text: t`New here?` }),
    make("p", { text: t`Guide me asks four questions about your own images and fills in the form. The demo teaches a tiny built-in model a shape it has never seen, a star: no download, no GPU, a few minutes on any computer, and every step that a real run has.` }),
    make("div", { class: "kl-row" },
      guideButton("kl-strong", close),
      make("button", { type: "button", class: "kl-button", text: t`Train the demo`, onclick: demo }),
      make("button", { type: "button", class: "kl-quiet", text: t`I have my own images`, onclick: () => {
        close();
        addImages();
      } })));
  // Who has a new browser is not new where somebody has trained already.
  ask("/kl/runs").then(({ runs }) => runs.length, () => 0).then((there) => { if (!there && stored("kl.seen") === null) root.append(card); });
}
