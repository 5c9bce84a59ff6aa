// Files that fill the form: opened, dropped on the page, or named by their path; and the report of what became of each of their keys.

import { makeBrowse } from "../common/field.js";
import { t, translated } from "../common/language.js";
import { copier, make, rich } from "../common/page.js";
import { plural } from "../common/words.js";
import { addImages, fill, goTo } from "./form.js";
import { openAs, openSettings } from "./opening.js";
import { nameOfPasted } from "./pasted.js";
import { current, fieldsOf, values } from "./settings.js";

const MAX_TEXT_BYTES = 1 << 20;
const MAX_HEADER_BYTES = 16 << 20;
const IMAGES = /\.(jpe?g|png|webp|bmp|gif|tiff?|avif|jxl|heic|heif|zip)$/i;
const VERDICTS = ["taken", "renamed", "not needed", "not supported", "unknown"];

// ---- reading

const base64 = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(String(reader.result).replace(/^[^,]*,/, ""));
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

// What the studio needs of a file. Of a .safetensors file that is its head, which says how long it is in its first 8 bytes; weights
// stay where they are. A file that is too large to be settings is refused by its size alone.
async function contentOf(file) {
  if (!/\.safetensors$/i.test(file.name)) {
    return { name: file.name, bytes: file.size, text: file.size > MAX_TEXT_BYTES ? "" : await file.text() };
  }
  const length = new DataView(await file.slice(0, 8).arrayBuffer());
  const head = length.byteLength === 8 ? 8 + Number(length.getBigUint64(0, true)) : 8;
  return { name: file.name, head, header: head > MAX_HEADER_BYTES ? "" : await base64(file.slice(0, head)) };
}

// ---- settings in a file

const opening = (name) => t`Opening ${name} …`;
const openFile = (file) => file && openSettings(contentOf(file), opening(file.name));

export function keep({ root, trigger }) {
  const picked = make("input", { type: "file", id: "kl-load", accept: ".toml,.json,.yaml,.yml,.safetensors,.sh,.bat,.cmd,.ps1,text/plain", class: "kl-file" });
  const path = make("input", { type: "text", id: "kl-load-path", placeholder: t`or a path on the studio's computer`, "aria-label": t`Path of a settings or LoRA file on the studio's computer`, autocomplete: "off", spellcheck: "false" });
  picked.addEventListener("change", () => {
    const [file] = picked.files;
    // Before anything is waited for: afterwards the next file may be in it already.
    picked.value = "";
    openFile(file);
  });
  const loadPath = () => path.value.trim() && openSettings({ where: path.value.trim() }, opening(path.value.trim()));
  path.addEventListener("keydown", (event) => event.key === "Enter" && loadPath());
  const about = t`Settings of this studio, of kohya's programs or of another trainer (TOML, JSON, YAML), a script with a command line, or a LoRA file: its header tells how it was trained. You may also drop it on this page, or paste its text or a command line.`;
  const keep = make("section", { class: "kl-card kl-keep", "aria-labelledby": "kl-keep" }, make("h2", { id: "kl-keep", text: t`Settings file` }),
    make("div", { class: "kl-row" },
      make("button", { type: "button", class: "kl-button", text: t`Save TOML`, onclick: () => trigger("save_file", {}) }),
      ...["sd-scripts", "ai-toolkit", "musubi-tuner", "OneTrainer"].map((program) => make("button", { type: "button", class: "kl-quiet", text: t`Save for ${program}`, onclick: () => trigger("save_file", { program }) })),
      make("span", { class: "kl-upload" }, picked, make("label", { for: "kl-load", class: "kl-button", text: t`Open a file` }))),
    make("div", { class: "kl-row" }, path, makeBrowse({ name: "settings", label: t`a settings or LoRA file`, path: "file" }, path), make("button", { type: "button", class: "kl-button", text: t`Open`, "aria-label": t`Open the file at this path`, onclick: loadPath })),
    make("p", { class: "kl-note", text: about }));
  const target = make("div", { class: "kl-drop", hidden: true, "aria-hidden": "true" }, make("p", { text: t`Drop images to add them, or settings to fill the form` }));
  root.append(keep, target);
  catchDrops(root, target);
  catchLines(root);
}

// The whole page takes the file while the Train tab is in front.
function catchDrops(root, target) {
  let leaving = 0;
  const concerns = (event) => root.offsetParent !== null && [...event.dataTransfer.types].includes("Files");
  const hide = () => (target.hidden = true);
  addEventListener("dragover", (event) => {
    if (!concerns(event)) return;
    event.preventDefault();
    target.hidden = false;
    // There is no event for a drag that ends elsewhere; while it goes on, this one comes every few hundred milliseconds.
    clearTimeout(leaving);
    leaving = setTimeout(hide, 800);
  });
  addEventListener("drop", (event) => {
    hide();
    // A field that takes images has taken it.
    if (event.defaultPrevented || !concerns(event)) return;
    event.preventDefault();
    const files = [...event.dataTransfer.files];
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
    if (files.length > 1 || IMAGES.test(files[0].name) || entries.some((entry) => entry.isDirectory)) addImages({ files, entries });
    else openFile(files[0]);
  });
}

// Settings, a command line, or a whole script, that are pasted anywhere but into a field fill the form as a file does.
function catchLines(root) {
  addEventListener("paste", (event) => {
    if (root.offsetParent === null || /** @type {Element} */ (event.target).closest?.("input, textarea, [contenteditable]")) return;
    const text = event.clipboardData.getData("text/plain");
    const name = nameOfPasted(text);
    if (!name) return;
    event.preventDefault();
    openSettings({ name, bytes: text.length, text }, opening(name));
  });
}

// ---- whose file it is

// asking: {name, programs}, of a file that several programs could own; a click answers.
export function showQuestion(box, asking) {
  box.hidden = !asking;
  if (!asking) return;
  const answer = (program) => {
    box.hidden = true;
    openAs(program, opening(asking.name));
  };
  box.replaceChildren(make("h2", { id: "kl-owner", text: t`Which program is ${asking.name} from?` }),
    make("p", { class: "kl-note", text: t`Its settings have the names that more than one of them uses.` }),
    make("div", { class: "kl-row" }, ...asking.programs.map((program) => make("button", { type: "button", class: "kl-button", text: program, onclick: () => answer(program) })),
      make("button", { type: "button", class: "kl-quiet", text: t`None of them`, onclick: () => showQuestion(box, null) })));
  box.focus();
}

// ---- the report

// Above the form: what of the file gave way to the rest of it.
function warn(conflicts) {
  document.querySelectorAll(".kl-conflicts").forEach((banner) => banner.remove());
  if (!conflicts.length) return;
  const banner = make("section", { class: "kl-card kl-conflicts", role: "alert", "aria-label": t`What gave way` }, make("h2", { text: t`What decides the result or the memory, and is different here` }),
    make("ul", {}, ...conflicts.map((text) => make("li", { text: translated(text) }))),
    make("button", { type: "button", class: "kl-quiet", text: t`Close`, "aria-label": t`Close the note on what gave way`, onclick: () => banner.remove() }));
  document.querySelector(".kl-main").prepend(banner);
  banner.scrollIntoView({ block: "nearest" });
}

// imported: {name, origin, label, rows: [{key, value, verdict, text}], missing: [{option, message}], conflicts: [text], further: whether it is
// a LoRA that can be trained further, path: where it lies, "" for a file of the browser's}
export function showImport(box, imported) {
  box.hidden = !imported;
  if (!imported) warn([]);
  if (!imported) return;
  const { name, origin, label, rows, missing, conflicts, further, path } = imported;
  const count = (verdict) => rows.filter((row) => row.verdict === verdict).length;
  const search = make("input", { type: "search", "aria-label": t`Search what was read`, placeholder: t`Search what was read`, autocomplete: "off" });
  const status = make("p", { class: "kl-status", role: "status" });
  const body = make("tbody");
  const buttons = VERDICTS.filter(count).map((verdict) => {
    const button = make("button", { type: "button", class: "kl-chip", "aria-pressed": "false", "data-verdict": verdict, text: `${translated(verdict)} ${count(verdict)}` });
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      sift();
    });
    return button;
  });
  const shown = () => {
    const pressed = buttons.filter((button) => button.getAttribute("aria-pressed") === "true").map((button) => button.dataset.verdict);
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const text = (row) => `${row.key} ${row.value} ${row.verdict} ${row.text}`.toLowerCase();
    return rows.filter((row) => (!pressed.length || pressed.includes(row.verdict)) && words.every((word) => text(row).includes(word)));
  };
  const sift = () => {
    const found = shown();
    status.textContent = found.length === rows.length ? "" : plural(found.length, "row", "rows");
    body.replaceChildren(...found.map((row) => make("tr", {}, make("th", { scope: "row" }, make("code", { text: row.key }), make("div", { class: "kl-value", text: row.value })),
      make("td", {}, make("div", { class: "kl-verdict", "data-verdict": row.verdict, text: translated(row.verdict) }), ...rich(translated(row.text))))));
  };
  search.addEventListener("input", sift);
  const known = new Set(fieldsOf(current.run).map((spec) => spec.name));
  const wanting = missing.map(({ option, message }) => make("li", {}, known.has(option)
    ? make("button", { type: "button", class: "kl-link", text: translated(message), onclick: () => goTo(option) }) : make("span", { text: translated(message) })));
  const all = () => [`${name}: ${origin}, ${label}`, ...missing.map(({ message }) => `missing\t${message}`),
    ...shown().map((row) => [row.verdict, row.key, row.value, row.text].join("\t"))].join("\n");
  const goOn = make("button", { type: "button", class: "kl-button", text: t`Continue training this LoRA`, onclick: () => {
    if (path) fill(current.run, { ...values().values, network_weights: path });
    goTo("network_weights");
  } });
  const close = make("button", { type: "button", class: "kl-quiet", text: t`Close`, "aria-label": t`Close the import report`, onclick: () => { box.hidden = true; document.getElementById("kl-load").focus(); } });
  box.replaceChildren(...[
    make("div", { class: "kl-row kl-between" }, make("h2", { id: "kl-imported", text: t`What became of ${name}` }), make("div", {}, copier(all, t`Copy the report`), close)),
    make("p", { class: "kl-note", text: `${translated(origin)}${origin.includes(label) ? "" : `, ${label}`}. ${t`Entries read: ${rows.length}.`}` }),
    further ? make("div", { class: "kl-row" }, goOn) : null,
    missing.length ? make("h3", { text: t`Missing, to be filled in by you` }) : null,
    missing.length ? make("ul", { class: "kl-missing" }, ...wanting) : null,
    make("div", { class: "kl-row" }, ...buttons, search), status,
    make("div", { class: "kl-scroll", tabindex: "0", role: "region", "aria-label": t`What became of each key` }, make("table", { class: "kl-table" },
      make("thead", {}, make("tr", {}, ...[t`In the file`, t`Here`].map((text) => make("th", { scope: "col", text })))), body)),
  ].filter(Boolean));
  sift();
  box.focus();
  warn(conflicts);
}
