// Memory of a GPU as bars against the card, and a plan that makes it fit: of the run in the form, and of drawing. What is asked answers in
// lines while the script measures.

import { shownText } from "./field.js";
import { language, phrased, t, translated } from "./language.js";
import { make } from "./page.js";
import { store, stored } from "./stored.js";
import { ask, headers, eachLine } from "./studio.js";

const GIB = 2 ** 30;
const SIZES = [8, 12, 16, 24, 32, 48, 80];
const CPU = "cpu";
const NAMES = {
  caching: t`Caching`, training: t`Training`, previews: t`Previews`,
  reading: t`Reading the prompt`, encoding: t`Reading images`, drawing: t`Drawing`, decoding: t`Decoding`,
};
// Parts of one kind have one colour, whatever phase they are in.
/** @type {[RegExp, number][]} */
const COLOURS = [
  [/^(base model|swap slots)$/, 1], [/^(adapter|trained weights|moving average)$/, 2], [/^(optimizer|gradients)$/, 3],
  [/^activations$/, 4], [/^(text encoders|VAE)$/, 5],
];
const colourOf = (name) => COLOURS.find(([pattern]) => pattern.test(name))?.[1] ?? 6;
// Of a small model there is something, too.
const gib = (bytes, digits = 1) => (bytes / GIB).toFixed(bytes > 0 && bytes < 0.1 * GIB ? 2 : digits);

/**
 * Puts the box into `root`.
 * @param {HTMLElement} root
 * @param {object} about
 * @param {string} about.prefix of the ids of its controls
 * @param {string} about.address that answers
 * @param {string} about.gpus the address that tells which GPUs there are
 * @param {(card: number | null, cpu: boolean) => object | null} about.order what is asked there; null where nothing can be asked yet
 * @param {(plan: any) => void} about.use takes over a plan
 * @param {boolean} about.mayCompute whether the CPU is a choice, which it is from the start where there is no GPU
 * @param {string} about.nothing what to say where no option makes it fit
 * @returns {{changed: () => void}} to be told that what is asked about has changed
 */
export function makeMemory(root, { prefix, address, gpus, order, use, mayCompute, nothing }) {
  let cards = [];
  let found = null; // the last answer
  let controller = null;

  const picker = make("select", { id: `${prefix}-memory-card`, "aria-label": t`Card to compare with` });
  const button = make("button", { type: "button", class: "kl-button", id: `${prefix}-estimate`, text: t`Estimate memory` });
  const status = make("p", { class: "kl-note kl-memory-status", role: "status" });
  const body = make("div", { class: "kl-memory-body" });
  const box = make("section", { class: "kl-card kl-memory", "aria-label": t`Memory` },
    make("div", { class: "kl-memory-head" }, button, make("label", { class: "kl-memory-on", for: picker.id }, make("span", { text: t`for` }), picker)), status, body);
  root.append(box);

  const card = () => Number(picker.value) || 0;
  const onCpu = () => picker.value === CPU;

  function list() {
    const first = cards[0] ? String(cards[0].memory_gib) : mayCompute ? CPU : "24";
    const wanted = picker.value || stored(`${prefix}.memory.card`) || first;
    const here = cards.filter((one) => one.memory_gib).map((one) => make("option", { value: String(one.memory_gib), text: `${one.name}, ${Math.round(one.memory_gib)} GB` }));
    const others = SIZES.map((size) => make("option", { value: String(size), text: t`a card of ${size} GB` }));
    const cpu = mayCompute ? [make("option", { value: CPU, text: t`the CPU of this machine` })] : [];
    picker.replaceChildren(...here, ...cpu, ...others);
    picker.value = wanted;
    if (!picker.value) picker.value = "24";
  }

  function bar(phase, scale) {
    const total = phase.bytes;
    const pieces = Object.entries(phase.parts).map(([name, size]) =>
      make("span", { class: `kl-memory-piece kl-memory-${colourOf(name)}`, style: `width:${(100 * size) / scale}%`, title: `${translated(name)}: ${gib(size, 2)} GiB` }));
    const spoken = phrased(Object.entries(phase.parts).map(([name, size]) => `${translated(name)} ${gib(size)}`));
    const line = make("span", { class: "kl-memory-limit", style: `left:${(100 * limit()) / scale}%` });
    return [make("span", { class: "kl-memory-name", text: NAMES[phase.name] || phase.name }),
      make("span", { class: "kl-memory-bar", role: "img", "aria-label": `${NAMES[phase.name] || phase.name}: ${spoken} GiB` }, ...pieces, line),
      make("span", { class: "kl-memory-total", text: `${gib(total)} GiB` })];
  }

  function legend(phases) {
    const sizes = new Map();
    for (const phase of phases) for (const [name, size] of Object.entries(phase.parts)) sizes.set(name, Math.max(size, sizes.get(name) || 0));
    const shown = [...sizes].filter(([, size]) => size > 0.05 * GIB).sort((one, two) => colourOf(one[0]) - colourOf(two[0]) || two[1] - one[1]);
    return make("ul", { class: "kl-memory-legend" }, ...shown.map(([name, size]) =>
      make("li", {}, make("i", { class: `kl-memory-${colourOf(name)}`, "aria-hidden": "true" }), make("span", { text: `${translated(name)} ${gib(size)}` }))));
  }

  const limit = () => (found.on_cpu ? found.forecast.host_there : card() * GIB);

  function ofHostRam(forecast, fits) {
    return fits ? t`Fits: ${gib(forecast.host)} of ${gib(forecast.host_there)} GiB of host RAM.` : t`Does not fit: ${gib(forecast.host)} GiB of host RAM are needed, and this machine has ${gib(forecast.host_there)}.`;
  }

  function draw() {
    body.replaceChildren();
    if (!found) return;
    const { forecast, plan } = found;
    const little = forecast.host > forecast.host_there;
    const fits = (found.on_cpu || forecast.on_card <= limit()) && !little;
    const scale = 1.04 * Math.max(limit(), ...forecast.phases.map((phase) => phase.bytes));
    const where = language === "de" ? NAMES[forecast.worst] : NAMES[forecast.worst].toLowerCase();
    const verdict = found.on_cpu ? ofHostRam(forecast, fits) : little && forecast.on_card <= limit()
      ? t`Fits the card, but needs ${gib(forecast.host)} GiB of host RAM, and this machine has ${gib(forecast.host_there)}.` : fits ? t`Fits: ${gib(forecast.on_card)} of ${Math.round(card())} GiB, most of it in ${where}.`
      : t`Does not fit: ${gib(forecast.on_card)} GiB are needed, most of it in ${where}, and the card has ${Math.round(card())}.`;
    body.append(make("p", { class: `kl-memory-verdict ${fits ? "kl-memory-fits" : "kl-memory-fails"}`, text: verdict }),
      make("div", { class: "kl-memory-bars" }, ...forecast.phases.flatMap((phase) => bar(phase, scale))), legend(forecast.phases));
    const more = forecast.published ? [t`Measured on the published structure of ${forecast.published}: the model is not on this disk, or does not describe itself.`] : [];
    more.push(...forecast.notes.map(translated));
    more.push(found.on_cpu ? t`The line is the host RAM of this machine. The bars are tensors; Python and its libraries take ${gib(forecast.host - forecast.bytes)} GiB besides.`
      : t`The line is the card. The bars are tensors; CUDA and gaps between tensors take ${gib(forecast.on_card - forecast.bytes)} GiB besides.`);
    body.append(...more.map((text) => make("p", { class: "kl-note", text })));
    if (plan && plan.card === Math.round(limit())) drawPlan(plan);
    else if (!fits && !found.on_cpu) body.append(make("div", { class: "kl-row" }, make("button", { type: "button", class: "kl-button kl-strong", id: `${prefix}-fit`, text: t`Make it fit`, onclick: () => estimate(card()) })));
  }

  function drawPlan(plan) {
    if (!plan.changes.length) {
      if (!plan.fits) body.append(make("p", { class: "kl-note", text: nothing }));
      return;
    }
    const result = `${plan.fits ? t`With these settings it fits` : t`These settings help, but are not enough`}: ${gib(plan.forecast.on_card)} GiB.`;
    const notes = plan.forecast.notes.map((note) => make("li", { text: translated(note) }));
    const costs = plan.steps.map((step) => make("li", { text: `${Object.keys(step.options).join(", ")}: ${gib(step.before)} → ${gib(step.after)} GiB; ${translated(step.cost)}` }));
    const rows = plan.changes.map((change) => make("tr", {}, make("th", { scope: "row", text: translated(change.label) }), make("td", { text: shownText(change.before) }), make("td", { text: shownText(change.after) })));
    const taken = () => {
      use(plan);
      found = { forecast: plan.forecast };
      status.textContent = t`The form has the settings of the plan now.`;
      draw();
      button.focus();
    };
    body.append(make("div", { class: "kl-memory-plan" }, make("h3", { text: result }),
      make("div", { class: "kl-scroll", tabindex: "0", role: "region", "aria-label": t`What the plan changes` }, make("table", { class: "kl-table" },
        make("thead", {}, make("tr", {}, ...[t`Setting`, t`Now`, t`Plan`].map((text) => make("th", { scope: "col", text })))), make("tbody", {}, ...rows))),
      make("ul", { class: "kl-memory-costs" }, ...costs, ...notes),
      make("div", { class: "kl-row" }, make("button", { type: "button", class: "kl-button kl-strong", id: `${prefix}-use-plan`, text: t`Use this plan`, onclick: taken }),
        make("button", { type: "button", class: "kl-quiet", text: t`Not now`, onclick: () => { found = { forecast: found.forecast }; draw(); button.focus(); } }))));
  }

  async function estimate(size) {
    const asked = order(onCpu() ? null : size || null, onCpu());
    if (!asked) return;
    if (controller) controller.abort();
    controller = new AbortController();
    const mine = controller;
    button.disabled = true;
    box.setAttribute("aria-busy", "true");
    status.textContent = t`Building the model without its weights …`;
    try {
      const response = await fetch(address, { method: "POST", headers: headers(), signal: mine.signal, body: JSON.stringify(asked) });
      await eachLine(response, hear);
    } catch (error) {
      if (mine.signal.aborted) return;
      status.textContent = translated(error.message);
    }
    button.disabled = false;
    box.removeAttribute("aria-busy");
  }

  function hear(said) {
    status.textContent = translated(said.say || said.problem || "");
    status.classList.toggle("kl-memory-problem", Boolean(said.problem));
    if (!said.forecast) return;
    found = said;
    draw();
  }

  button.addEventListener("click", () => estimate(null));
  picker.addEventListener("change", () => {
    store(`${prefix}.memory.card`, picker.value);
    if (found && Boolean(found.on_cpu) !== onCpu()) changed();
    draw();
  });
  function changed() {
    if (!found || controller === null || box.hasAttribute("aria-busy")) return;
    status.textContent = t`The form has changed since; estimate again.`;
  }

  list();
  ask(gpus).then((answer) => {
    cards = answer.gpus;
    list();
  }).catch((error) => console.info("The GPUs are not known:", error.message));
  return { changed };
}
