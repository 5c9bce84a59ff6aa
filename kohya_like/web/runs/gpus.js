// The GPUs of the machine under a run: use, memory, temperature and power of the last minutes, and a card for each where there are several.

import { make, say } from "../common/page.js";

const SVG = "http://www.w3.org/2000/svg";
const NOT_TOLD = "not told";
// A longer time between two readings is a hole: nobody looked, or the driver was silent.
const HOLE_SECONDS = 7;
const WIDTH = 300;
const HEIGHT = 40;

const of = (value, limit, unit) => (limit === null ? told(value, unit) : `${value.toLocaleString()} of ${told(limit, unit)}`);
const told = (value, unit) => (value === null ? NOT_TOLD : `${value.toLocaleString()}\u00a0${unit}`);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const largest = (values) => Math.max(...values);

export function over(combine, values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? combine(known) : null;
}

// Of how many GPUs a reading is, where some keep silent.
export function few(gpu, values) {
  const count = values.filter((value) => value !== null).length;
  return count && count < gpu.numGpus ? `${count} of ${gpu.numGpus} GPUs` : "";
}

// The limits of the GPUs whose power is told, as long as each has one.
export function powerLimit(gpu) {
  const limits = gpu.gpus.filter((each) => each.power !== null).map((each) => each.powerLimit);
  return limits.length && !limits.includes(null) ? Math.round(sum(limits)) : null;
}

function warmth(celsius) {
  if (celsius === null) return "";
  return celsius < 60 ? "cool" : celsius < 80 ? "warm" : "hot";
}

export function heat(celsius) {
  return celsius === null ? NOT_TOLD : `${told(celsius, "°C")}, ${warmth(celsius)}`;
}

// A line over the last minutes; the newest reading is at the right edge.
class Spark {
  constructor(label, unit) {
    this.label = label;
    this.unit = unit;
    this.svg = document.createElementNS(SVG, "svg");
    for (const [name, value] of [["viewBox", `0 0 ${WIDTH} ${HEIGHT}`], ["preserveAspectRatio", "none"], ["role", "img"], ["class", "kr-spark"]]) {
      this.svg.setAttribute(name, value);
    }
    this.area = document.createElementNS(SVG, "path");
    this.area.setAttribute("class", "kr-spark-area");
    this.line = document.createElementNS(SVG, "path");
    this.line.setAttribute("class", "kr-spark-line");
    this.svg.append(this.area, this.line);
  }

  // rows: [seconds ago, value or null], oldest first; drawn between 0 and top
  draw(rows, top, seconds) {
    let line = "";
    let area = "";
    let piece = [];
    let before = null;
    const close = () => {
      if (piece.length) area += `M${piece[0][0]} ${HEIGHT}L${piece.map((point) => point.join(" ")).join("L")}L${piece[piece.length - 1][0]} ${HEIGHT}Z`;
      piece = [];
    };
    for (const [ago, value] of rows) {
      if (value === null || (before !== null && before - ago > HOLE_SECONDS)) close();
      before = ago;
      if (value === null) continue;
      const point = [(WIDTH * (1 - ago / seconds)).toFixed(1), (HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, Math.max(0, value / top))).toFixed(1)];
      line += `${piece.length ? "L" : "M"}${point[0]} ${point[1]}`;
      piece.push(point);
    }
    close();
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
    const values = rows.map(([, value]) => value).filter((value) => value !== null);
    const range = values.length ? `between ${Math.round(Math.min(...values))} and ${Math.round(largest(values))} ${this.unit}` : NOT_TOLD;
    this.svg.setAttribute("aria-label", `${this.label} in the last ${Math.round(seconds / 60)} minutes: ${range}`);
  }
}

// One reading of all GPUs together: its name, what is said now and below it, and how rows of the history become one value.
const CELLS = [
  {
    name: "GPU use",
    unit: "%",
    now: (gpu) => told(gpu.utilization, "%"),
    note: (gpu) => (gpu.numGpus > 1 ? `mean of ${few(gpu, gpu.gpus.map((each) => each.utilization)) || gpu.numGpus}` : gpu.name),
    value: (gpus) => over(mean, gpus.map((each) => each[0])),
    top: () => 100,
  },
  {
    name: "GPU memory",
    unit: "%",
    now: (gpu) => told(gpu.memoryUsed, "GiB"),
    note: (gpu) => [gpu.memoryTotal === null ? "" : `of ${told(gpu.memoryTotal, "GiB")}`, few(gpu, gpu.gpus.map((each) => each.memoryUsed))].filter(Boolean).join(", "),
    value: (gpus) => over(mean, gpus.map((each) => each[1])),
    top: () => 100,
  },
  {
    name: "Temperature",
    unit: "°C",
    now: (gpu) => heat(gpu.temperature),
    note: (gpu) => (gpu.numGpus > 1 ? ["of the hottest", few(gpu, gpu.gpus.map((each) => each.temperature))].filter(Boolean).join(", ") : ""),
    value: (gpus) => over(largest, gpus.map((each) => each[2])),
    top: () => 100,
  },
  {
    name: "Power",
    unit: "W",
    now: (gpu) => told(over((values) => Math.round(sum(values)), gpu.gpus.map((each) => each.power)), "W"),
    note: (gpu) => [powerLimit(gpu) === null ? "" : `of ${told(powerLimit(gpu), "W")}`, few(gpu, gpu.gpus.map((each) => each.power))].filter(Boolean).join(", "),
    value: (gpus) => over(sum, gpus.map((each) => each[3])),
    top: (gpu, values) => Math.max(powerLimit(gpu) || 0, over(largest, values) || 0) || 1,
  },
];

class Card {
  constructor(index) {
    this.title = make("h4", { text: `GPU ${index}` });
    this.mine = make("span", { class: "kr-badge", "data-state": "running", text: "" });
    this.name = make("p", { class: "kr-note" });
    this.memory = this.row("Memory");
    this.use = this.row("Use");
    this.spark = new Spark(`Use of GPU ${index}`, "%");
    this.heat = make("span", { class: "kr-heat" });
    this.power = make("span");
    this.about = make("p", { class: "kr-gpu-about" });
    this.root = make(
      "li",
      { class: "kr-gpu" },
      make("div", { class: "kr-gpu-head" }, this.title, this.mine),
      this.name,
      this.memory.root,
      this.use.root,
      this.spark.svg,
      make("p", { class: "kr-gpu-about" }, this.heat, " · ", this.power),
      this.about,
    );
  }

  row(label) {
    const text = make("span", { class: "kr-gpu-figure" });
    const bar = make("div", { class: "kr-gpu-bar", "aria-hidden": "true" }, make("div"));
    return { text, bar, root: make("div", { class: "kr-gpu-row" }, make("div", { class: "kr-gpu-words" }, make("span", { text: label }), text), bar) };
  }

  fill(row, percent, text) {
    say(row.text, text);
    row.bar.firstChild.style.width = `${percent === null ? 0 : percent}%`;
    row.bar.classList.toggle("kr-silent", percent === null);
  }

  update(gpu, ofRun, rows, seconds) {
    this.root.dataset.mine = String(ofRun);
    this.mine.hidden = !ofRun;
    const mine = over(sum, gpu.processes.map((each) => each.memory));
    say(this.mine, mine === null ? "This run" : `This run, ${told(Number(mine.toFixed(1)), "GiB")}`);
    say(this.name, gpu.name);
    this.fill(this.memory, gpu.memoryPercent, gpu.memoryUsed === null ? NOT_TOLD : of(gpu.memoryUsed, gpu.memoryTotal, "GiB"));
    this.fill(this.use, gpu.utilization, told(gpu.utilization, "%"));
    this.spark.draw(rows, 100, seconds);
    this.heat.dataset.warmth = warmth(gpu.temperature);
    say(this.heat, gpu.temperature === null ? "temperature not told" : heat(gpu.temperature));
    say(this.power, gpu.power === null ? "power not told" : of(Math.round(gpu.power), gpu.powerLimit === null ? null : Math.round(gpu.powerLimit), "W"));
    const more = [gpu.clock === null ? "" : told(gpu.clock, "MHz"), gpu.fan === null ? "" : `fan ${told(gpu.fan, "%")}`];
    say(this.about, more.filter(Boolean).join(" · "));
  }
}

export class Gpus {
  constructor(compact) {
    this.problem = make("p", { class: "kr-gpu-problem" });
    this.cells = CELLS.map((cell) => {
      const [figure, about, spark] = [make("dd", { class: "kr-figure" }), make("dd", { class: "kr-note" }), new Spark(cell.name, cell.unit)];
      return { ...cell, figure, about, spark, root: make("div", { class: "kr-tile kr-gpu-cell" }, make("dt", { text: cell.name }), figure, about, make("dd", {}, spark.svg)) };
    });
    this.strip = make("dl", { class: "kr-gpu-strip" }, ...this.cells.map((cell) => cell.root));
    this.caption = make("p", { class: "kr-note" });
    this.summary = make("summary");
    this.dealt = []; // one a GPU
    this.cards = make("ul", { class: "kr-gpu-cards" });
    this.fold = make("details", { class: "kr-fold kr-gpu-fold" }, this.summary, this.cards);
    this.fold.open = !compact && !matchMedia("(max-width: 800px)").matches;
    this.root = make("section", { class: "kr-gpus", "aria-label": "GPUs", hidden: true }, this.strip, this.caption, this.fold, this.problem);
    this.reset();
  }

  reset() {
    this.moments = [];
    this.root.hidden = true;
  }

  // The time from which the history is still missing here.
  get since() {
    return this.moments.length ? this.moments[this.moments.length - 1][0] : 0;
  }

  update(answer) {
    const { gpu, problem } = answer;
    this.root.hidden = gpu.numGpus === 0 && !problem;
    this.strip.hidden = this.caption.hidden = gpu.numGpus === 0;
    this.fold.hidden = gpu.numGpus < 2;
    this.problem.hidden = !problem;
    this.problem.dataset.urgent = String(gpu.numGpus > 0);
    say(this.problem, problem);
    if (gpu.numGpus === 0) return;
    this.moments.push(...answer.history);
    const seconds = answer.history_seconds;
    const now = this.since;
    say(this.caption, `The lines show the last ${Math.round(seconds / 60)} minutes.`);
    this.moments = this.moments.filter(([time]) => now - time <= seconds);
    for (const cell of this.cells) {
      say(cell.figure, cell.now(gpu));
      say(cell.about, cell.note(gpu));
      const rows = this.moments.map(([time, gpus]) => [now - time, cell.value(gpus)]);
      cell.spark.draw(rows, cell.top(gpu, rows.map(([, value]) => value)), seconds);
    }
    this.deal(gpu, answer.of_run, seconds, now);
  }

  deal(gpu, ofRun, seconds, now) {
    const all = gpu.memoryUsed === null ? "" : `, ${of(gpu.memoryUsed, gpu.memoryTotal, "GiB")} in use`;
    const mine = ofRun.length ? `; this run uses ${ofRun.length === gpu.numGpus ? "all" : ofRun.join(", ")}` : "";
    say(this.summary, `${gpu.numGpus} GPUs${all}${mine}`);
    if (gpu.numGpus < 2) return;
    for (const card of this.dealt.splice(gpu.numGpus)) card.root.remove();
    gpu.gpus.forEach((each, place) => {
      if (!this.dealt[place]) {
        this.dealt[place] = new Card(each.index);
        this.cards.append(this.dealt[place].root);
      }
      const rows = this.moments.map(([time, gpus]) => [now - time, gpus[place] ? gpus[place][0] : null]);
      this.dealt[place].update(each, ofRun.includes(each.index), rows, seconds);
    });
  }
}
