// The GPUs of the machine under a run: use, memory, temperature and power of the last minutes, and a card for each where there are several.

import { html, render } from "../common/html.js";
import { listed, phrased, t, translated } from "../common/language.js";
import { make } from "../common/page.js";
import { grouped } from "../common/words.js";

const NOT_TOLD = t`not told`;
// A longer time between two readings is a hole: nobody looked, or the driver was silent.
const HOLE_SECONDS = 7;
const WIDTH = 300;
const HEIGHT = 40;

const of = (value, limit, unit) => (limit === null ? told(value, unit) : t`${grouped(value)} of ${told(limit, unit)}`);
const told = (value, unit) => (value === null ? NOT_TOLD : `${grouped(value)}\u00a0${unit}`);
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
  return count && count < gpu.numGpus ? t`${count} of ${gpu.numGpus} GPUs` : "";
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

// The pieces of a line between its holes. rows: [seconds ago, value or null], oldest first; the newest is at the right edge, and top at the top.
export function pieces(rows, top, seconds) {
  const found = [];
  let before = null;
  for (const [ago, value] of rows) {
    const isHole = before === null || before - ago > HOLE_SECONDS;
    before = value === null ? null : ago;
    if (value === null) continue;
    if (isHole) found.push([]);
    const level = Math.min(1, Math.max(0, value / top));
    found.at(-1).push(`${(WIDTH * (1 - ago / seconds)).toFixed(1)} ${(HEIGHT - 1 - (HEIGHT - 2) * level).toFixed(1)}`);
  }
  return found;
}

function spark({ label, unit, rows, top, seconds }) {
  const lines = pieces(rows, top, seconds);
  const place = (point) => point.split(" ")[0];
  const known = rows.map(([, value]) => value).filter((value) => value !== null);
  const range = known.length ? t`between ${Math.round(Math.min(...known))} and ${Math.round(largest(known))} ${unit}` : NOT_TOLD;
  return html`<svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" class="kr-spark" aria-label="${label} in the last ${Math.round(seconds / 60)} minutes: ${range}">
    <path class="kr-spark-area" d=${lines.map((line) => `M${place(line[0])} ${HEIGHT}L${line.join("L")}L${place(line.at(-1))} ${HEIGHT}Z`).join("")} />
    <path class="kr-spark-line" d=${lines.map((line) => `M${line.join("L")}`).join("")} />
  </svg>`;
}

// One reading of all GPUs together: its name, what is said now and below it, and how rows of the history become one value.
const CELLS = [
  {
    name: t`GPU use`,
    unit: "%",
    now: (gpu) => told(gpu.utilization, "%"),
    note: (gpu) => (gpu.numGpus > 1 ? t`mean of ${few(gpu, gpu.gpus.map((each) => each.utilization)) || gpu.numGpus}` : gpu.name),
    value: (gpus) => over(mean, gpus.map((each) => each[0])),
    top: () => 100,
  },
  {
    name: t`GPU memory`,
    unit: "%",
    now: (gpu) => told(gpu.memoryUsed, "GiB"),
    note: (gpu) => phrased([gpu.memoryTotal === null ? "" : t`of ${told(gpu.memoryTotal, "GiB")}`, few(gpu, gpu.gpus.map((each) => each.memoryUsed))]),
    value: (gpus) => over(mean, gpus.map((each) => each[1])),
    top: () => 100,
  },
  {
    name: t`Temperature`,
    unit: "°C",
    now: (gpu) => heat(gpu.temperature),
    note: (gpu) => (gpu.numGpus > 1 ? phrased([t`of the hottest`, few(gpu, gpu.gpus.map((each) => each.temperature))]) : ""),
    value: (gpus) => over(largest, gpus.map((each) => each[2])),
    top: () => 100,
  },
  {
    name: t`Power`,
    unit: "W",
    now: (gpu) => told(over((values) => Math.round(sum(values)), gpu.gpus.map((each) => each.power)), "W"),
    note: (gpu) => phrased([powerLimit(gpu) === null ? "" : t`of ${told(powerLimit(gpu), "W")}`, few(gpu, gpu.gpus.map((each) => each.power))]),
    value: (gpus) => over(sum, gpus.map((each) => each[3])),
    top: (gpu, values) => Math.max(powerLimit(gpu) || 0, over(largest, values) || 0) || 1,
  },
];

const row = (label, percent, text) => html`<div class="kr-gpu-row">
  <div class="kr-gpu-words"><span>${label}</span><span class="kr-gpu-figure">${text}</span></div>
  <div class=${percent === null ? "kr-gpu-bar kr-silent" : "kr-gpu-bar"} aria-hidden="true"><div style="width: ${percent ?? 0}%"></div></div>
</div>`;

// One GPU. rows: its use over the last minutes.
function card(gpu, isOfRun, rows, seconds) {
  const mine = over(sum, gpu.processes.map((each) => each.memory));
  const watts = gpu.power === null ? t`power not told` : of(Math.round(gpu.power), gpu.powerLimit === null ? null : Math.round(gpu.powerLimit), "W");
  return html`<li class="kr-gpu" key=${gpu.index} data-mine=${String(isOfRun)}>
    <div class="kr-gpu-head"><h4>${t`GPU`} ${gpu.index}</h4>
      <span class="kr-badge" data-state="running" hidden=${!isOfRun}>${mine === null ? t`This run` : t`This run, ${told(Number(mine.toFixed(1)), "GiB")}`}</span></div>
    <p class="kr-note">${gpu.name}</p>
    ${row(t`Memory`, gpu.memoryPercent, gpu.memoryUsed === null ? NOT_TOLD : of(gpu.memoryUsed, gpu.memoryTotal, "GiB"))}
    ${row(t`Use`, gpu.utilization, told(gpu.utilization, "%"))}
    ${spark({ label: t`Use of GPU ${gpu.index}`, unit: "%", rows, top: 100, seconds })}
    <p class="kr-gpu-about"><span class="kr-heat" data-warmth=${warmth(gpu.temperature)}>${gpu.temperature === null ? t`temperature not told` : heat(gpu.temperature)}</span> · ${watts}</p>
    <p class="kr-gpu-about">${[gpu.clock === null ? "" : told(gpu.clock, "MHz"), gpu.fan === null ? "" : t`fan ${told(gpu.fan, "%")}`].filter(Boolean).join(" · ")}</p>
  </li>`;
}

export class Gpus {
  constructor(compact) {
    this.isOpen = !compact && !matchMedia("(max-width: 800px)").matches;
    this.root = make("section", { class: "kr-gpus", "aria-label": t`GPUs`, hidden: true });
    this.reset();
  }

  reset() {
    this.moments = [];
    this.root.hidden = true;
  }

  // The time from which the history is still missing here.
  get since() {
    return this.moments.length ? this.moments.at(-1)[0] : 0;
  }

  update({ gpu, problem, history, history_seconds: seconds, of_run: ofRun }) {
    this.root.hidden = gpu.numGpus === 0 && !problem;
    this.moments.push(...(gpu.numGpus ? history : []));
    const now = this.since;
    this.moments = this.moments.filter(([time]) => now - time <= seconds);
    render([gpu.numGpus ? this.strip(gpu, seconds, now) : "", gpu.numGpus > 1 ? this.cards(gpu, ofRun, seconds, now) : "",
      html`<p class="kr-gpu-problem" hidden=${!problem} data-urgent=${String(gpu.numGpus > 0)}>${translated(problem)}</p>`], this.root);
  }

  strip(gpu, seconds, now) {
    return html`<dl class="kr-gpu-strip" key="strip">${CELLS.map(({ name, unit, now: figure, note, value, top }) => {
      const rows = this.moments.map(([time, gpus]) => [now - time, value(gpus)]);
      return html`<div class="kr-tile kr-gpu-cell"><dt>${name}</dt><dd class="kr-figure">${figure(gpu)}</dd><dd class="kr-note">${note(gpu)}</dd>
        <dd>${spark({ label: name, unit, rows, top: top(gpu, rows.map(([, each]) => each)), seconds })}</dd></div>`;
    })}</dl><p class="kr-note" key="caption">${t`The lines show the last ${Math.round(seconds / 60)} minutes.`}</p>`;
  }

  cards(gpu, ofRun, seconds, now) {
    const all = gpu.memoryUsed === null ? "" : t`, ${of(gpu.memoryUsed, gpu.memoryTotal, "GiB")} in use`;
    const mine = ofRun.length ? t`; this run uses ${ofRun.length === gpu.numGpus ? t`all` : listed(ofRun)}` : "";
    const use = (place) => this.moments.map(([time, gpus]) => [now - time, gpus[place] ? gpus[place][0] : null]);
    return html`<details class="kr-fold kr-gpu-fold" key="cards" open=${this.isOpen} onToggle=${(event) => (this.isOpen = event.currentTarget.open)}>
      <summary>${gpu.numGpus} ${t`GPUs`}${all}${mine}</summary>
      <ul class="kr-gpu-cards">${gpu.gpus.map((each, place) => card(each, ofRun.includes(each.index), use(place), seconds))}</ul>
    </details>`;
  }
}
