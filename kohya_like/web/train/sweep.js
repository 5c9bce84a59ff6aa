// Sweep: several values of some settings are tried, and the steps go to those that do best. Starts runs; their table is in the Runs tab.

import { makeSweep } from "../common/address.js";
import { t, translated } from "../common/language.js";
import { make, say } from "../common/page.js";
import { post } from "../common/studio.js";
import { triedWords } from "../common/words.js";
import { onChange, values } from "./settings.js";

const TYPING_SECONDS = 0.6;

const FIRST = "learning_rate";

// What stands behind the title, fetched when it is opened.
export function fill(body) {
  let axes = []; // settings that can be swept over: {name, label, now}
  let rows = []; // {choice, input, gone, root}
  let turn = 0;
  let timer = 0;
  const told = make("p", { class: "kl-note", role: "status" });
  const list = make("ul", { class: "kl-note kl-sweep-runs" });
  const wrong = make("div", { class: "kl-error", role: "alert", hidden: true });
  const table = make("div", { class: "kl-sweep" });
  const start = make("button", { type: "button", class: "kl-button kl-strong", text: t`Start sweep`, disabled: true, onclick: () => ask(true) });
  const more = make("button", { type: "button", class: "kl-button", text: t`Another setting`, onclick: () => add("").choice.focus() });

  const asked = () => Object.fromEntries(rows.filter(({ choice }) => choice.value).map(({ choice, input }) => [choice.value, input.value]));

  function add(name, text = "") {
    const choice = make("select", { onchange: () => change() });
    const input = make("input", { type: "text", autocomplete: "off", spellcheck: "false", oninput: () => change(TYPING_SECONDS) });
    const gone = make("button", { type: "button", class: "kl-quiet", text: t`Remove`, onclick: () => {
      rows = rows.filter((each) => each !== row);
      row.root.remove();
      number();
      change();
    } });
    const row = { choice, input, gone, root: make("div", { class: "kl-sweep-row" }, choice, input, gone) };
    rows.push(row);
    number();
    offer(row, name);
    input.value = text;
    table.append(row.root);
    return row;
  }

  // Names of the rows as they stand now.
  function number() {
    for (const [index, { choice, input, gone }] of rows.entries()) {
      choice.setAttribute("aria-label", t`Setting ${index + 1}`);
      input.setAttribute("aria-label", t`Values of setting ${index + 1}`);
      gone.setAttribute("aria-label", t`Remove setting ${index + 1}`);
    }
  }

  function offer({ choice, input }, name) {
    choice.replaceChildren(make("option", { value: "", text: t`choose a setting` }), ...axes.map((axis) => make("option", { value: axis.name, text: `${translated(axis.label)} (${axis.name})` })));
    choice.value = axes.some((axis) => axis.name === name) ? name : "";
    input.placeholder = choice.value === FIRST ? t`values, such as 1e-4 3e-4 1e-3` : t`values with spaces between them`;
  }

  function change(seconds = 0) {
    for (const row of rows) row.input.placeholder = row.choice.value === FIRST ? t`values, such as 1e-4 3e-4 1e-3` : t`values with spaces between them`;
    start.disabled = true;
    clearTimeout(timer);
    timer = setTimeout(() => ask(false), 1000 * seconds);
  }

  function show({ text = "", runs = [], problems = [] }) {
    say(told, translated(text));
    list.replaceChildren(...runs.map((run) => make("li", { text: triedWords(run) })));
    list.hidden = !runs.length;
    wrong.replaceChildren(...problems.map(({ message }) => make("p", { text: translated(message) })));
    wrong.hidden = !problems.length;
    start.disabled = !runs.length;
  }

  async function ask(starts) {
    const mine = ++turn;
    const given = asked();
    if (!Object.values(given).some((text) => text.trim())) {
      show({ text: t`Choose a setting, and give the values to try.` });
      return;
    }
    if (starts) {
      start.disabled = true;
      say(told, t`Looks at the images, and starts …`);
    }
    try {
      const answer = await post("/kl/sweeps/plan", { form: values(), axes: given, starts });
      if (mine !== turn) return;
      if (!answer.sweep) return show(answer);
      show({ text: t`${answer.sweep} has begun; the Runs tab shows how far it is.` });
      told.append(" ", make("a", { class: "kl-link", href: makeSweep(answer.sweep), text: t`Show it` }));
    } catch (error) {
      if (mine === turn) show({ problems: [{ message: t`The studio does not answer: ${error.message}` }] });
    }
  }

  async function learn() {
    try {
      axes = (await post("/kl/sweeps/axes", { form: values() })).axes;
    } catch (error) {
      say(told, t`The studio does not answer: ${error.message}`);
      return;
    }
    for (const row of rows) offer(row, row.choice.value);
    if (!rows.length) add(FIRST);
    change();
  }

  body.append(
    make("p", { class: "kl-note", text: t`Runs with each combination of these values, and one as in the form, train a part of the steps; the better third goes on, and with it the form's settings, unless they are clearly worse. What decides is the loss on held-out images. All together they take at most three times the steps of one run.` }),
    table, make("div", { class: "kl-row" }, more, start), told, list, wrong);
  let kind = values().run;
  onChange(() => {
    if (values().run !== kind) {
      kind = values().run;
      learn();
    } else change(TYPING_SECONDS);
  });
  learn();
}
