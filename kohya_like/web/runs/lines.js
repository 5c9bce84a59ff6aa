// Named lines over the steps of a run, each of which can be left out: the parts of the loss, and what the evaluations measured.

import { phrased, t } from "../common/language.js";
import { make, say } from "../common/page.js";
import { figure } from "../common/words.js";
import { Plot } from "./plot.js";
import { smoothed } from "./scales.js";

const COLOURS = 8;
const DASHES = [undefined, [7, 4], [2, 4], [9, 4, 2, 4]];
const LABELS = {
  swd: t`style distance`, ssm: t`content difference`, flow: t`flow matching`, low: t`low-pass difference`, velocity: t`velocity`, velocity_tv: t`velocity variation`,
  unweighted: t`unweighted`, swd_target: t`SWD to the target style`, swd_ratio: t`share of the source's SWD`, ssm_source: t`content difference`, structure: t`structure`,
};

export class Lines extends Plot {
  // options: compact, title, about (what a screen reader calls the slider), smooth (whether values are noisy), open (from the start)
  constructor(options) {
    super(options.compact ? 170 : 220, options.about, t`Nothing was told yet.`);
    this.options = options;
    this.names = [];
    this.hidden = new Set();
    this.log = true;
    this.smooth = options.smooth;
    if (options.smooth) this.toggle(t`Smoothed`, true, (on) => (this.smooth = on));
    this.toggle(t`Log scale`, this.log, (on) => (this.log = on));
    this.chips = make("div", { class: "kr-toggles", role: "group", "aria-label": t`Lines of the plot: ${options.title}` });
    this.summary = make("summary");
    this.body = make("div", { class: "kr-curve" }, make("div", { class: "kr-curve-head" }, this.chips, this.toggles), this.stage, this.readout);
    this.root = make("details", { class: "kr-fold kr-lines-plot", hidden: true }, this.summary);
    // What nobody sees is not in the page; there it is drawn at once.
    this.root.addEventListener("toggle", () => (this.root.open ? this.root.append(this.body) : this.body.remove()));
  }

  reset() {
    this.take([], []);
    this.root.open = false;
    this.touched = false;
  }

  // rows: [step, a value or null for each name]. Opens the first time that there is something, if `open` says so.
  take(names, rows, open) {
    if (names.join() !== this.names.join()) this.name(names);
    this.points = rows;
    const columns = names.map((name, place) => rows.map((row) => row[place + 1]));
    this.raw = columns;
    this.means = this.options.smooth ? columns.map(smoothed) : columns;
    this.root.hidden = rows.length === 0 || names.length === 0;
    if (!this.root.hidden && open && !this.touched) {
      this.touched = true;
      this.root.open = true;
    }
    say(this.summary, [this.options.title, names.map((name, place) => [name, this.last(place)]).filter(([, value]) => value !== null)
      .map(([name, value]) => `${this.label(name)} ${figure(value, 3)}`).join(", ")].filter(Boolean).join(": "));
    if (this.body.isConnected) this.paint();
  }

  last(place) {
    const told = this.means[place].filter((value) => value !== null && value !== undefined);
    return told.length ? told[told.length - 1] : null;
  }

  label(name) {
    return LABELS[name] || name.replaceAll("_", " ");
  }

  name(names) {
    this.names = [...names];
    this.chips.replaceChildren(...names.map((name, place) => {
      const button = make("button", { type: "button", class: "kr-chip kr-key", style: `--kl-key: var(--kl-plot-line-${place % COLOURS})`, text: this.label(name), "aria-pressed": String(!this.hidden.has(name)) });
      button.addEventListener("click", () => {
        if (!this.hidden.delete(name)) this.hidden.add(name);
        button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
        this.paint();
      });
      return button;
    }));
  }

  // [name, place] of the lines that are shown.
  shown() {
    return this.names.map((name, place) => [name, place]).filter(([name]) => !this.hidden.has(name));
  }

  values(place) {
    return this.smooth ? this.means[place] : this.raw[place];
  }

  describe(index) {
    const told = this.shown().map(([name, place]) => [name, this.values(place)[index]]).filter(([, value]) => value !== null && value !== undefined);
    return t`Step ${this.points[index][0]}: ${phrased(told.map(([name, value]) => `${this.label(name)} ${figure(value)}`)) || t`nothing`}`;
  }

  figure() {
    const steps = this.points.map(([step]) => step);
    const lines = this.shown().map(([, place]) => ({ kind: `line-${place % COLOURS}`, steps, values: this.values(place), dash: DASHES[place % DASHES.length], dots: steps.length < 40 ? 6 : 0 }));
    return { lines, log: this.log };
  }
}
