// The evaluations of a run of style transfer: pictures of every style in every other one, over the epochs, with what was measured of them.

import { make, say, sharp } from "../common/page.js";
import { address, ask, withToken } from "../common/studio.js";
import { figure } from "../common/words.js";

const SOURCE = "the source";
// What is measured of a pair: its name, what it means, and which way is better.
const MEASURES = {
  swd_target: ["SWD to the target style", "lower is nearer"],
  swd_source: ["SWD to the source style", ""],
  swd_ratio: ["share of the source's SWD", "lower is nearer"],
  ssm_source: ["content difference", "0 keeps all of it"],
  structure: ["structure", "1 has the same edges, 0 unrelated ones"],
};
const nameOf = (measure) => (MEASURES[measure] || [measure.replaceAll("_", " ")])[0];

export function when({ epoch, step }) {
  if (step !== null) return `epoch ${epoch}, step ${step}`;
  return epoch === 0 ? "before the first step" : `epoch ${epoch}`;
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

export class Matrix {
  constructor(compact) {
    this.prefix = compact ? "kl-matrix-side" : "kl-matrix";
    this.button = make("button", { type: "button", class: "kr-button", text: "Evaluate now", onclick: () => this.request() });
    this.status = make("p", { class: "kr-status", role: "status" });
    this.empty = make("p", { class: "kr-empty", text: "There is no evaluation yet." });
    this.slider = make("input", { type: "range", id: `${this.prefix}-epoch`, min: 0, max: 0, value: 0, step: 1 });
    this.slider.addEventListener("input", () => this.choose(Number(this.slider.value)));
    this.sliderText = make("span", { class: "kr-value" });
    this.beside = make("select", { id: `${this.prefix}-beside` });
    this.beside.addEventListener("change", () => this.large());
    this.table = make("table", { class: "kr-matrix-table" });
    this.scroll = make("div", { class: "kr-matrix-scroll", role: "region", tabindex: 0, "aria-label": "Pictures from each style to each" }, this.table);
    this.before = make("img", { class: "kr-before", alt: "" });
    this.after = make("img", { class: "kr-after", alt: "" });
    this.beforeLabel = make("span", { class: "kr-corner kr-corner-left" });
    this.afterLabel = make("span", { class: "kr-corner kr-corner-right" });
    this.pair = make("div", { class: "kr-pair" }, this.before, this.after, this.beforeLabel, this.afterLabel);
    for (const image of [this.before, this.after]) sharp(image, this.pair);
    this.cut = make("input", { type: "range", min: 0, max: 100, value: 50 });
    this.cut.addEventListener("input", () => this.wipe());
    this.cutLabel = make("label", {}, make("span", { class: "kr-name", text: "Before and after" }), this.cut);
    this.title = make("h4");
    this.numbers = make("dl", { class: "kr-matrix-numbers" });
    this.view = make("div", { class: "kr-viewer kr-matrix-view", hidden: true }, this.pair,
      make("div", { class: "kr-beside" }, this.title, this.numbers,
        make("div", { class: "kr-sliders" }, make("label", { for: this.beside.id }, make("span", { class: "kr-name", text: "Compare with" }), this.beside), this.cutLabel)));
    this.baselines = make("table", { class: "kr-matrix-baselines" });
    this.links = make("p", { class: "kr-matrix-links" });
    this.body = make("div", { class: "kr-matrix-body", hidden: true },
      make("div", { class: "kr-sliders" }, make("label", { for: this.slider.id }, make("span", { class: "kr-name" }, "Evaluation: ", this.sliderText), this.slider)),
      this.scroll, this.view, make("div", { class: "kr-matrix-scroll", role: "region", tabindex: 0, "aria-label": "Means and what to compare them with" }, this.baselines), this.links);
    // In the page for runs that evaluate only.
    this.inside = [make("div", { class: "kr-curve-head" }, make("h3", { text: "Evaluation" }), this.button), this.status, this.empty, this.body];
    this.root = make("section", { class: "kr-matrix", "aria-label": "Evaluation", hidden: true });
    this.reset();
    this.wipe();
  }

  reset() {
    this.run = "";
    this.all = [];
    this.chosen = null; // name of an evaluation; null follows the newest
    this.cell = null; // {from, stem, to} of the picture that is shown large; to is "" for a source, and null for what the VAE makes of it
    this.known = new Map(); // evaluation and its time -> summary
    this.shown = "";
    this.root.hidden = true;
    this.body.hidden = this.view.hidden = true;
    say(this.status, "");
  }

  update(answer) {
    if (answer.name !== this.run) {
      this.reset();
      this.run = answer.name;
    }
    this.root.hidden = !answer.evaluates;
    if (!answer.evaluates) return this.root.replaceChildren();
    if (!this.root.firstChild) this.root.append(...this.inside);
    this.button.hidden = answer.state !== "running";
    this.button.disabled = answer.evaluation_requested;
    if (answer.evaluation_requested) say(this.status, "Evaluates after the step it is at.");
    else if (this.asked) say(this.status, "");
    this.asked = answer.evaluation_requested;
    this.all = answer.evaluations;
    this.empty.hidden = this.all.length > 0;
    this.body.hidden = this.all.length === 0;
    if (this.all.length) this.show();
  }

  async request() {
    this.button.disabled = true;
    try {
      await ask(address(this.run, "/evaluate"), { method: "POST" });
      this.asked = true;
      say(this.status, "Evaluates after the step it is at.");
    } catch (error) {
      this.button.disabled = false;
      say(this.status, error.message);
    }
  }

  // ---- which evaluation

  now() {
    return this.all.find((each) => each.name === this.chosen) || this.all[this.all.length - 1];
  }

  choose(position) {
    this.chosen = position >= this.all.length - 1 ? null : this.all[position].name;
    this.show();
  }

  async summary(evaluation) {
    const key = `${evaluation.name} ${evaluation.time}`;
    if (!this.known.has(key)) this.known.set(key, await ask(address(this.run, `/evaluation/${encodeURIComponent(evaluation.name)}`)));
    return this.known.get(key);
  }

  url(evaluation, file, more = "") {
    return withToken(address(this.run, `/evaluation/${encodeURIComponent(evaluation.name)}/${encodeURIComponent(file)}`), `&m=${evaluation.time}${more}`);
  }

  async show() {
    const { run } = this;
    const evaluation = this.now();
    const place = this.all.indexOf(evaluation);
    this.slider.max = String(this.all.length - 1);
    this.slider.value = String(place);
    this.slider.disabled = this.all.length < 2;
    this.slider.setAttribute("aria-valuetext", when(evaluation));
    say(this.sliderText, when(evaluation));
    this.offer(evaluation);
    try {
      const summary = await this.summary(evaluation);
      if (run !== this.run || evaluation !== this.now()) return;
      const key = `${evaluation.name} ${evaluation.time}`;
      if (key !== this.shown) this.draw(evaluation, summary);
      this.shown = key;
      this.large();
    } catch (error) {
      if (run === this.run) say(this.status, error.message);
    }
  }

  // ---- the table

  draw(evaluation, summary) {
    const styles = summary.styles.filter((style) => summary.pairs.some((pair) => pair.to === style));
    const hasVae = summary.sources.some(({ vae }) => vae);
    const head = make("tr", {}, make("th", { scope: "col", text: "From" }), make("th", { scope: "col", text: "Source" }), hasVae ? make("th", { scope: "col", text: "VAE" }) : null, ...styles.map((style) => make("th", { scope: "col", text: `To ${style}` })));
    const rows = rowsOf(summary).map((source) => make("tr", {}, make("th", { scope: "row", text: source.words }),
      this.place(evaluation, source.file, { from: source.style, stem: source.stem, to: "" }, `${source.words}, the source`, ""),
      hasVae ? this.place(evaluation, source.vae, { from: source.style, stem: source.stem, to: null }, `${source.words}, what the VAE alone makes of it`, "") : null,
      ...styles.map((style) => {
        const cell = { from: source.style, stem: source.stem, to: style };
        const pair = pairOf(summary, cell);
        const measure = pair && pair.measures.swd_target !== undefined ? figure(pair.measures.swd_target, 2) : "";
        return this.place(evaluation, pair && pair.file, cell, `${source.words} to ${style}${measure ? `, SWD to the target style ${measure}` : ""}`, measure);
      })));
    const focus = this.table.contains(document.activeElement) ? document.activeElement.getAttribute("data-cell") : null;
    this.table.replaceChildren(
      make("caption", { class: "kr-note" }, make("span", { text: "Under a picture: its sliced Wasserstein distance (SWD) to the target style; lower is nearer." })),
      make("thead", {}, head), make("tbody", {}, ...rows));
    if (focus) [...this.table.querySelectorAll("button")].find((button) => button.dataset.cell === focus)?.focus();
    this.means(evaluation, summary);
  }

  place(evaluation, file, cell, words, measure) {
    if (!file) return make("td", {}, make("span", { class: "kr-note", text: "none" }));
    const image = make("img", { src: this.url(evaluation, file, "&size=thumb"), alt: "", loading: "lazy" });
    const button = make("button", { type: "button", class: "kr-matrix-cell", "aria-label": words, title: words, "data-cell": JSON.stringify(cell), onclick: () => {
      this.cell = cell;
      this.large();
      this.view.scrollIntoView({ block: "nearest" });
    } }, image);
    sharp(image, button);
    return make("td", {}, button, make("span", { class: "kr-matrix-figure", "aria-hidden": "true", text: measure }));
  }

  // Means of this evaluation and, below, what to compare them with.
  means(evaluation, { means, baselines }) {
    const rows = [[`Transfers, ${when(evaluation)}`, means], ...Object.entries(baselines).map(([name, measures]) => [name.replaceAll("_", " "), measures])];
    const names = [...new Set(rows.flatMap(([, measures]) => Object.keys(measures)))];
    this.baselines.replaceChildren(
      make("caption", { class: "kr-note" }, make("span", { text: "Means, and what doing something simpler scores" })),
      make("thead", {}, make("tr", {}, make("td"), ...names.map((name) => make("th", { scope: "col", text: nameOf(name) })))),
      make("tbody", {}, ...rows.map(([words, measures]) => make("tr", {}, make("th", { scope: "row", text: words }), ...names.map((name) => make("td", { text: name in measures ? figure(measures[name], 3) : "–" }))))));
    const links = [["grid.jpg", "All pictures in one file"], ["metrics.csv", "The numbers as CSV"]];
    this.links.replaceChildren(...links.map(([file, text]) => make("a", { href: this.url(evaluation, file), download: `${this.run}-${evaluation.name}-${file}`, text })));
  }

  // ---- one picture, large

  offer(evaluation) {
    const wanted = [["", "nothing"], [SOURCE, SOURCE], ...this.all.filter((each) => each !== evaluation).map((each) => [each.name, when(each)])];
    const key = wanted.map(([value]) => value).join();
    if (key === this.offered) return;
    this.offered = key;
    const before = this.beside.options.length ? this.beside.value : SOURCE;
    this.beside.replaceChildren(...wanted.map(([value, text]) => make("option", { value, text })));
    this.beside.value = wanted.some(([value]) => value === before) ? before : SOURCE;
  }

  // [address, words of the corner] of what stands before; null for nothing.
  async other(evaluation, summary) {
    const { from, stem, to } = this.cell;
    const source = summary.sources.find((each) => each.style === from && each.stem === stem);
    if (this.beside.value === SOURCE) return source && source.file && to !== "" ? [this.url(evaluation, source.file), "source"] : null;
    const elsewhere = this.all.find((each) => each.name === this.beside.value);
    if (!elsewhere || !to) return null;
    const pair = pairOf(await this.summary(elsewhere), this.cell);
    return pair && pair.file ? [this.url(elsewhere, pair.file), when(elsewhere)] : null;
  }

  async large() {
    const evaluation = this.now();
    const summary = this.known.get(`${evaluation.name} ${evaluation.time}`);
    if (!summary) return;
    const sources = rowsOf(summary);
    const exists = ({ from, stem, to }) => {
      if (to) return pairOf(summary, { from, stem, to });
      const source = sources.find((each) => each.style === from && each.stem === stem);
      return source && (to === "" ? source : source.vae && { file: source.vae });
    };
    if (!this.cell || !exists(this.cell)) {
      const first = summary.pairs.find((pair) => pair.from !== pair.to) || summary.pairs[0];
      this.cell = first ? { from: first.from, stem: first.stem, to: first.to } : null;
    }
    this.view.hidden = !this.cell;
    for (const button of this.table.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.cell === JSON.stringify(this.cell)));
    if (!this.cell) return;
    const { cell } = this;
    const found = exists(cell);
    const row = sources.find((each) => each.style === cell.from && (!cell.stem || each.stem === cell.stem));
    const words = row ? row.words : cell.from;
    const other = await this.other(evaluation, summary).catch((error) => {
      say(this.status, error.message);
      return null;
    });
    if (cell !== this.cell || evaluation !== this.now()) return;
    const own = cell.to || (cell.to === null ? "VAE" : "source");
    this.put(this.after, this.url(evaluation, found.file), cell.to ? `${words} to ${cell.to}, ${when(evaluation)}` : `${words}, ${own}`);
    this.before.hidden = this.cutLabel.hidden = !other;
    this.pair.classList.toggle("kr-alone", !other);
    if (other) this.put(this.before, other[0], other[1] === "source" ? `${words}, the source` : `${words} to ${cell.to}, ${other[1]}`);
    say(this.beforeLabel, other ? other[1] : "");
    say(this.afterLabel, other && other[1] !== "source" ? when(evaluation) : own);
    say(this.title, cell.to ? `${words} to ${cell.to}` : `${words}, ${own}`);
    const measures = Object.entries(cell.to ? found.measures : {});
    this.numbers.replaceChildren(...measures.map(([name, value]) => make("div", {}, make("dt", { text: nameOf(name) }), make("dd", { text: figure(value, 3) }),
      (MEASURES[name] || [])[1] ? make("dd", { class: "kr-note", text: MEASURES[name][1] }) : null)));
  }

  put(image, source, alt) {
    if (image.getAttribute("src") !== source) image.setAttribute("src", source);
    image.alt = alt;
  }

  wipe() {
    const share = Number(this.cut.value);
    this.pair.style.setProperty("--kl-cut", `${share}%`);
    this.cut.setAttribute("aria-valuetext", `${share} % before, ${100 - share} % after`);
  }
}
