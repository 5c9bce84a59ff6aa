// What is compared: the base, the LoRA files of the form, the checkpoints of a run; and in the studio prompts, strengths and seeds.

import { makeField } from "../common/field.js";
import { t } from "../common/language.js";
import { make } from "../common/page.js";
import { runWords } from "../common/words.js";
import { withPoints } from "../train/texts.js";

const MAX_CHECKPOINTS = 4; // of a run, chosen from the start
const PROMPTS = { name: "prompts", label: t`Prompts`, control: "area", default: "", help: t`One a line; kohya's flags (--w --h --d --s --l --n) work in each. Empty takes the prompt above.` };
const STRENGTHS = { name: "strengths", label: t`Strengths`, control: "text", default: "1", help: t`Of the checkpoints, with spaces between them, such as \`0.6 0.8 1\`. Each is a column.` };
const SEEDS = { name: "seeds", label: t`Seeds`, control: "text", default: "1", help: t`With spaces between them, or a range such as \`1-4\`. Each is a row for every prompt that has no seed of its own (--d).` };

// page: {known(), draft, keep(), mine(), fold()}; known is what the studio says, mine the LoRA files that fit what is drawn with.
export function makeAxes({ known, draft, keep, mine, fold }) {
  const base = make("input", { type: "checkbox", id: "kl-inf-with-base", checked: true });
  const chosen = make("input", { type: "checkbox", id: "kl-inf-with-chosen", checked: true });
  const pick = make("select", { id: "kl-inf-run" });
  const list = make("div", { class: "kl-inf-checks" });
  const tick = (box, text) => make("label", { class: "kl-toggle", for: box.id }, box, make("span", { text }));
  const baseRow = tick(base, t`The base model alone`);
  const chosenRow = tick(chosen, t`With the LoRA files above`);
  const runRow = make("div", { class: "kl-inf-run" }, make("label", { for: pick.id, text: t`Checkpoints of` }), pick);
  const fields = [PROMPTS, STRENGTHS, SEEDS].map((spec) => {
    const field = makeField(spec, `kl-inf-${spec.name}`, () => {
      draft.axes[spec.name] = field.read();
      keep();
    });
    return field;
  });
  // A decimal comma is shown as it is taken.
  fields[1].node.addEventListener("change", () => {
    draft.axes.strengths = withPoints(fields[1].read());
    fields[1].set(draft.axes.strengths);
    keep();
  });
  const grid = make("div", { class: "kl-grid" }, ...fields.map(({ root }) => root));
  const root = fold(t`What is compared`, make("div", { class: "kl-inf-checks" }, baseRow, chosenRow), runRow, list, grid);
  let boxes = [];

  const isWhole = () => wholes().length > 0; // what is drawn with is a model that a run saved
  const current = () => draft.loras.filter((row) => String(row.name).trim());
  const fileOf = (name) => known().loras.find((each) => each.name === name);
  const runOf = (name) => (fileOf(name) || {}).run;
  const runs = () => [...new Set(mine().map((each) => each.run))];
  const filesOf = (run) => mine().filter((each) => each.run === run);

  // All that the run has saved whose model is drawn with.
  function wholes() {
    const { choice, saved } = known();
    const own = choice.draws && !choice.loras.length && saved.find((each) => each.name === choice.with);
    return own ? saved.filter((each) => each.run === own.run) : [];
  }

  function renew() {
    const { choice } = known();
    grid.hidden = !choice.draws;
    baseRow.hidden = choice.draws && isWhole() && !choice.hasBase;
    chosenRow.hidden = runRow.hidden = isWhole();
    fields[1].root.hidden = isWhole();
    const wanted = current().map((row) => runOf(row.name)).find(Boolean) || runs()[0] || "";
    const run = pick.dataset.touched && runs().includes(pick.value) ? pick.value : wanted;
    pick.replaceChildren(make("option", { value: "", text: t`no run` }), ...runs().map((each) => make("option", { value: each, text: runWords(each, filesOf(each)[0].called) })));
    pick.value = run;
    check();
  }

  function check() {
    const used = new Set(isWhole() ? [] : current().map((row) => row.name));
    const others = isWhole() ? wholes() : filesOf(pick.value).filter((each) => !used.has(each.name));
    // Spread over the run when there are more than fit.
    const stride = Math.max(1, Math.ceil(others.length / MAX_CHECKPOINTS));
    boxes = others.map((file, index) => [file, make("input", { type: "checkbox", id: `kl-inf-check-${index}`, checked: index % stride === 0 })]);
    list.replaceChildren(...boxes.map(([file, each]) => tick(each, file.label)));
  }
  pick.addEventListener("change", () => {
    pick.dataset.touched = "1";
    check();
  });

  /** @returns {any[]} {label, loras: [{name, weight}], varied, is_base}, or for whole models {label, draw_with, is_base} */
  function columns() {
    const ticked = [...boxes].reverse().filter(([, box]) => box.checked).map(([file]) => file);
    if (isWhole()) {
      const first = base.checked && !baseRow.hidden ? [{ label: t`base`, draw_with: known().choice.with, is_base: true }] : [];
      return [...first, ...ticked.map((file) => ({ label: file.label, draw_with: file.name }))];
    }
    const rows = current();
    /** @type {any[]} */
    const found = base.checked ? [{ label: t`base`, loras: [], is_base: true }] : [];
    for (const file of ticked) {
      // A checkpoint takes the place of the chosen file of its run; the others stay.
      const place = rows.findIndex((row) => runOf(row.name) === file.run);
      const row = { name: file.name, weight: place >= 0 ? rows[place].weight : "1" };
      found.push({ label: file.label, loras: place >= 0 ? rows.map((old, index) => (index === place ? row : old)) : [...rows, row], varied: place >= 0 ? place : rows.length });
    }
    if (chosen.checked && rows.length) {
      const label = rows.map((row) => (fileOf(row.name) || { label: row.name.split(/[\\/]/).pop().replace(/\.safetensors$/, "") }).label).join(" + ");
      found.push({ label, loras: rows, varied: 0 });
    }
    return found.map(({ loras, ...rest }) => ({ ...rest, loras: loras.map(({ name, weight }) => ({ name, weight })) }));
  }

  return {
    root, renew, columns,
    fields: new Map(fields.map((field, index) => [[PROMPTS, STRENGTHS, SEEDS][index].name, field])),
    // What the fields say; strengths are those of the form where nothing else is said.
    texts: (prompt) => ({ prompts: fields[0].read().trim() || prompt.replace(/\s+/g, " ").trim(), strengths: fields[1].read(), seeds: fields[2].read() }),
    // The prompt of the form has changed: where nobody has written any here, one of somebody's own takes the place of those of a run's previews.
    follow(prompt) {
      const { words = "", prompts = "" } = known().choice;
      const [before, after] = prompt && prompt !== words ? [prompts, ""] : ["", prompts];
      if (draft.axes.prompts !== before) return;
      draft.axes.prompts = after;
      fields[0].set(after);
    },
    // Those of a run's previews, and what somebody has written here before.
    set(given) {
      draft.axes = { prompts: "", strengths: "1", seeds: "1", ...given };
      fields.forEach((field, index) => field.set(draft.axes[[PROMPTS, STRENGTHS, SEEDS][index].name]));
    },
  };
}
