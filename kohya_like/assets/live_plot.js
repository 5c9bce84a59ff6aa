// A plot over the steps of a run, read with the pointer or the arrow keys. What is drawn in it is the affair of its heirs.
(() => {
  "use strict";
  const kl = (window.kl = window.kl || {});
  if (kl.live) return;

  const SVG = "http://www.w3.org/2000/svg";
  const { make, say } = kl.tools;

  function draw(tag, attributes, parent) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    parent.append(node);
    return node;
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

  const path = (rows) => "M" + rows.map(([a, b]) => `${a.toFixed(1)} ${b.toFixed(1)}`).join("L");

  // Heirs have describe(index), a sentence about a point, and draw(), which calls frame() and lines() and gives the height at which a point
  // is marked. The step of a point stands first in it.
  class Plot {
    constructor(height, label, empty) {
      this.height = height;
      this.points = [];
      this.cursor = null;
      this.svg = document.createElementNS(SVG, "svg");
      this.svg.setAttribute("aria-hidden", "true");
      this.slider = make("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": label, class: "kr-curve-slider" });
      this.slider.addEventListener("input", () => this.point(Number(this.slider.value)));
      this.slider.addEventListener("blur", () => this.point(null));
      this.readout = make("output", { class: "kr-readout" });
      this.legend = make("div", { class: "kr-legend" });
      this.empty = make("p", { class: "kr-empty", text: empty });
      this.stage = make("div", { class: "kr-stage" }, this.svg, this.slider, this.empty);
      this.stage.addEventListener("pointermove", (event) => this.hover(event));
      this.stage.addEventListener("pointerleave", () => this.point(null));
      this.toggles = make("div", { class: "kr-toggles", role: "group", "aria-label": "What the plot shows" });
      new ResizeObserver(() => this.paint()).observe(this.stage);
    }

    toggle(label, on, change) {
      const button = make("button", { type: "button", class: "kr-chip", text: label, "aria-pressed": String(on) });
      button.addEventListener("click", () => {
        const now = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(now));
        change(now);
        this.paint();
      });
      this.toggles.append(button);
      return button;
    }

    hover(event) {
      if (!this.scale || !this.points.length) return;
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

    paintCursor() {
      const last = this.points.length - 1;
      const index = this.cursor === null ? last : Math.min(this.cursor, last);
      say(this.readout, last < 0 ? "" : this.describe(index));
      this.slider.max = String(Math.max(0, last));
      this.slider.value = String(Math.max(0, index));
      if (last >= 0) this.slider.setAttribute("aria-valuetext", this.describe(index));
      if (!this.mark) return;
      const on = this.cursor !== null && last >= 0;
      this.mark.style.display = on ? "" : "none";
      if (on) {
        this.mark.setAttribute("transform", `translate(${this.scale.x(this.points[index][0])} 0)`);
        this.mark.lastChild.setAttribute("cy", this.markAt(index));
      }
    }

    paint() {
      this.width = this.stage.clientWidth;
      this.empty.hidden = this.points.length > 0;
      this.slider.hidden = this.points.length === 0;
      this.svg.replaceChildren();
      this.legend.replaceChildren();
      this.mark = null;
      if (this.points.length && this.width >= 60) {
        this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
        this.svg.setAttribute("width", this.width);
        this.svg.setAttribute("height", this.height);
        this.markAt = this.draw();
        this.mark = draw("g", { class: "kr-mark" }, this.svg);
        draw("line", { x1: 0, x2: 0, y1: this.box.top, y2: this.box.bottom }, this.mark);
        draw("circle", { cx: 0, cy: 0, r: 4 }, this.mark);
      }
      this.paintCursor();
    }

    // Limits of an axis for values, with room at both ends: without the wildest of them, which must not flatten all others.
    range(values, log) {
      values.sort((a, b) => a - b);
      let low = values[Math.floor(0.002 * (values.length - 1))];
      let high = values[Math.ceil(0.995 * (values.length - 1))];
      if (log) {
        low = Math.max(low, 1e-8);
        high = Math.max(high, low * 1.01);
        const pad = 0.05 * Math.log(high / low);
        return [low * Math.exp(-pad), high * Math.exp(pad)];
      }
      const pad = 0.06 * (high - low) || 0.1 * Math.abs(high) || 0.1;
      return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
    }

    ticks(low, high, count, log) {
      if (log && high / low > 8) {
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

    // How high a value stands between two limits.
    position(low, high, log) {
      return log ? (value) => Math.log(Math.max(value, 1e-12) / low) / Math.log(high / low) : (value) => (value - low) / (high - low);
    }

    // The box and its scales: position(value) is 0 at the bottom and 1 at the top. Gives a group that is cut off at the box.
    frame(first, last, position, right = 12) {
      const box = (this.box = { left: 52, right: this.width - right, top: 10, bottom: this.height - 24 });
      const until = Math.max(last, first + 1);
      this.scale = {
        first,
        last: until,
        x: (step) => box.left + ((step - first) / (until - first)) * (box.right - box.left),
        y: (value) => box.bottom - Math.max(-0.5, Math.min(1.5, position(value))) * (box.bottom - box.top),
        stepAt: (x) => first + ((x - box.left) / (box.right - box.left)) * (until - first),
      };
    }

    axes(ticks, words) {
      const { box, scale } = this;
      for (const value of ticks) {
        const y = scale.y(value);
        draw("line", { class: "kr-grid", x1: box.left, x2: box.right, y1: y, y2: y }, this.svg);
        draw("text", { class: "kr-tick", x: box.left - 8, y: y + 4, "text-anchor": "end" }, this.svg).textContent = words(value);
      }
      for (const value of round(scale.first, scale.last, Math.max(2, Math.floor((box.right - box.left) / 90)))) {
        if (value !== Math.round(value)) continue;
        draw("text", { class: "kr-tick", x: scale.x(value), y: box.bottom + 17, "text-anchor": "middle" }, this.svg).textContent = String(value);
      }
    }

    inside() {
      const { box } = this;
      const clip = `kr-clip-${(Plot.count = (Plot.count || 0) + 1)}`;
      const shape = draw("clipPath", { id: clip }, draw("defs", {}, this.svg));
      draw("rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top }, shape);
      return draw("g", { "clip-path": `url(#${clip})` }, this.svg);
    }

    // rows: [kind, words]; the kind gives the colour.
    explain(rows) {
      this.legend.replaceChildren(...rows.map(([kind, text]) => make("span", { class: `kr-key kr-key-${kind}`, text })));
    }
  }

  Object.assign(kl, { Plot, svg: { draw, round, path } });
})();
