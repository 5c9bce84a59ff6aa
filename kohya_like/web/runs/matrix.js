// The evaluations of a run of style transfer: images of every style in every other one, over the epochs, with what was measured of them.

import { html, render } from "../common/html.js";
import { t } from "../common/language.js";
import { make, sharp } from "../common/page.js";
import { address, ask, withToken } from "../common/studio.js";
import { figure } from "../common/words.js";

const SOURCE = t`the source`;
const ASKED = t`Evaluates after the step it is at.`;
// What is measured of a pair: its name, what it means, and which way is better.
const MEASURES = {
  swd_target: [t`SWD to the target style`, t`lower is nearer`],
  swd_source: [t`SWD to the source style`, ""],
  swd_ratio: [t`share of the source's SWD`, t`lower is nearer`],
  ssm_source: [t`content difference`, t`0 keeps all of it`],
  structure: [t`structure`, t`1 has the same edges, 0 unrelated ones`],
};
const nameOf = (measure) => (MEASURES[measure] || [measure.replaceAll("_", " ")])[0];

export function when({ epoch, step }) {
  if (step !== null) return t`epoch ${epoch}, step ${step}`;
  return epoch === 0 ? t`before the first step` : t`epoch ${epoch}`;
}

// The sources of an evaluation, one a row of its table, with the words that tell them apart. An old one says its pairs only.
export function rowsOf({ sources, pairs }) {
  const told = sources.length ? sources : [...new Map(pairs.map(({ from, stem }) => [`${from}/${stem}`, { style: from, stem, file: "", vae: "" }])).values()];
  const many = new Set(told.map(({ style }) => style)).size < told.length;
  return told.map((source) => ({ ...source, words: many && source.stem ? `${source.style}, ${source.stem}` : source.style }));
}

// What became of a source in a style.
export function pairOf({ pairs }, { from, stem, to }) {
  return pairs.find((pair) => pair.from === from && pair.to === to && (!stem || !pair.stem || pair.stem === stem));
}

const keyOf = ({ name, time }) => `${name} ${time}`;
const inFrame = (image) => image && sharp(image, image.parentElement);

export class Matrix {
  constructor(compact) {
    this.prefix = compact ? "kl-matrix-side" : "kl-matrix";
    this.root = make("section", { class: "kr-matrix", "aria-label": t`Evaluation`, hidden: true });
    this.beside = SOURCE; // what stands before: the source, the name of an evaluation, or "" for nothing
    this.cut = 50;
    this.reset();
  }

  reset() {
    this.run = "";
    this.answer = null; // what the studio said last
    this.all = [];
    this.chosen = null; // name of an evaluation; null follows the newest
    this.cell = null; // {from, stem, to} of the image that is shown large; to is "" for a source, and null for what the VAE makes of it
    this.known = new Map(); // evaluation and its time -> summary
    /** @type {[any, any] | null} */
    this.shown = null; // an evaluation and its summary
    this.note = "";
    this.root.hidden = true;
  }

  update(answer) {
    if (answer.name !== this.run) {
      this.reset();
      this.run = answer.name;
    }
    if (this.answer && this.answer.evaluation_requested && !answer.evaluation_requested) this.note = "";
    this.answer = answer;
    this.all = answer.evaluations;
    this.root.hidden = !answer.evaluates;
    this.draw();
  }

  async request() {
    this.answer.evaluation_requested = true;
    this.draw();
    try {
      await ask(address(this.run, "/evaluate"), { method: "POST" });
    } catch (error) {
      this.answer.evaluation_requested = false;
      this.note = error.message;
      this.draw();
    }
  }

  // ---- which evaluation

  now() {
    return this.all.find((each) => each.name === this.chosen) || this.all.at(-1);
  }

  // What is known of an evaluation; what is not is asked for.
  summary(evaluation) {
    if (!this.known.has(keyOf(evaluation))) this.learn(evaluation);
    return this.known.get(keyOf(evaluation));
  }

  async learn(evaluation) {
    const { run, known } = this;
    known.set(keyOf(evaluation), null);
    try {
      known.set(keyOf(evaluation), await ask(address(run, `/evaluation/${encodeURIComponent(evaluation.name)}`)));
    } catch (error) {
      if (run === this.run) this.note = error.message;
    }
    if (run === this.run) this.draw();
    // The next time it is asked for again.
    if (!known.get(keyOf(evaluation))) known.delete(keyOf(evaluation));
  }

  url(evaluation, file, more = "") {
    return withToken(address(this.run, `/evaluation/${encodeURIComponent(evaluation.name)}/${encodeURIComponent(file)}`), `&m=${evaluation.time}${more}`);
  }

  change(what) {
    Object.assign(this, what);
    this.draw();
  }

  draw() {
    if (!this.answer.evaluates) return render(null, this.root);
    const { state, evaluation_requested: isAsked } = this.answer;
    const evaluation = this.now();
    const summary = evaluation && this.summary(evaluation);
    // What was shown stays while another one comes.
    if (summary) this.shown = [evaluation, summary];
    render(html`<div class="kr-curve-head"><h3>${t`Evaluation`}</h3>
        <button type="button" class="kr-button" hidden=${state !== "running"} disabled=${isAsked} onClick=${() => this.request()}>${t`Evaluate now`}</button></div>
      <p class="kr-status" role="status">${isAsked ? ASKED : this.note}</p>
      ${evaluation ? html`<div class="kr-matrix-body">${this.slider(evaluation)}${this.shown && [this.table(...this.shown), this.large(...this.shown), this.means(...this.shown)]}</div>`
        : html`<p class="kr-empty">${t`There is no evaluation yet.`}</p>`}`, this.root);
  }

  slider(evaluation) {
    const [last, id] = [this.all.length - 1, `${this.prefix}-epoch`];
    const choose = (place) => this.change({ chosen: place >= last ? null : this.all[place].name });
    return html`<div class="kr-sliders"><label for=${id}><span class="kr-name">${t`Evaluation:`} <span class="kr-value">${when(evaluation)}</span></span>
      <input type="range" id=${id} min="0" max=${last} step="1" value=${this.all.indexOf(evaluation)} disabled=${last < 1} aria-valuetext=${when(evaluation)}
        onInput=${(event) => choose(Number(event.currentTarget.value))} /></label></div>`;
  }

  // ---- the table

  table(evaluation, summary) {
    const styles = summary.styles.filter((style) => summary.pairs.some((pair) => pair.to === style));
    const hasVae = summary.sources.some(({ vae }) => vae);
    const chosen = JSON.stringify(this.chosenCell(summary));
    const place = (file, cell, words, measure = "") => {
      if (!file) return html`<td><span class="kr-note">${t`none`}</span></td>`;
      const show = () => {
        this.change({ cell });
        this.root.querySelector(".kr-matrix-view").scrollIntoView({ block: "nearest" });
      };
      return html`<td><button type="button" class="kr-matrix-cell" aria-label=${words} title=${words} aria-pressed=${String(chosen === JSON.stringify(cell))} onClick=${show}>
        <img alt="" loading="lazy" ref=${inFrame} src=${this.url(evaluation, file, "&size=thumb")} /></button><span class="kr-matrix-figure" aria-hidden="true">${measure}</span></td>`;
    };
    const row = ({ style, stem, file, vae, words }) => html`<tr key=${`${style}/${stem}`}><th scope="row">${words}</th>
      ${place(file, { from: style, stem, to: "" }, t`${words}, the source`)}
      ${hasVae && place(vae, { from: style, stem, to: null }, t`${words}, what the VAE alone makes of it`)}
      ${styles.map((to) => {
        const pair = pairOf(summary, { from: style, stem, to });
        const measure = pair && pair.measures.swd_target !== undefined ? figure(pair.measures.swd_target, 2) : "";
        return place(pair && pair.file, { from: style, stem, to }, t`${words} to ${to}${measure ? t`, SWD to the target style ${measure}` : ""}`, measure);
      })}</tr>`;
    return html`<div class="kr-matrix-scroll" role="region" tabindex="0" aria-label=${t`Images from each style to each`}><table class="kr-matrix-table">
      <caption class="kr-note"><span>${t`Under an image: its sliced Wasserstein distance (SWD) to the target style; lower is nearer.`}</span></caption>
      <thead><tr><th scope="col">${t`From`}</th><th scope="col">${t`Source`}</th>${hasVae && html`<th scope="col">${t`VAE`}</th>`}${styles.map((style) => html`<th scope="col">${t`To`} ${style}</th>`)}</tr></thead>
      <tbody>${rowsOf(summary).map(row)}</tbody></table></div>`;
  }

  // Means of this evaluation and, below, what to compare them with.
  means(evaluation, { means, baselines }) {
    const rows = [[t`Transfers, ${when(evaluation)}`, means], ...Object.entries(baselines).map(([name, measures]) => [name.replaceAll("_", " "), measures])];
    const names = [...new Set(rows.flatMap(([, measures]) => Object.keys(measures)))];
    const links = [["grid.jpg", t`All images in one file`], ["metrics.csv", t`The numbers as CSV`]];
    return html`<div class="kr-matrix-scroll" role="region" tabindex="0" aria-label=${t`Means and what to compare them with`}><table class="kr-matrix-baselines">
      <caption class="kr-note"><span>${t`Means, and what doing something simpler scores`}</span></caption>
      <thead><tr><td></td>${names.map((name) => html`<th scope="col">${nameOf(name)}</th>`)}</tr></thead>
      <tbody>${rows.map(([words, measures]) => html`<tr><th scope="row">${words}</th>${names.map((name) => html`<td>${name in measures ? figure(measures[name], 3) : "–"}</td>`)}</tr>`)}</tbody>
      </table></div>
      <p class="kr-matrix-links">${links.map(([file, text]) => html`<a href=${this.url(evaluation, file)} download=${`${this.run}-${evaluation.name}-${file}`}>${text}</a>`)}</p>`;
  }

  // ---- one image, large

  // The file and the measures of a cell; undefined where there is none.
  found(summary, { from, stem, to }) {
    if (to) return pairOf(summary, { from, stem, to });
    const source = rowsOf(summary).find((each) => each.style === from && each.stem === stem);
    return source && (to === "" ? source : source.vae && { file: source.vae });
  }

  // The chosen cell, as long as there is one; else a style in another one.
  chosenCell(summary) {
    if (this.cell && this.found(summary, this.cell)) return this.cell;
    const first = summary.pairs.find((pair) => pair.from !== pair.to) || summary.pairs[0];
    return first ? { from: first.from, stem: first.stem, to: first.to } : null;
  }

  // What stands before: its address and the words of its corner; null for nothing.
  other(evaluation, summary, cell) {
    const source = summary.sources.find((each) => each.style === cell.from && each.stem === cell.stem);
    if (this.beside === SOURCE) return source && source.file && cell.to !== "" ? [this.url(evaluation, source.file), "source"] : null;
    const elsewhere = this.all.find((each) => each.name === this.beside);
    const there = elsewhere && cell.to && this.summary(elsewhere);
    const pair = there && pairOf(there, cell);
    return pair && pair.file ? [this.url(elsewhere, pair.file), when(elsewhere)] : null;
  }

  large(evaluation, summary) {
    const cell = this.chosenCell(summary);
    if (!cell) return null;
    const offered = [["", "nothing"], [SOURCE, SOURCE], ...this.all.filter((each) => each !== evaluation).map((each) => [each.name, when(each)])];
    if (!offered.some(([value]) => value === this.beside)) this.beside = SOURCE;
    const found = this.found(summary, cell);
    const row = rowsOf(summary).find((each) => each.style === cell.from && (!cell.stem || each.stem === cell.stem));
    const words = row ? row.words : cell.from;
    const own = cell.to || (cell.to === null ? "VAE" : "source");
    const [old, corner] = this.other(evaluation, summary, cell) || ["", ""];
    const [id, cut] = [`${this.prefix}-beside`, this.cut];
    return html`<div class="kr-viewer kr-matrix-view" key="view">
      <div class=${old ? "kr-pair" : "kr-pair kr-alone"} style=${{ "--kl-cut": `${cut}%` }}>
        <img class="kr-before" hidden=${!old} ref=${inFrame} src=${old || null} alt=${corner === "source" ? t`${words}, the source` : t`${words} to ${cell.to}, ${corner}`} />
        <img class="kr-after" ref=${inFrame} src=${this.url(evaluation, found.file)} alt=${cell.to ? t`${words} to ${cell.to}, ${when(evaluation)}` : `${words}, ${own}`} />
        <span class="kr-corner kr-corner-left">${corner}</span><span class="kr-corner kr-corner-right">${corner && corner !== "source" ? when(evaluation) : own}</span></div>
      <div class="kr-beside"><h4>${cell.to ? t`${words} to ${cell.to}` : `${words}, ${own}`}</h4>
        <dl class="kr-matrix-numbers">${Object.entries(cell.to ? found.measures : {}).map(([name, value]) => html`<div><dt>${nameOf(name)}</dt><dd>${figure(value, 3)}</dd>
          ${(MEASURES[name] || [])[1] && html`<dd class="kr-note">${MEASURES[name][1]}</dd>`}</div>`)}</dl>
        <div class="kr-sliders"><label for=${id}><span class="kr-name">${t`Compare with`}</span>
          <select id=${id} value=${this.beside} onChange=${(event) => this.change({ beside: event.currentTarget.value })}>${offered.map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></label>
          <label hidden=${!old}><span class="kr-name">${t`Before and after`}</span>
            <input type="range" min="0" max="100" value=${cut} aria-valuetext="${cut} % before, ${100 - cut} % after" onInput=${(event) => this.change({ cut: Number(event.currentTarget.value) })} /></label></div></div>
    </div>`;
  }
}
