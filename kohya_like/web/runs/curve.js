// The curve of a run: loss raw and smoothed, validation with its lowest point, learning rate.

import { t } from "../common/language.js";
import { make } from "../common/page.js";
import { figure } from "../common/words.js";
import { Plot } from "./plot.js";

export class Curve extends Plot {
  constructor(compact) {
    super(compact ? 190 : 260, t`Read the curve at a step`, t`The curve begins with the first step.`);
    this.validation = [];
    this.show = { raw: true, lr: false, log: false };
    for (const [name, label] of Object.entries({ raw: t`Raw`, lr: t`Learning rate`, log: t`Log scale` })) this.toggle(label, this.show[name], (on) => (this.show[name] = on));
    const head = make("div", { class: "kr-curve-head" }, make("h3", { text: t`Loss` }), this.legend, this.toggles);
    this.root = make("section", { class: "kr-curve", "aria-label": t`Loss` }, head, this.stage, this.readout);
  }

  reset() {
    this.points = [];
    this.validation = [];
    this.cursor = null;
    this.paint();
  }

  update(answer, fresh) {
    if (fresh) this.points = [];
    const changed = fresh || answer.points.length > 1 || answer.first === 0 || answer.validation;
    this.points.length = Math.min(this.points.length, answer.first);
    this.points.push(...answer.points);
    if (answer.validation) this.validation = answer.validation;
    if (changed) this.paint();
  }

  describe(index) {
    const [step, loss, low, high, smooth, lr] = this.points[index];
    // A point of a long run is several lines of its log.
    const told = high > low ? t`mean loss ${figure(loss)} (${figure(low)} to ${figure(high)})` : t`loss ${figure(loss)}`;
    return t`Step ${step}: ${told}, smoothed ${figure(smooth)}, learning rate ${figure(lr)}`;
  }

  figure() {
    const column = (place) => this.points.map((point) => point[place]);
    const steps = column(0);
    const dots = steps.length === 1 ? 6 : 0;
    /** @type {import("./plot.js").Line[]} */
    const lines = [{ kind: "smooth", words: t`smoothed`, steps, values: column(4), width: 2.4, dots }];
    if (this.show.raw) lines.unshift({ kind: "raw", words: t`raw`, steps, values: column(1), width: 1, alpha: 0.45, between: [column(2), column(3)] });
    if (this.validation.length) {
      const { step, loss, words } = this.lowest();
      lines.push({ kind: "validation", words, steps: this.validation.map(([at]) => at), values: this.validation.map(([, value]) => value), width: 1.5, dots: 8 });
      if (this.validation.length > 1) lines.push({ kind: "validation", steps: [step], values: [loss], dots: 15, hollow: true });
    }
    if (this.show.lr) lines.push({ kind: "lr", words: t`learning rate`, steps, values: column(5), width: 1.5, dash: [5, 4], scale: "lr" });
    return { lines, log: this.show.log };
  }

  // The lowest validation so far; with one there is nothing to compare.
  lowest() {
    const [step, loss] = this.validation.reduce((best, each) => (each[1] < best[1] ? each : best));
    return { step, loss, words: this.validation.length > 1 ? t`validation, lowest ${figure(loss)} at step ${step}` : t`validation` };
  }
}
