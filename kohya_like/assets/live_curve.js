// The curve of a run: loss raw and smoothed, validation, learning rate; read with the pointer or the arrow keys.
(() => {
  "use strict";
  const kl = (window.kl = window.kl || {});
  if (kl.live) return;

  const SVG = "http://www.w3.org/2000/svg";
  const { make, say, figure } = kl.tools;

  function draw(tag, attributes, parent) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    parent.append(node);
    return node;
  }

  class Curve {
    constructor(compact) {
      this.height = compact ? 190 : 260;
      this.points = [];
      this.validation = [];
      this.show = { raw: true, lr: false, log: false };
      this.cursor = null;
      this.svg = document.createElementNS(SVG, "svg");
      this.svg.setAttribute("aria-hidden", "true");
      this.slider = make("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Read the curve at a step", class: "kr-curve-slider" });
      this.slider.addEventListener("input", () => this.point(Number(this.slider.value)));
      this.slider.addEventListener("blur", () => this.point(null));
      this.readout = make("output", { class: "kr-readout" });
      this.legend = make("div", { class: "kr-legend" });
      this.empty = make("p", { class: "kr-empty", text: "The curve begins with the first step." });
      this.stage = make("div", { class: "kr-stage" }, this.svg, this.slider, this.empty);
      this.stage.addEventListener("pointermove", (event) => this.hover(event));
      this.stage.addEventListener("pointerleave", () => this.point(null));
      this.toggles = make("div", { class: "kr-toggles", role: "group", "aria-label": "What the curve shows" });
      for (const [name, label] of [["raw", "Raw"], ["lr", "Learning rate"], ["log", "Log scale"]]) {
        const button = make("button", { type: "button", class: "kr-chip", text: label, "aria-pressed": String(this.show[name]) });
        button.addEventListener("click", () => {
          this.show[name] = !this.show[name];
          button.setAttribute("aria-pressed", String(this.show[name]));
          this.paint();
        });
        this.toggles.append(button);
      }
      this.root = make(
        "section",
        { class: "kr-curve", "aria-label": "Loss" },
        make("div", { class: "kr-curve-head" }, make("h3", { text: "Loss" }), this.legend, this.toggles),
        this.stage,
        this.readout,
      );
      new ResizeObserver(() => this.paint()).observe(this.stage);
    }

    update(answer, fresh) {
      if (fresh) this.points = [];
      const changed = fresh || answer.points.length > 1 || answer.first === 0 || answer.validation;
      this.points.length = Math.min(this.points.length, answer.first);
      this.points.push(...answer.points);
      if (answer.validation) this.validation = answer.validation;
      if (changed) this.paint();
    }

    hover(event) {
      if (!this.scale) return;
      const x = event.clientX - this.stage.getBoundingClientRect().left;
      const step = this.scale.stepAt(x);
      let low = 0;
      let high = this.points.length - 1;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (this.points[middle][0] < step) low = middle + 1;
        else high = middle;
      }
      const nearer = low > 0 && step - this.points[low - 1][0] < this.points[low][0] - step ? low - 1 : low;
      this.point(nearer);
    }

    point(index) {
      this.cursor = index;
      this.paintCursor();
    }

    describe(index) {
      const [step, loss, low, high, smooth, lr] = this.points[index];
      const spread = high > low ? ` (${figure(low)} to ${figure(high)})` : "";
      return `Step ${step}: loss ${figure(loss)}${spread}, smoothed ${figure(smooth)}, learning rate ${figure(lr)}`;
    }

    paintCursor() {
      const last = this.points.length - 1;
      const index = this.cursor === null ? last : Math.min(this.cursor, last);
      say(this.readout, last < 0 ? "" : this.describe(index));
      this.slider.max = String(Math.max(0, last));
      if (this.cursor === null) this.slider.value = String(Math.max(0, last));
      else this.slider.value = String(index);
      if (last >= 0) this.slider.setAttribute("aria-valuetext", this.describe(index));
      if (!this.mark) return;
      const on = this.cursor !== null && last >= 0;
      this.mark.style.display = on ? "" : "none";
      if (on) {
        const [step, , , , smooth] = this.points[index];
        this.mark.setAttribute("transform", `translate(${this.scale.x(step)} 0)`);
        this.mark.lastChild.setAttribute("cy", this.scale.y(smooth));
      }
    }

    limits(top) {
      const values = [];
      const every = Math.max(1, Math.floor(this.points.length / 2000));
      this.points.forEach((point, index) => {
        if (index % every) return;
        values.push(point[4]);
        if (this.show.raw) values.push(point[2], point[3]);
      });
      for (const [, loss] of this.validation) values.push(loss);
      values.sort((a, b) => a - b);
      // One wild step must not flatten all others; it leaves the picture at the top.
      let low = values[Math.floor(0.002 * (values.length - 1))];
      let high = values[Math.ceil(0.995 * (values.length - 1))];
      if (this.show.log) {
        low = Math.max(low, 1e-8);
        high = Math.max(high, low * 1.01);
        const pad = 0.05 * Math.log(high / low);
        return [low * Math.exp(-pad), high * Math.exp(pad)];
      }
      const pad = 0.06 * (high - low) || 0.1 * Math.abs(high) || 0.1;
      return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
    }

    ticks(low, high, count) {
      if (this.show.log && high / low > 8) {
        const found = [];
        for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
          for (const digit of high / low > 200 ? [1] : [1, 2, 5]) {
            const value = digit * 10 ** power;
            if (value >= low && value <= high) found.push(value);
          }
        }
        return found;
      }
      return round(low, high, count);
    }

    paint() {
      const width = this.stage.clientWidth;
      this.empty.hidden = this.points.length > 0;
      this.slider.hidden = this.points.length === 0;
      this.svg.replaceChildren();
      this.mark = null;
      if (!this.points.length || width < 60) {
        this.paintCursor();
        return;
      }
      const height = this.height;
      const box = { left: 52, right: width - (this.show.lr ? 52 : 12), top: 10, bottom: height - 24 };
      const [low, high] = this.limits();
      const first = Math.min(this.points[0][0], this.validation.length ? this.validation[0][0] : Infinity);
      const last = Math.max(this.points[this.points.length - 1][0], first + 1);
      const position = this.show.log ? (value) => Math.log(Math.max(value, 1e-12) / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
      this.scale = {
        x: (step) => box.left + ((step - first) / (last - first)) * (box.right - box.left),
        y: (value) => box.bottom - Math.max(-0.5, Math.min(1.5, position(value))) * (box.bottom - box.top),
        stepAt: (x) => first + ((x - box.left) / (box.right - box.left)) * (last - first),
      };
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.setAttribute("width", width);
      this.svg.setAttribute("height", height);
      this.axes(box, low, high, first, last);
      this.lines(box);
      this.explain();
      this.mark = draw("g", { class: "kr-mark" }, this.svg);
      draw("line", { x1: 0, x2: 0, y1: box.top, y2: box.bottom }, this.mark);
      draw("circle", { cx: 0, cy: 0, r: 4 }, this.mark);
      this.paintCursor();
    }

    explain() {
      const shown = [["smooth", "smoothed"]];
      if (this.show.raw) shown.unshift(["raw", "raw"]);
      if (this.validation.length) shown.push(["validation", "validation"]);
      if (this.show.lr) shown.push(["lr", "learning rate"]);
      this.legend.replaceChildren(...shown.map(([kind, text]) => make("span", { class: `kr-key kr-key-${kind}`, text })));
    }

    axes(box, low, high, first, last) {
      for (const value of this.ticks(low, high, 5)) {
        const y = this.scale.y(value);
        draw("line", { class: "kr-grid", x1: box.left, x2: box.right, y1: y, y2: y }, this.svg);
        draw("text", { class: "kr-tick", x: box.left - 8, y: y + 4, "text-anchor": "end" }, this.svg).textContent = figure(value, 3);
      }
      for (const value of round(first, last, Math.max(2, Math.floor((box.right - box.left) / 90)))) {
        if (value !== Math.round(value)) continue;
        draw("text", { class: "kr-tick", x: this.scale.x(value), y: box.bottom + 17, "text-anchor": "middle" }, this.svg).textContent = String(value);
      }
    }

    lines(box) {
      const clip = `kr-clip-${(Curve.count = (Curve.count || 0) + 1)}`;
      const shape = draw("clipPath", { id: clip }, draw("defs", {}, this.svg));
      draw("rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top }, shape);
      const inside = draw("g", { "clip-path": `url(#${clip})` }, this.svg);
      const { x, y } = this.scale;
      const path = (rows) => "M" + rows.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L");
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
      if (this.validation.length > 1) draw("path", { class: "kr-line kr-validation", d: path(this.validation.map(([step, loss]) => [x(step), y(loss)])) }, inside);
      for (const [step, loss] of this.validation) {
        const dot = draw("circle", { class: "kr-dot kr-validation", cx: x(step), cy: y(loss), r: 4 }, inside);
        draw("title", {}, dot).textContent = `Validation at step ${step}: ${figure(loss)}`;
      }
    }
  }

  // Round numbers between two limits, about `count` of them.
  function round(low, high, count) {
    const rough = (high - low) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const stride = [1, 2, 5, 10].map((digit) => digit * power).find((value) => value >= rough) || power;
    const found = [];
    for (let value = Math.ceil(low / stride) * stride; value <= high + 1e-9 * stride; value += stride) found.push(Number(value.toPrecision(10)));
    return found;
  }

  kl.Curve = Curve;
})();
