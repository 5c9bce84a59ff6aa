// Runs beside one another: their curves on one plot, the settings that differ, what each has reached, and previews at the same step. Talks
// with comparing.py by way of live.py; fetched when somebody compares.

import { html, render } from "../common/html.js";
import { listed, phrased, t, translated } from "../common/language.js";
import { make, say, sharp } from "../common/page.js";
import { address, ask, repeat, withToken } from "../common/studio.js";
import { duration, figure, grouped, plural } from "../common/words.js";
import { Plot } from "./plot.js";
import { nameOf, stateWords } from "./run.js";
import { nearest } from "./scales.js";

const COLOURS = 8;
const DASHES = [undefined, [7, 4]];
export const colourOf = (place) => `line-${place % COLOURS}`;

const loss = (value) => figure(value);
/**
 * What a run has reached: its name, its words, and how its value is written.
 * @type {[string, string, (value: any, all: Record<string, any>) => string][]}
 */
const REACHED = [
  ["state", t`State`, (state) => stateWords(state)],
  ["steps", t`Steps`, (step, { "of steps": steps }) => (steps ? t`${grouped(step)} of ${grouped(steps)}` : grouped(step))],
  ["loss", t`Loss`, loss],
  ["lowest held-out loss", t`Lowest held-out loss`, loss],
  ["trained seconds", t`Training time`, (seconds) => duration(seconds)],
  ["paused seconds", t`In pauses`, (seconds) => duration(seconds)],
  ["seconds per step", t`Time of a step`, (seconds) => (seconds < 1 ? t`${figure(1000 * seconds, 3)} ms` : `${figure(seconds, 3)} s`)],
  ["peak GiB", t`Peak memory`, (value) => `${figure(value, 3)} GiB`],
];

// A setting as the table says it.
export function valueWords(value) {
  if (value === null || value === "") return "–";
  if (typeof value === "boolean") return value ? t`on` : t`off`;
  return Array.isArray(value) ? value.map(valueWords).join(", ") || "–" : String(value);
}

// Previews with the prompt that each is of, also where several prompts of a step have one text.
export function keyed(samples) {
  const count = new Map();
  return samples.map((sample) => {
    const which = `${sample.step} ${sample.prompt}`;
    count.set(which, (count.get(which) || 0) + 1);
    return { ...sample, key: `${count.get(which)} ${sample.prompt}` };
  });
}

// The steps at which runs have a preview of a prompt, and the latest of those that most of them have.
export function stepsOf(runs, key) {
  const counts = new Map();
  for (const { previews } of runs) {
    for (const sample of previews) if (sample.key === key) counts.set(sample.step, (counts.get(sample.step) || 0) + 1);
  }
  const steps = [...counts.keys()].sort((one, other) => one - other);
  return { steps, best: steps.reduce((best, step) => (counts.get(step) >= (counts.get(best) || 0) ? step : best), steps[0]) };
}

class Overlay extends Plot {
  constructor() {
    super(300, t`Read the curves at a step`, t`The curves begin with the first step.`);
    this.runs = [];
    this.show = { smooth: true, held: true, log: false };
    for (const [name, label] of [["smooth", t`Smoothed`], ["held", t`Held-out loss`], ["log", t`Log scale`]]) {
      this.toggle(label, this.show[name], (on) => (this.show[name] = on));
    }
    this.root = make("section", { class: "kr-curve", "aria-label": t`Loss` }, make("div", { class: "kr-curve-head" }, make("h3", { text: t`Loss` }), this.legend, this.toggles), this.stage, this.readout);
  }

  update(runs) {
    this.runs = runs;
    this.points = [...new Set(runs.flatMap(({ curve }) => curve.map(([step]) => step)))].sort((one, other) => one - other).map((step) => [step]);
    this.paint();
  }

  describe(index) {
    const [step] = this.points[index];
    const told = this.runs.filter(({ curve }) => curve.length && step >= curve[0][0] && step <= curve.at(-1)[0]);
    const value = ({ curve }) => curve[nearest(curve, step)][this.show.smooth ? 2 : 1];
    return t`Step ${step}: ${phrased(told.map((run) => `${nameOf(run)} ${figure(value(run))}`))}`;
  }

  figure() {
    const look = (place) => ({ kind: colourOf(place), dash: DASHES[Math.floor(place / COLOURS) % DASHES.length] });
    const lines = this.runs.map((run, place) => ({
      ...look(place), words: nameOf(run), steps: run.curve.map(([step]) => step), values: run.curve.map((point) => point[this.show.smooth ? 2 : 1]), dots: run.curve.length === 1 ? 6 : 0,
    }));
    const held = this.runs.map((run, place) => ({ ...look(place), steps: run.validation.map(([step]) => step), values: run.validation.map(([, loss]) => loss), width: 1, dots: 8 }));
    return { lines: this.show.held ? [...lines, ...held.filter(({ steps }) => steps.length)] : lines, log: this.show.log };
  }
}

const sharpen = (image) => image && sharp(image);

// open(name): shows one run instead.
export function makeComparison(open) {
  let names = [];
  let known = { runs: [], settings: [], problem: "", missing: [] };
  let prompt = "";
  let step = null; // null follows the latest that most runs have
  const heading = make("h2", { class: "kr-title", "aria-live": "polite" });
  const status = make("p", { class: "kr-status", role: "status" });
  const plot = new Overlay();
  const box = make("div", { class: "kr-compare" });
  const root = make("article", { class: "kr-run", "aria-label": t`Comparison` }, heading, status, plot.root, box);

  function table() {
    const head = known.runs.map((run, place) => html`<th scope="col" key=${run.name}><button type="button" class="kl-link kr-key" style=${`--kl-key: var(--kl-plot-${colourOf(place)})`}
      aria-label=${t`Open run ${nameOf(run)}`} onClick=${() => open(run.name)}>${nameOf(run)}</button></th>`);
    const row = (key, words, cells, code) => html`<tr key=${key}><th scope="row">${words}${code && html` <code>${code}</code>`}</th>${cells.map((cell) => html`<td>${cell}</td>`)}</tr>`;
    const part = (name) => html`<tr><th scope="rowgroup" class="kr-compare-part" colspan=${known.runs.length + 1}><span>${name}</span></th></tr>`;
    const settings = known.settings.map(({ name, label, values }) => (name === label ? row(label, translated(label), values.map(translated)) : row(label, translated(label), values.map(valueWords), name)));
    const none = known.problem || (known.runs.length > 1 ? t`No setting differs.` : t`Choose a second run to see what differs.`);
    const reached = REACHED.filter(([key]) => known.runs.some((run) => run.reached[key] !== null))
      .map(([key, words, say]) => row(key, words, known.runs.map((run) => (run.reached[key] === null ? "–" : say(run.reached[key], run.reached)))));
    return html`<section aria-label=${t`Settings and figures`}><div class="kr-compare-scroll" tabindex="0" role="region" aria-label=${t`Table of settings and figures`}>
      <table class="kl-table"><thead><tr><td></td>${head}</tr></thead>
        <tbody>${part(t`Settings that differ`)}${settings.length ? settings : html`<tr><td colspan=${known.runs.length + 1}>${none}</td></tr>`}</tbody>
        <tbody>${part(t`Time and memory`)}${reached}</tbody></table></div></section>`;
  }

  function cell(run, key, at) {
    const mine = run.previews.filter((sample) => sample.key === key);
    const sample = mine.find((each) => each.step === at);
    const instead = mine.length ? t`No preview at step ${at}; its nearest is of step ${mine[nearest(mine.map((each) => [each.step]), at)].step}.` : t`No preview of this prompt.`;
    const words = sample && t`${nameOf(run)} at step ${at}: ${sample.prompt}`;
    return html`<figure key=${run.name}>${sample
      ? html`<img alt=${words} ref=${sharpen} src=${withToken(address(run.name, `/sample/${encodeURIComponent(sample.file)}`), `&size=full&m=${sample.time || 0}`)} />`
      : html`<p class="kr-note">${instead}</p>`}<figcaption>${nameOf(run)}${sample && sample.seed !== null ? html` <span class="kr-note">${t`seed ${sample.seed}`}</span>` : ""}</figcaption></figure>`;
  }

  function previews() {
    const prompts = [...new Map(known.runs.flatMap((run) => run.previews.map((sample) => [sample.key, sample.prompt])))];
    if (!prompts.length) return null;
    const chosen = prompts.some(([key]) => key === prompt) ? prompt : prompts[0][0];
    const { steps, best } = stepsOf(known.runs, chosen);
    const at = steps.includes(step) ? step : best;
    const pick = (event) => {
      prompt = event.currentTarget.value;
      draw();
    };
    const go = (event) => {
      step = steps[Number(event.currentTarget.value)];
      draw();
    };
    return html`<section class="kr-previews" aria-label=${t`Previews`}><h3>${t`Previews at the same step`}</h3><div class="kr-compare-pick">
        ${prompts.length > 1 && html`<div><label class="kr-name" for="kl-compare-prompt">${t`Prompt`}</label><select id="kl-compare-prompt" class="kr-filter" value=${chosen} onChange=${pick}>${prompts.map(([key, words]) => html`<option key=${key} value=${key}>${words || t`No prompt`}</option>`)}</select></div>`}
        <label class="kr-sliders"><span class="kr-name">${t`Step`} <span class="kr-value">${at}</span></span><input type="range" min="0" max=${steps.length - 1} step="1" value=${steps.indexOf(at)} disabled=${steps.length < 2} aria-valuetext=${t`step ${at}`} onInput=${go} /></label></div>
      ${prompts.length === 1 && html`<p class="kr-caption">${prompts[0][1] || t`No prompt`}</p>`}
      <div class="kr-compare-images">${known.runs.map((run) => cell(run, chosen, at))}</div></section>`;
  }

  function draw() {
    say(heading, known.runs.length ? t`${plural(known.runs.length, "run", "runs")} compared` : t`Compare runs`);
    plot.root.hidden = !known.runs.length;
    plot.update(known.runs);
    render(known.runs.length ? [table(), previews()] : html`<p class="kr-empty">${t`Tick runs in the list.`}</p>`, box);
  }

  const turn = repeat(root, async () => {
    if (!names.length) return 0.5;
    const asked = names;
    try {
      const answer = await ask(`/kl/runs/compare?${new URLSearchParams(names.map((name) => ["run", name]))}`);
      if (asked !== names) return 0;
      known = { ...answer, runs: answer.runs.map((run) => ({ ...run, previews: keyed(run.samples) })) };
      say(status, known.missing.length ? t`Not in the folders of this studio: ${listed(known.missing)}.` : "");
      draw();
      if (!answer.complete) return 0.05;
      return known.runs.some((run) => ["running", "queued"].includes(run.reached.state)) ? 3 : 10;
    } catch (error) {
      say(status, error.message);
      return 3;
    }
  });

  return {
    root,
    show(given) {
      names = given;
      known = { ...known, runs: known.runs.filter(({ name }) => names.includes(name)), settings: [] };
      draw();
      turn();
    },
  };
}
