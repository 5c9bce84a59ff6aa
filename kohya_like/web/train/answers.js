// What the server answers: problems, the command, what was found in a data set.

import * as address from "../common/address.js";
import { t, translated } from "../common/language.js";
import { bring, copier, download, make, rich } from "../common/page.js";
import { store, stored } from "../common/stored.js";
import { plural } from "../common/words.js";
import { controls, fill, goTo, showMore, showProblem, views } from "./form.js";
import { showImport, showQuestion } from "./imports.js";
import { tellTo } from "./opening.js";
import { current, fieldsOf, onChange, problems, values } from "./settings.js";
import { foresee } from "./starting.js";

export function answers({ root, props, watch }) {
  const status = make("p", { class: "kl-answer", role: "status" });
  const wrong = make("section", { class: "kl-card kl-problems", hidden: true, tabindex: "-1", "aria-labelledby": "kl-problems" });
  const report = make("section", { class: "kl-card kl-report", hidden: true, "aria-label": t`Data set` });
  const output = make("section", { class: "kl-card kl-output", hidden: true, "aria-labelledby": "kl-command" });
  const imported = make("section", { class: "kl-card kl-import", hidden: true, tabindex: "-1", "aria-labelledby": "kl-imported" });
  const owner = make("section", { class: "kl-card kl-owner", hidden: true, tabindex: "-1", "aria-labelledby": "kl-owner" });
  root.append(status, wrong, owner, imported, report, output);

  // What is missing is told in the words of its help, which has names between backticks; values of other sentences keep theirs.
  const said = (option, message) => (message.startsWith(`${option} is missing: `) ? rich(translated(message)) : [document.createTextNode(translated(message))]);

  function listProblems(found) {
    wrong.replaceChildren();
    wrong.hidden = found.length === 0;
    problems.clear();
    const known = new Set(fieldsOf(current.run).map((spec) => spec.name));
    const items = found.map(({ option, message, run: about }) => {
      if (!known.has(option)) return make("li", {}, make("span", { text: translated(message) }));
      problems.set(option, [...(problems.get(option) || []), message]);
      const link = make("button", { type: "button", class: "kl-link", onclick: () => goTo(option) }, ...said(option, message));
      return make("li", {}, link, about ? make("div", { class: "kl-row" }, ...furtherActions(about)) : null);
    });
    showMore();
    for (const view of views.values()) {
      if (view.details && view.specs.some((spec) => problems.has(spec.name))) {
        view.build();
        view.details.open = true;
        if (view.specs.some((spec) => problems.has(spec.name) && controls.get(spec.name).root.closest(".kl-rest"))) view.unfold();
      }
      view.count();
    }
    for (const name of controls.keys()) showProblem(name);
    if (!found.length) return;
    wrong.append(make("h2", { id: "kl-problems", text: plural(found.length, "thing to put right", "things to put right") }), make("ul", {}, ...items));
    wrong.focus();
  }

  // What somebody may want whose settings a run has already.
  function furtherActions(name) {
    const again = () => {
      fill(current.run, { ...values().values, resume: "none" });
      document.getElementById("kl-start").click();
    };
    return [make("button", { type: "button", class: "kl-button", text: t`Open it`, onclick: () => address.open(name) }),
      make("button", { type: "button", class: "kl-button", text: t`Train again`, onclick: again })];
  }

  // A command, and what was found in a data set, are those of the settings they were made for.
  let printed = "";
  let looked = "";
  const stale = make("p", { class: "kl-note", role: "status" });
  const now = () => JSON.stringify(values());
  onChange(() => {
    stale.textContent = report.hidden || now() === looked ? "" : t`The form has changed since; check again.`;
    if (output.hidden || now() === printed) return;
    output.hidden = true;
    status.textContent = t`The settings have changed since the command was printed.`;
  });

  function answer(value) {
    status.textContent = translated(value.note || "");
    output.hidden = output.hidden || value.output === null;
    if (value.fill) fill(value.fill.run, value.fill.adds ? { ...values().values, ...value.fill.texts } : value.fill.texts);
    listProblems(value.problems || []);
    showQuestion(owner, value.ask);
    // The report is about what stands in the form; another file takes it away, and a start.
    if (value.fill || value.imported === null) showImport(imported, value.imported);
    if (value.output) showOutput(output, value.output);
    if (value.output) printed = now();
    if (value.output && value.download) download(value.output.name, new Blob([value.output.toml], { type: "text/plain" }));
    for (const file of value.save ?? []) download(file.name, new Blob([file.text], { type: "text/plain" }));
    if (value.report !== undefined) {
      showReport(report, value.report);
      report.append(stale);
      stale.textContent = "";
      looked = now();
    }
    if (value.seen) store("kl.seen", true);
    if (value.seen) document.querySelector(".kl-welcome")?.remove();
    // The answer may lie far from the button, and its tab come to the front with it. What is wrong, and an import, take the focus.
    const told = value.report ? report : value.output ? output : status;
    if (!value.problems?.length && !value.imported && !value.ask && !value.download && !value.save) setTimeout(() => bring(told));
    // Once its tab is there.
    const go = () => (root.offsetParent ? goTo(value.goTo) : requestAnimationFrame(go));
    if (value.goTo) setTimeout(go);
    foresee(0);
  }
  tellTo((note) => (status.textContent = note), answer);
  watch("value", () => props.value && answer(props.value));
}

// ---- the command

function showOutput(box, { commands, toml, about }) {
  const code = make("code", { text: commands.sh });
  const pick = (shell, label) => {
    const radio = make("input", { type: "radio", name: "kl-shell", id: `kl-shell-${shell}`, value: shell });
    radio.addEventListener("change", () => {
      code.textContent = commands[shell];
      store("kl.shell", shell);
    });
    const wanted = stored("kl.shell") || (/Win/.test(navigator.platform) ? "powershell" : "sh");
    if (wanted === shell) {
      radio.checked = true;
      code.textContent = commands[shell];
    }
    return make("label", { class: "kl-toggle" }, radio, make("span", { text: label }));
  };
  const block = (node, label) => make("pre", { tabindex: "0", role: "region", "aria-label": label }, node);
  const tomlCode = make("code", { text: toml });
  box.replaceChildren(
    make("div", { class: "kl-row kl-between" }, make("h2", { id: "kl-command", text: t`Command` }), copier(() => code.textContent, t`Copy the command`)),
    make("div", { class: "kl-row", role: "radiogroup", "aria-label": t`Shell` }, pick("sh", t`Linux, macOS`), pick("powershell", t`PowerShell`)),
    block(code, t`Command`), make("p", { class: "kl-note", text: translated(about) }),
    make("div", { class: "kl-row kl-between" }, make("h3", { text: t`Settings (TOML)` }), copier(() => toml, t`Copy the TOML`)), block(tomlCode, t`Settings as TOML`));
  box.hidden = false;
}

// A sample without a caption, or one of no style.
const nothing = (table) => (table.head.at(-1) === "Style" ? t`none` : t`(an empty text)`);

// report: {title, facts: [[name, value]], tables: [{title, head, rows}], notes: [text]}
function showReport(box, report) {
  box.hidden = !report;
  if (!report) return;
  const facts = make("dl", { class: "kl-factlist" }, ...(report.facts || []).flatMap(([name, value]) => [make("dt", { text: translated(name) }), make("dd", { text: translated(value) })]));
  const tables = (report.tables || []).flatMap((table) => [make("h3", { text: translated(table.title) }),
    make("div", { class: "kl-scroll", tabindex: "0", role: "region", "aria-label": translated(table.title) }, make("table", { class: "kl-table" },
      make("thead", {}, make("tr", {}, ...table.head.map((text) => make("th", { scope: "col", text: translated(text) })))),
      make("tbody", {}, ...table.rows.map((row) => make("tr", {}, ...row.map((text) => make("td", { text: text || nothing(table) })))))))]);
  box.replaceChildren(make("h2", { text: translated(report.title) }), facts, ...tables, ...(report.notes || []).map((text) => make("p", { class: "kl-note", text: translated(text) })));
}
