// The curve of a run: loss raw and smoothed, validation with its lowest point, learning rate.
(() => {
  "use strict";
  const kl = (window.kl = window.kl || {});
  if (kl.live) return;

  const { make, figure } = kl.tools;
  const { draw, path } = kl.svg;

  class Curve extends kl.Plot {
    constructor(compact) {
      super(compact ? 190 : 260, "Read the curve at a step", "The curve begins with the first step.");
      this.validation = [];
      this.show = { raw: true, lr: false, log: false };
      for (const [name, label] of [["raw", "Raw"], ["lr", "Learning rate"], ["log", "Log scale"]])
        this.toggle(label, this.show[name], (on) => (this.show[name] = on));
      this.root = make(
        "section",
        { class: "kr-curve", "aria-label": "Loss" },
        make("div", { class: "kr-curve-head" }, make("h3", { text: "Loss" }), this.legend, this.toggles),
        this.stage,
        this.readout,
      );
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
      const told = high > low ? `mean loss ${figure(loss)} (${figure(low)} to ${figure(high)})` : `loss ${figure(loss)}`;
      return `Step ${step}: ${told}, smoothed ${figure(smooth)}, learning rate ${figure(lr)}`;
    }

    limits() {
      const values = [];
      const every = Math.max(1, Math.floor(this.points.length / 2000));
      this.points.forEach((point, index) => {
        if (index % every) return;
        values.push(point[4]);
        if (this.show.raw) values.push(point[2], point[3]);
      });
      for (const [, loss] of this.validation) values.push(loss);
      return this.range(values, this.show.log);
    }

    draw() {
      const [low, high] = this.limits();
      const first = Math.min(this.points[0][0], this.validation.length ? this.validation[0][0] : Infinity);
      const last = this.points[this.points.length - 1][0];
      this.frame(first, last, this.position(low, high, this.show.log), this.show.lr ? 52 : 12);
      this.axes(this.ticks(low, high, 5, this.show.log), (value) => figure(value, 3));
      this.lines(this.inside());
      const shown = [["smooth", "smoothed"]];
      if (this.show.raw) shown.unshift(["raw", "raw"]);
      if (this.validation.length) shown.push(["validation", this.lowest().words]);
      if (this.show.lr) shown.push(["lr", "learning rate"]);
      this.explain(shown);
      return (index) => this.scale.y(this.points[index][4]);
    }

    // The lowest validation so far; with one there is nothing to compare.
    lowest() {
      const [step, loss] = this.validation.reduce((best, each) => (each[1] < best[1] ? each : best));
      return { step, loss, words: this.validation.length > 1 ? `validation, lowest ${figure(loss)} at step ${step}` : "validation" };
    }

    lines(inside) {
      const { box } = this;
      const { x, y } = this.scale;
      if (this.show.lr) {
        const top = Math.max(...this.points.map((point) => point[5])) || 1;
        const level = (rate) => box.bottom - (rate / top) * 0.96 * (box.bottom - box.top);
        draw("path", { class: "kr-line kr-lr", d: path(this.points.map((point) => [x(point[0]), level(point[5])])) }, inside);
        for (const share of [0, 0.5, 1]) {
          const label = draw("text", { class: "kr-tick", x: box.right + 8, y: level(share * top) + 4 }, this.svg);
          label.textContent = figure(share * top, 2);
        }
      }
      if (this.show.raw) {
        const rows = this.points.flatMap(([step, loss, low, high]) => (high > low ? [[x(step), y(low)], [x(step), y(high)]] : [[x(step), y(loss)]]));
        draw("path", { class: "kr-line kr-raw", d: path(rows) }, inside);
      }
      draw("path", { class: "kr-line kr-smooth", d: path(this.points.map((point) => [x(point[0]), y(point[4])])) }, inside);
      if (this.points.length === 1) draw("circle", { class: "kr-dot", cx: x(this.points[0][0]), cy: y(this.points[0][1]), r: 3 }, inside);
      if (!this.validation.length) return;
      if (this.validation.length > 1) draw("path", { class: "kr-line kr-validation", d: path(this.validation.map(([step, loss]) => [x(step), y(loss)])) }, inside);
      for (const [step, loss] of this.validation) {
        const dot = draw("circle", { class: "kr-dot kr-validation", cx: x(step), cy: y(loss), r: 4 }, inside);
        draw("title", {}, dot).textContent = `Validation at step ${step}: ${figure(loss)}`;
      }
      const { step, loss } = this.lowest();
      if (this.validation.length > 1) draw("circle", { class: "kr-best", cx: x(step), cy: y(loss), r: 7.5 }, inside);
    }
  }

  kl.Curve = Curve;
})();
