// The Tools tab: a form for each tool, the run of a tool with its progress and its report, and what was run before. Talks with the routes
// of kohya_like/tools.py; asks nothing while the tab cannot be seen.

import { show as bringTab } from "../common/address.js";
import { Console } from "../common/console.js";
import { blame, makeBrowse, makeChoice, makeField } from "../common/field.js";
import { joined, phrased, t, translated } from "../common/language.js";
import { make } from "../common/page.js";
import { makeBar } from "../common/progress.js";
import { store, stored } from "../common/stored.js";
import { ask, post, repeat } from "../common/studio.js";
import { figure, grouped, moment } from "../common/words.js";

const DRAFT = "kl.tools";
const MAX_ROWS = 100;
const WORDS = { running: t`Running`, finished: t`Finished`, failed: t`Failed`, cancelled: t`Cancelled`, died: t`Died` };

// Brings the tab to the front, fills the form of a tool and starts it: one click from a finished file to its check. The tab may not have
// been drawn yet.
let asked = null;
let attend = () => {};
export function openTool(name, texts) {
  asked = { name, texts };
  bringTab("tools");
  attend();
}

// ---- a report: whatever JSON a tool writes, as facts, tables and lists

const words = (name) => name.replace(/_/g, " ").replace(/^./, (letter) => letter.toUpperCase());
const isTable = (value) => Array.isArray(value) && value.length > 0 && value.every((item) => item && typeof item === "object" && !Array.isArray(item));
const isFact = (value) => value === null || typeof value !== "object" || (Array.isArray(value) && value.length === 0);

function said(value) {
  if (value === null || (Array.isArray(value) && !value.length)) return t`none`;
  if (typeof value === "boolean") return value ? t`yes` : t`no`;
  if (typeof value === "number") return Number.isInteger(value) ? grouped(value) : figure(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function table(name, rows) {
  const columns = [...new Set(rows.slice(0, MAX_ROWS).flatMap(Object.keys))];
  const head = make("thead", {}, make("tr", {}, ...columns.map((column) => make("th", { scope: "col", text: words(column) }))));
  const body = make("tbody", {}, ...rows.slice(0, MAX_ROWS).map((row) => make("tr", {}, ...columns.map((column) => make("td", { text: column in row ? said(row[column]) : "" })))));
  return make("div", { class: "kl-scroll", tabindex: "0", role: "region", "aria-label": name }, make("table", { class: "kl-table" }, head, body));
}

// A tool's own sentences come first; its figures are there to open. Lines of a table, which are indented, keep their columns.
function drawAnswer(report) {
  const { lines, ...figures } = report && typeof report === "object" ? report : {};
  if (!Array.isArray(lines)) return drawReport(report);
  return [make("pre", { class: "kl-tool-lines", tabindex: "0", role: "region", "aria-label": t`Report` }, ...lines.map((line) => make("span", { class: /^\s/.test(line) ? null : "kl-prose", text: `${translated(line)}\n` }))),
    make("details", { class: "kl-part-of" }, make("summary", {}, make("h3", { text: t`All figures` })), ...drawReport(figures))];
}

function drawReport(report, name = words) {
  if (Array.isArray(report)) return [make("ul", { class: "kl-plain" }, ...report.slice(0, MAX_ROWS).map((item) => make("li", { text: said(item) })))];
  if (isFact(report)) return [make("p", { text: said(report) })];
  const entries = Object.entries(report);
  const facts = entries.filter(([, value]) => isFact(value));
  /** @type {HTMLElement[]} */
  const nodes = facts.length ? [make("dl", { class: "kl-factlist" }, ...facts.flatMap(([key, value]) => [make("dt", { text: name(key) }), make("dd", { text: said(value) })]))] : [];
  for (const [key, value] of entries.filter(([, each]) => !isFact(each))) {
    const count = Array.isArray(value) ? value.length : Object.keys(value).length;
    const more = count > MAX_ROWS && Array.isArray(value) ? make("p", { class: "kl-note", text: t`${count - MAX_ROWS} more stand in the report's file.` }) : null;
    const inside = make("details", { class: "kl-part-of", open: count <= 12 }, make("summary", {}, make("h3", { text: name(key) }), make("span", { class: "kl-facts", text: String(count) })),
      // Below the top the names are data, such as layers.
      ...(isTable(value) ? [table(name(key), value)] : drawReport(value, String)));
    if (more) inside.append(more);
    nodes.push(inside);
  }
  return nodes;
}

// ---- the tab

export function tools({ root }) {
  const drafts = stored(DRAFT) || {};
  const fields = new Map(); // option -> {read, set, wrong}
  let known = null; // what the studio says: tools, folder, files, runs
  let chosen = drafts.tool || "verify_lora";
  let run = ""; // the start that is shown
  let offset = -1;
  let state = "";
  let isBusy = false;

  const pick = make("div");
  let radios = new Map();
  const about = make("p", { class: "kl-note" });
  const wrong = make("div", { class: "kl-error", role: "alert", hidden: true });
  const form = make("div");
  const go = make("button", { type: "button", class: "kl-button kl-strong", id: "kl-tool-run", onclick: () => start() });
  const secret = make("input", { type: "password", id: "kl-tool-secret", autocomplete: "off", spellcheck: "false", placeholder: t`none` });
  const secretLabel = make("label", { for: secret.id });
  const secretField = make("div", { class: "kl-field", hidden: true }, make("div", { class: "kl-head" }, secretLabel), make("div", { class: "kl-control" }, secret),
    make("p", { class: "kl-help", text: t`Given to the process and kept in no file and no log. Without one, that of the studio's own environment is taken.` }));
  const files = make("datalist", { id: "kl-tool-files" });
  const status = make("p", { class: "kl-note", role: "status" });
  const view = resultView();
  const before = make("section", { class: "kl-card", "aria-labelledby": "kl-tool-before", hidden: true });
  root.append(make("div", { class: "kl-tool-columns" },
    make("section", { class: "kl-card kl-tool-form", "aria-label": t`Tool` }, pick, about, form, secretField, wrong, make("div", { class: "kl-row" }, go), status, files),
    make("div", { class: "kl-tool-side" }, view.root, before)));

  const poll = repeat(root, async () => {
    try {
      if (!known) await learn();
      if (!run || (state && state !== "running")) return 5;
      await follow();
      return state === "running" ? 0.7 : 0.1;
    } catch (error) {
      status.textContent = error.message;
      return 3;
    }
  });

  async function learn() {
    known = await ask("/kl/tools");
    for (const tool of known.tools) tool.label = translated(tool.label);
    const tools = known.tools.map(({ name, label }) => [name, label]);
    const row = makeChoice(t`Tool`, "kl-tool", tools, choose);
    pick.replaceChildren(row.root);
    radios = row.radios;
    if (!known.tools.some((tool) => tool.name === chosen)) chosen = known.tools[0].name;
    const going = known.runs.find((each) => each.state === "running");
    if (going) show(going.name);
    choose(chosen);
    list();
  }

  function list() {
    files.replaceChildren(...known.files.map((path) => make("option", { value: path })));
    const rows = known.runs.filter((each) => each.name !== run);
    before.hidden = rows.length === 0;
    const labels = Object.fromEntries(known.tools.map(({ name, label }) => [name, label]));
    before.replaceChildren(make("h2", { id: "kl-tool-before", text: t`Done before` }), make("ul", { class: "kl-plain" }, ...rows.map((each) => make("li", {},
      make("button", { type: "button", class: "kl-link", text: phrased([labels[each.tool], moment(1000 * each.started)]), onclick: () => { show(each.name); poll(); } }),
      make("span", { class: "kl-facts", text: ` ${WORDS[each.state].toLowerCase()}` })))));
  }

  // -- the form

  const toolOf = (name) => known.tools.find((tool) => tool.name === name);
  // Where a field's draft is kept. The LoRA file is that of all tools: who has verified one converts or resizes it next.
  const place = (tool, field) => (field === "model" ? drafts : (drafts[tool] = drafts[tool] || {}));

  function choose(name) {
    chosen = drafts.tool = name;
    store(DRAFT, drafts);
    const tool = toolOf(name);
    radios.get(name).checked = true;
    about.textContent = translated(tool.about);
    go.textContent = tool.label;
    fields.clear();
    secretField.hidden = !tool.secret;
    secretLabel.textContent = t`Token (${tool.secret})`;
    secret.value = "";
    wrong.hidden = true;
    const basic = tool.fields.filter((spec) => spec.basic);
    const rest = tool.fields.filter((spec) => !spec.basic);
    form.replaceChildren(make("div", { class: "kl-grid kl-tool-grid" }, ...basic.map(drawField)));
    if (rest.length) form.append(make("details", { class: "kl-tool-more" }, make("summary", { text: t`More` }), make("div", { class: "kl-grid" }, ...rest.map(drawField))));
  }

  function drawField(spec) {
    const ident = `kl-tool-${spec.name}`;
    const keep = () => {
      place(chosen, spec.name)[spec.name] = field.read();
      store(DRAFT, drafts);
    };
    const isFile = spec.path && spec.name !== "save_to";
    const adder = isFile && spec.control === "lines" ? drawAdder(spec, () => field.node, keep) : null;
    const note = spec.name === "save_to" ? t`A name without a folder lies in ${known.folder}. ` : "";
    const field = makeField(spec, ident, keep, { note, below: adder });
    if (spec.path) field.node.after(makeBrowse(spec, field.node));
    if (isFile && spec.control === "text") field.node.setAttribute("list", files.id);
    if (spec.path) field.node.placeholder = spec.control === "lines" ? t`one path a line` : spec.optional ? t`none` : t`a path on the studio's computer`;
    const kept = place(chosen, spec.name)[spec.name];
    field.set(typeof kept === typeof spec.default ? kept : spec.default);
    fields.set(spec.name, field);
    return field.root;
  }

  // A list of files takes further ones from those that runs have saved.
  function drawAdder(spec, nodeOf, keep) {
    if (!known.files.length) return null;
    const adder = make("select", { "aria-label": t`Add a saved file to ${translated(spec.label)}` }, make("option", { value: "", text: t`Add a saved file …` }),
      ...known.files.map((path) => make("option", { value: path, text: path.split(/[\\/]/).slice(-2).join("/") })));
    adder.addEventListener("change", () => {
      const node = nodeOf();
      node.value = [...node.value.split("\n").filter((line) => line.trim()), adder.value].join("\n");
      adder.value = "";
      keep();
    });
    return make("div", { class: "kl-control" }, adder);
  }

  async function start() {
    if (isBusy) return;
    isBusy = true;
    status.textContent = "";
    try {
      const texts = Object.fromEntries([...fields].map(([name, field]) => [name, field.read()]));
      const answer = await post("/kl/tools/start", { tool: chosen, texts, secret: secret.value });
      blame(fields, wrong, answer.problems || []);
      if (answer.run) {
        known.runs.unshift(answer.run);
        show(answer.run.name);
        poll();
      }
    } catch (error) {
      status.textContent = error.message;
    } finally {
      isBusy = false;
    }
  }

  // -- the run of a tool

  function show(name) {
    run = name;
    offset = -1;
    state = "";
    view.clear();
    list();
  }

  async function follow() {
    const name = run;
    const answer = await ask(`/kl/tools/run/${encodeURIComponent(name)}?console=${offset}`);
    if (name !== run) return;
    const isNew = offset < 0;
    offset = answer.console.offset;
    const ended = state === "running" && answer.state !== "running";
    state = answer.state;
    view.update(answer, toolOf(answer.tool).label);
    // On a narrow screen the result lies below the form.
    if (isNew) view.root.scrollIntoView({ block: "nearest" });
    if (!ended) return;
    const fresh = await ask("/kl/tools");
    Object.assign(known, { files: fresh.files, runs: fresh.runs });
    list();
  }

  function resultView() {
    const title = make("h2");
    const badge = make("span", { class: "kr-badge" });
    const bar = makeBar();
    const line = make("p", { class: "kl-note kl-tool-line" });
    const cancel = make("button", { type: "button", class: "kl-button", text: t`Cancel`, onclick: () => stop() });
    const verify = make("button", { type: "button", class: "kl-button", text: t`Verify this file`, onclick: () => openTool("verify_lora", { model: verify.dataset.path }) });
    const output = make("p", { class: "kl-note" });
    const report = make("div", { class: "kl-tool-report" });
    const log = new Console();
    const box = make("section", { class: "kl-card", "aria-label": t`Result`, hidden: true },
      make("div", { class: "kl-live" }, make("div", { class: "kl-row kl-between" }, title, badge), bar.root), line,
      make("div", { class: "kl-row" }, cancel, verify), output, report, make("div", { class: "kl-live" }, log.root));
    let shown = "";

    async function stop() {
      cancel.disabled = true;
      try {
        await ask(`/kl/tools/run/${encodeURIComponent(run)}/cancel`, { method: "POST" });
      } catch (error) {
        status.textContent = error.message;
      }
      poll();
    }

    return {
      root: box,
      clear() {
        box.hidden = true;
        shown = "";
        cancel.disabled = false;
        report.replaceChildren();
      },
      update(answer, label) {
        box.hidden = false;
        const running = answer.state === "running";
        title.textContent = label;
        badge.dataset.state = answer.state === "cancelled" ? "stopped" : answer.state;
        badge.textContent = WORDS[answer.state];
        bar.root.hidden = !running;
        bar.show(answer.percent === null ? null : answer.percent / 100, running);
        line.hidden = !running && !answer.why.length;
        line.textContent = joined(answer.why.map(translated)) || answer.console.open || answer.console.lines[answer.console.lines.length - 1] || t`Starting …`;
        cancel.hidden = !running;
        verify.hidden = !answer.output;
        verify.dataset.path = answer.output;
        output.hidden = !answer.output;
        output.textContent = answer.output ? t`Written to ${answer.output}` : "";
        log.update(answer.console);
        if (answer.state === "failed" || answer.state === "died") log.root.open = true;
        const key = JSON.stringify(answer.report);
        if (!running && key !== shown) {
          shown = key;
          report.replaceChildren(...(answer.report === null ? [] : drawAnswer(answer.report)));
        }
      },
    };
  }

  attend = async () => {
    if (!asked) return;
    if (!known) await learn();
    const { name, texts } = asked;
    asked = null;
    for (const [field, text] of Object.entries(texts)) place(name, field)[field] = text;
    choose(name);
    await start();
    view.root.scrollIntoView({ block: "nearest" });
  };
  attend();
}
