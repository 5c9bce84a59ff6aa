// Where a run begins and on which GPUs: what Start would do, told while the form changes, the states that resume can name, and the GPUs of
// the studio's machine. Talks with the routes of kohya_like/tabs/train.py.

import { t, translated } from "../common/language.js";
import { make, say } from "../common/page.js";
import { ask, post } from "../common/studio.js";
import { runWords } from "../common/words.js";
import { onChange, values } from "./settings.js";

const TYPING_SECONDS = 0.6;
const REFRESH_SECONDS = 30;

// ---- what Start would do

const lines = new Set(); // functions that show what was foreseen
const NOTHING = { kind: "", text: "", notes: [], offers: [], base: "" };
let foreseen = NOTHING;
let timer = 0;
let asked = 0;

async function look() {
  clearTimeout(timer);
  const turn = ++asked;
  try {
    const answer = await post("/kl/train/foresight", { form: values() });
    // A later question is on its way.
    if (turn !== asked) return;
    foreseen = answer;
  } catch (error) {
    console.info("What Start would do is not known:", error.message);
    foreseen = NOTHING;
  }
  lines.forEach((show) => show());
}

export function foresee(seconds = TYPING_SECONDS) {
  clearTimeout(timer);
  // A page without the Train tab has nothing to start.
  if (!lines.size) return;
  timer = setTimeout(look, 1000 * seconds);
}

// A state grows older, and a run ends, while nobody types.
setInterval(() => !document.hidden && foreseen.kind && foresee(0), 1000 * REFRESH_SECONDS);
addEventListener("focus", () => foresee(0));
onChange(() => foresee());

function line(more) {
  const text = make("p", { class: "kl-foreseen", role: "status" });
  const notes = make("div", {});
  const show = () => {
    say(text, translated(foreseen.text));
    text.className = `kl-foreseen${foreseen.kind ? ` kl-foreseen-${foreseen.kind.replace(" ", "-")}` : ""}`;
    notes.replaceChildren(...(more ? foreseen.notes.map((note) => make("p", { class: "kl-note", text: translated(note) })) : []));
  };
  lines.add(show);
  show();
  return [text, notes];
}

// What is known of the base model: its licence, and what a model of few steps wants.
export function aboutBase() {
  const text = make("p", { class: "kl-note kl-base" });
  const show = () => {
    say(text, translated(foreseen.base));
    text.hidden = !foreseen.base;
  };
  lines.add(show);
  show();
  return text;
}

export function foresight({ root }) {
  root.append(...line(false), aboutBase());
  foresee();
}

// ---- resume

const WORDS = { auto: t`auto: go on, or start a new run`, none: t`none: always a new run` };

export function startPicker({ spec, node, body, label, write }) {
  const picker = make("select", { id: `${node.id}-choice`, "aria-describedby": `${node.id}-help` });
  node.setAttribute("aria-label", t`${spec.label}: auto, none, a step, or a folder`);
  label.setAttribute("for", picker.id);
  const [text, notes] = line(true);
  let isWritten = false; // somebody wants to write a step or a folder
  // Said once: beside Start it is announced as well.
  text.removeAttribute("role");

  function show() {
    const groups = [...new Set(foreseen.offers.map((offer) => offer.run))].map((run) => make("optgroup", { label: runWords(run, foreseen.offers.find((offer) => offer.run === run).called) },
      ...foreseen.offers.filter((offer) => offer.run === run).map((offer) => make("option", { value: offer.path, text: t`step ${offer.step}, saved ${translated(offer.saved)}` }))));
    picker.replaceChildren(...Object.entries(WORDS).map(([value, words]) => make("option", { value, text: words })), ...groups,
      make("option", { value: "?", text: t`a step or a folder, written below` }));
    const listed = [...picker.options].some((option) => option.value === node.value);
    picker.value = listed && !isWritten ? node.value : "?";
    node.hidden = listed && !isWritten;
  }
  picker.addEventListener("change", () => {
    isWritten = picker.value === "?";
    if (!isWritten) write(picker.value);
    show();
    if (isWritten) {
      node.focus();
      node.select();
    }
  });
  lines.add(show);
  body.classList.add("kl-start-body");
  body.prepend(picker);
  body.after(text, notes);
  show();
  function set() {
    isWritten = false;
    show();
  }
  return { set, focus: () => (node.hidden ? picker : node).focus({ preventScroll: true }), get marked() { return node.hidden ? picker : node; } };
}

// ---- GPUs

let gpus = null; // what the studio says, asked once

export function gpuPicker({ node, body, write }) {
  const box = make("div", { class: "kl-gpus", role: "group", "aria-label": t`GPUs of this machine` });
  const note = make("p", { class: "kl-note" });
  node.placeholder = t`numbers or UUIDs`;
  const names = () => node.value.split(/[\s,]+/).filter(Boolean);
  const isOf = (gpu) => (name) => name === gpu.number || (gpu.uuid && gpu.uuid.toLowerCase().startsWith(name.toLowerCase()) && name.length > 4);

  // UUIDs, which stay when a machine numbers its GPUs anew; numbers where another entry is a number of no GPU here.
  function choose(gpu, isOn) {
    const others = names().filter((name) => !gpus.gpus.some((each) => isOf(each)(name)));
    const byNumber = others.some((name) => /^\d+$/.test(name)) || gpus.gpus.some((each) => !each.uuid);
    const on = gpus.gpus.filter((each) => (each === gpu ? isOn : names().some(isOf(each))));
    write([...on.map((each) => (byNumber ? each.number : each.uuid)), ...others].join(" "));
    show();
  }

  function show() {
    if (!gpus) return;
    for (const [index, gpu] of gpus.gpus.entries()) box.children[index].querySelector("input").checked = names().some(isOf(gpu));
  }

  function draw() {
    note.textContent = translated(gpus.problem);
    note.hidden = !gpus.problem;
    box.hidden = !gpus.gpus.length;
    box.replaceChildren(...gpus.gpus.map((gpu) => {
      const check = make("input", { type: "checkbox", id: `${node.id}-${gpu.number}` });
      check.addEventListener("change", () => choose(gpu, check.checked));
      const memory = gpu.memory_gib === null ? "" : `${Math.round(gpu.memory_gib)} GiB`;
      const words = [gpu.number, gpu.name, memory].filter(Boolean).join(" · ");
      return make("label", { class: "kl-gpu", for: check.id }, check, make("span", { text: words }), make("code", { text: gpu.uuid ? gpu.uuid.slice(0, 12) : "", title: gpu.uuid || null }));
    }));
    show();
  }

  node.addEventListener("input", show);
  body.before(box, note);
  box.hidden = note.hidden = true;
  if (gpus) draw();
  else {
    ask("/kl/train/gpus").then((answer) => {
      gpus = answer;
      draw();
    }).catch((error) => console.info("The GPUs are not known:", error.message));
  }
  return { set: show, focus: () => node.focus({ preventScroll: true }), marked: node };
}
