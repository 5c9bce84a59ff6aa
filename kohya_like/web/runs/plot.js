// A plot over the steps of a run: read with the pointer or the arrow keys, zoomed by dragging or with + and -. uPlot draws it, and is fetched
// for the first plot that has something to show. What is drawn is the affair of the heirs.

import { t } from "../common/language.js";
import { make, say } from "../common/page.js";
import { figure } from "../common/words.js";
import { limits, marks, nearest } from "./scales.js";

const NARROWEST_PIXELS = 60;
const STRIDES = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
/** @type {Promise<any> | null} */
let coming = null;
/** @type {any} */
let uPlot = null;

/**
 * One line of a plot. steps and values are of equal length; what is null is left out. kind names its colour, --kl-plot-KIND.
 * @typedef {{ kind: string, words?: string, steps: number[], values: (number | null)[], width?: number, dash?: number[], alpha?: number,
 *   dots?: number, hollow?: boolean, filled?: boolean, scale?: string, between?: [number[], number[]] }} Line
 */

/**
 * What a plot shows. range(first, last) gives the limits of its axis while these steps are seen.
 * @typedef {{ lines: Line[], log?: boolean, words?: (value: number) => string, range?: (first: number, last: number) => number[] }} Figure
 */

export class Plot {
  constructor(height, label, empty) {
    this.height = height;
    this.points = []; // rows that begin with their step
    this.cursor = null;
    this.chart = null;
    this.kept = ""; // what the chart was made for
    /** @type {[number, number]} the first and the last step that are seen */
    this.span = [0, 1];
    /** @type {Figure} */
    this.now = { lines: [] };
    this.slider = make("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": label, class: "kr-curve-slider" });
    this.slider.addEventListener("input", () => this.lead(Number(this.slider.value)));
    this.slider.addEventListener("blur", () => this.lead(null));
    this.slider.addEventListener("keydown", (event) => "+-".includes(event.key) && this.zoom(event.key === "+" ? 0.5 : 2));
    this.readout = make("output", { class: "kr-readout" });
    this.legend = make("div", { class: "kr-legend" });
    this.empty = make("p", { class: "kr-empty", text: empty });
    this.stage = make("div", { class: "kr-stage" }, this.slider, this.empty);
    this.stage.style.minHeight = `${height}px`;
    this.whole = make("button", { type: "button", class: "kr-chip", text: t`Whole run`, hidden: true, onclick: () => {
      this.chart.setData(this.chart.data);
      this.slider.focus();
    } });
    this.toggles = make("div", { class: "kr-toggles", role: "group", "aria-label": t`What the plot shows` }, this.whole);
    new ResizeObserver(() => this.paint()).observe(this.stage);
    new MutationObserver(() => this.chart && this.chart.redraw(false)).observe(document.body, { attributeFilter: ["class"] });
  }

  /**
   * A sentence about a point.
   * @param {number} _index
   * @returns {string}
   */
  describe(_index) {
    throw new Error("left to the heirs");
  }

  /** @returns {Figure} */
  figure() {
    throw new Error("left to the heirs");
  }

  toggle(label, on, change) {
    const button = make("button", { type: "button", class: "kr-chip", text: label, "aria-pressed": String(on) });
    button.addEventListener("click", () => {
      const now = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(now));
      change(now);
      this.paint();
    });
    this.whole.before(button);
    return button;
  }

  // ---- reading

  // Tells of a point; null is the last one, and nobody reads.
  point(index) {
    const last = this.points.length - 1;
    this.cursor = index === null ? null : Math.min(index, last);
    const shown = this.cursor ?? last;
    const words = last < 0 ? "" : this.describe(shown);
    say(this.readout, words);
    this.slider.max = String(Math.max(0, last));
    this.slider.value = String(Math.max(0, shown));
    this.slider.setAttribute("aria-valuetext", words);
  }

  // The keyboard reads a point, which is marked as if the pointer stood there.
  lead(index) {
    this.point(index);
    if (!this.chart) return;
    const left = this.cursor === null ? -10 : this.chart.valToPos(this.points[this.cursor][0], "x");
    this.chart.setCursor({ left, top: left < 0 ? -10 : 0 }, false);
  }

  zoom(factor) {
    const { min, max } = this.chart.scales.x;
    const [first, last] = [this.points[0][0], this.points.at(-1)[0]];
    const middle = this.points[this.cursor ?? this.points.length - 1][0];
    const width = Math.max(2, Math.min(last - first, factor * (max - min)));
    const left = Math.max(first, Math.min(last - width, middle - width / 2));
    this.chart.setScale("x", { min: left, max: left + width });
    this.lead(this.cursor);
  }

  // ---- drawing

  async paint() {
    const isSeen = this.points.length > 0 && this.stage.clientWidth >= NARROWEST_PIXELS;
    this.empty.hidden = this.points.length > 0;
    this.slider.hidden = this.points.length === 0;
    this.point(this.cursor);
    if (isSeen && !uPlot) {
      coming ??= import("../vendor/uplot/uPlot.esm.js");
      uPlot = (await coming).default;
      return this.paint();
    }
    if (isSeen) return this.draw(this.figure());
    if (this.chart) this.chart.destroy();
    this.chart = null;
    this.legend.replaceChildren();
  }

  draw(shown) {
    const { lines } = shown;
    const named = lines.filter(({ words }) => words);
    // Of layers the lowest is drawn last.
    const keys = (lines[0].filled ? named.reverse() : named).map(({ kind, words }) => make("span", { class: `kr-key kr-key-${kind}`, style: `--kl-key: var(--kl-plot-${kind})`, text: words }));
    this.legend.replaceChildren(...keys);
    this.now = shown;
    const data = uPlot.join(lines.flatMap(({ steps, values, between = [] }) => [values, ...between].map((each) => [steps, each])));
    // Another kind of figure is another chart. The steps that are seen stay, while more come too.
    const [min, max] = this.span;
    const isWhole = this.whole.hidden;
    const kept = JSON.stringify([Boolean(shown.log), lines.map(({ steps: _steps, values: _values, between, ...look }) => ({ ...look, hasBand: Boolean(between) }))]);
    if (!this.chart || kept !== this.kept) {
      if (this.chart) this.chart.destroy();
      this.chart = new uPlot(this.setup(shown), data, this.stage);
      this.chart.root.setAttribute("aria-hidden", "true");
    } else {
      this.chart.setData(data, isWhole);
      if (this.chart.width !== this.stage.clientWidth) this.chart.setSize({ width: this.stage.clientWidth, height: this.height });
    }
    this.kept = kept;
    if (!isWhole) this.chart.setScale("x", { min, max });
    if (document.activeElement === this.slider) this.lead(this.cursor);
  }

  // The values of the lines that are measured on the first axis, at the steps that are seen.
  seen(first, last) {
    return this.now.lines.filter(({ scale }) => !scale).flatMap(({ steps, values, between = [] }) =>
      [values, ...between].flatMap((each) => each.filter((value, place) => value !== null && value !== undefined && steps[place] >= first && steps[place] <= last)));
  }

  setup({ lines, log = false }) {
    const colour = (name) => () => getComputedStyle(this.stage).getPropertyValue(name).trim();
    const axis = { stroke: colour("--kl-plot-text"), font: `11.5px system-ui, sans-serif`, ticks: { show: false }, grid: { stroke: colour("--kl-plot-grid"), width: 1 } };
    const words = (value) => (this.now.words || ((each) => figure(each, 3)))(value);
    const series = [];
    const bands = [];
    for (const { kind, width = 2, dash, alpha = 1, dots = 0, hollow, filled, scale = "y", between } of lines) {
      const stroke = colour(filled ? "--kl-plot-surface" : `--kl-plot-${kind}`);
      const points = { show: dots > 0, size: dots, width: hollow ? 2 : 0, stroke, fill: hollow ? "transparent" : stroke };
      series.push({ scale, width, dash, alpha, stroke, points, spanGaps: true, ...(filled ? { fill: colour(`--kl-plot-${kind}`) } : {}) });
      if (!between) continue;
      bands.push({ series: [series.length + 2, series.length + 1], fill: colour(`--kl-plot-${kind}-band`) });
      series.push(...between.map(() => ({ scale, width: 0, points: { show: false } })));
    }
    const beside = lines.find(({ scale }) => scale);
    return {
      width: this.stage.clientWidth, height: this.height, padding: [10, beside ? 0 : 12, 0, 0], legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false }, points: { size: 8, width: 2 } },
      scales: {
        x: { time: false, range: (_chart, low, high) => (this.span = [low, Math.max(high, low + 1)]) },
        y: { distr: log ? 3 : 1, range: () => (this.now.range ? this.now.range(...this.span) : limits(this.seen(...this.span), log)) },
        ...(beside ? { [beside.scale]: { range: (_chart, _low, high) => [0, high / 0.96 || 1] } } : {}),
      },
      axes: [
        { ...axis, grid: { show: false }, incrs: STRIDES, size: 24, gap: 6, space: 60, values: (_chart, found) => found.map(String) },
        { ...axis, size: 52, gap: 8, splits: (_chart, _axis, low, high) => marks(low, high, this.height < 200 ? 4 : 5, log), filter: (_chart, found) => found, values: (_chart, found) => found.map(words) },
        ...(beside ? [{ ...axis, scale: beside.scale, side: 1, size: 52, grid: { show: false }, values: (_chart, found) => found.map((each) => figure(each, 2)) }] : []),
      ],
      series: [{}, ...series],
      bands,
      hooks: {
        setCursor: [(chart) => this.point(chart.cursor.idx === null || chart.cursor.idx === undefined ? null : nearest(this.points, chart.data[0][chart.cursor.idx]))],
        setScale: [(chart, name) => {
          if (name === "x") this.whole.hidden = chart.scales.x.min <= chart.data[0][0] && chart.scales.x.max >= chart.data[0].at(-1);
        }],
      },
    };
  }
}
