// Where the time of a step goes: its parts stacked over the steps, with what is in none of them on top.

import { listed, t } from "../common/language.js";
import { make, say } from "../common/page.js";
import { figure } from "../common/words.js";
import { Plot } from "./plot.js";

// Where a point holds the seconds: data_fetch, fwd_bwd, opt_step, step_total, and the last three on the clock of a GPU.
const CPU = 6;
const GPU = 10;
const LENGTH = 13;
// So few steps leave room for a line between the layers, which keeps them apart for those who do not see their colours.
const ROOMY = 200;
const PARTS = [
  ["data", t`waiting for data`],
  ["work", t`forward and backward`],
  ["optimizer", t`optimizer`],
  ["rest", t`the rest`],
];

function words(seconds) {
  return seconds < 1 ? t`${figure(1000 * seconds, 3)} ms` : t`${figure(seconds, 3)} s`;
}

// Rows [step, seconds of each part ...] of what the studio tells of the steps. A GPU has no clock for the data.
export function partsOf(points, onGpu) {
  const length = onGpu ? LENGTH : GPU;
  return points.filter((point) => point.length >= length).map((point) => {
    const told = onGpu ? [0, ...point.slice(GPU, LENGTH - 1)] : point.slice(CPU, GPU - 1);
    const total = point[length - 1];
    return [point[0], ...told, Math.max(0, total - told.reduce((sum, value) => sum + value, 0))];
  });
}

export class Times extends Plot {
  constructor(compact) {
    super(compact ? 170 : 220, t`Read the times at a step`, t`The times begin with the first step.`);
    this.onGpu = false;
    this.gpu = this.toggle(t`On the GPU's clock`, false, (on) => {
      this.onGpu = on;
      this.points = partsOf(this.source, on);
    });
    this.summary = make("summary");
    this.body = make("div", { class: "kr-curve" }, make("div", { class: "kr-curve-head" }, this.legend, this.toggles), this.stage, this.readout);
    this.root = make("details", { class: "kr-fold kr-times", hidden: true }, this.summary);
    // What nobody sees is not in the page; there it is drawn at once.
    this.root.addEventListener("toggle", () => (this.root.open ? this.root.append(this.body) : this.body.remove()));
  }

  update(points) {
    this.source = points;
    this.gpu.hidden = !points.some((point) => point.length === LENGTH);
    if (this.gpu.hidden) this.onGpu = false;
    this.points = partsOf(points, this.onGpu);
    this.root.hidden = this.points.length === 0;
    if (this.points.length) this.sum();
    if (this.body.isConnected) this.paint();
  }

  static total(row) {
    return row.slice(1).reduce((sum, value) => sum + value, 0);
  }

  // The later half in one line, which is read without opening the plot; the first step loads and compiles.
  sum() {
    const rows = this.points.slice(this.points.length >> 1);
    const sums = PARTS.map((part, place) => rows.reduce((sum, row) => sum + row[place + 1], 0));
    const all = sums.reduce((sum, value) => sum + value, 0) || 1;
    const shares = PARTS.map(([, name], place) => `${Math.round((100 * sums[place]) / all)} % ${name}`);
    say(this.summary, t`Time of a step: ${words(all / rows.length)}, ${listed(shares.slice(0, 3))}`);
  }

  describe(index) {
    const row = this.points[index];
    const parts = PARTS.map(([, name], place) => `${name} ${words(row[place + 1])}`);
    return t`Step ${row[0]}: ${words(Times.total(row))}; ${listed(this.onGpu ? parts.slice(1) : parts)}`;
  }

  figure() {
    const rows = this.points.length > 1 ? this.points : [this.points[0], [this.points[0][0] + 1, ...this.points[0].slice(1)]];
    const steps = rows.map(([step]) => step);
    const heap = (count) => rows.map((row) => row.slice(1, count + 1).reduce((sum, value) => sum + value, 0));
    const parts = PARTS.map(([kind, name], place) => ({ kind, words: name, steps, values: heap(place + 1), width: steps.length < ROOMY ? 1 : 0, filled: true })).slice(this.onGpu ? 1 : 0);
    // The highest is drawn first, and each lower one over it.
    return { lines: parts.reverse(), words: (value) => (value ? words(value) : "0"), range: (first, last) => [0, this.top(first, last)] };
  }

  // The first step, which loads and compiles, and other wild ones leave the image at the top.
  top(first, last) {
    const totals = this.points.filter(([step]) => step >= first && step <= last).map(Times.total).sort((a, b) => a - b);
    return 1.15 * totals[Math.floor(0.97 * (totals.length - 1))] || 1e-3;
  }
}
