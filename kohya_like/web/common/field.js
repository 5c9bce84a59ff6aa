// Controls of the forms beside the Train tab's: one field of an option, and the place where it is said what is wrong with it.

import { inWords, t, translated } from "./language.js";
import { bring, make, rich } from "./page.js";

/**
 * The control of an option.
 * @param {import("../schema.js").Spec} spec
 * @param {string} ident its id
 * @returns {any} an input, a select or a textarea
 */
export function makeInput(spec, ident) {
  const common = { id: ident, name: spec.name, autocomplete: "off", spellcheck: "false", "aria-describedby": `${ident}-help` };
  if (spec.required) common["aria-required"] = "true";
  if (spec.control === "check") return make("input", { ...common, type: "checkbox" });
  if (spec.control === "select") {
    const node = make("select", common);
    if (spec.optional) node.append(make("option", { value: "", text: t`none` }));
    node.append(...spec.choices.map((choice) => make("option", { value: choice, text: choice })));
    return node;
  }
  if (spec.control === "lines" || spec.control === "area" || spec.control === "prompts") {
    const rows = spec.control === "lines" ? "2" : "3";
    return make("textarea", { ...common, rows, placeholder: spec.control === "lines" ? t`one a line` : null });
  }
  const node = make("input", { ...common, type: "text" });
  if (spec.control === "number") node.inputMode = /^-?\d+$/.test(spec.default) ? "numeric" : "decimal";
  if (spec.optional && !spec.unless) node.placeholder = t`none`;
  if (spec.control === "numbers") node.placeholder = t`numbers with spaces between them`;
  if (spec.suggestions) node.setAttribute("list", `${ident}-list`);
  return node;
}

export function shownDefault(spec) {
  if (spec.control === "check") return spec.default ? t`on` : t`off`;
  if (spec.default === " ") return t`a space`;
  return spec.default === "" ? (spec.optional ? t`none` : t`empty`) : spec.default.replace(/\n/g, ", ");
}

// A value of a setting in the tables of what changes.
export const shownText = (text) => ({ on: t`on`, off: t`off`, none: t`none` })[text] ?? text;

// Opens a list of the folders and files on the studio's computer, and writes what is chosen there. It is fetched when it is first used.
export function makeBrowse(spec, node) {
  const isNew = spec.name === "save_to";
  return make("button", { type: "button", class: "kl-button kl-browse", text: t`Browse`, "aria-label": t`Browse for ${translated(spec.label)}`, onclick: async () => {
    const { browse } = await import("../picking/browse.js");
    const last = node.value.trim().split("\n").pop();
    browse({ label: spec.label, option: spec.name, kind: isNew ? "folder" : spec.path, path: last }, (path) => {
      const slash = path.includes("\\") ? "\\" : "/";
      const file = last.split(/[\\/]/).pop();
      if (isNew) node.value = `${path}${path.endsWith(slash) ? "" : slash}${/\./.test(file) ? file : ""}`;
      else if (spec.control === "lines") node.value = [...node.value.split("\n").filter((line) => line.trim()), path].join("\n");
      else node.value = path;
      node.dispatchEvent(new Event("input", { bubbles: true }));
      node.focus();
    });
  } });
}

// edited() is called for each change. more: note, a sentence before the facts; beside and below, nodes next to the control and under it.
export function makeField(given, ident, edited, more = {}) {
  const spec = inWords(given);
  const isCheck = spec.control === "check";
  const node = makeInput(spec, ident);
  const facts = [spec.range, spec.required && !spec.default ? t`required` : t`default ${shownDefault(spec)}`].filter(Boolean).join(" · ");
  const help = make("p", { class: "kl-help", id: `${ident}-help` }, ...rich(`${spec.help} ${more.note || ""}`), make("span", { class: "kl-facts", text: facts }));
  const error = make("p", { class: "kl-error", id: `${ident}-error`, hidden: true });
  const label = make("label", { for: ident, text: spec.label });
  const head = make("div", { class: "kl-head" }, isCheck ? node : null, label, make("code", { text: spec.name }));
  const unit = spec.unit ? make("span", { class: "kl-unit", text: spec.unit }) : null;
  const body = isCheck ? null : make("div", { class: "kl-control" }, node, unit, ...(more.beside || []));
  if (spec.suggestions) body.append(make("datalist", { id: `${ident}-list` }, ...spec.suggestions.map((text) => make("option", { value: text }))));
  const clear = () => {
    error.hidden = true;
    node.removeAttribute("aria-invalid");
  };
  node.addEventListener(isCheck || spec.control === "select" ? "change" : "input", () => {
    clear();
    edited();
  });
  const wide = spec.path || spec.control === "lines" || spec.control === "area";
  return {
    root: make("div", { class: `kl-field${wide ? " kl-wide" : ""}` }, head, body, more.below || null, error, help),
    node, error, clear,
    read: () => (isCheck ? node.checked : node.value),
    set: (text) => (isCheck ? (node.checked = text === true) : (node.value = text)),
  };
}

// Puts each problem at its field, the others into `wrong`, and goes to the first. fields: option -> {node, error, clear}.
export function blame(fields, wrong, problems) {
  for (const field of fields.values()) field.clear();
  const loose = [];
  let first = null;
  for (const { option, message } of problems) {
    const field = fields.get(option);
    if (!field) {
      loose.push(translated(message));
      continue;
    }
    // That one is missing is said with its help, which stands below the field.
    const short = message.startsWith(`${option} is missing: `) ? t`This is required.` : translated(message).replace(`${option}: `, "");
    field.error.textContent = [field.error.hidden ? "" : field.error.textContent, short].filter(Boolean).join(" ");
    field.error.hidden = false;
    field.node.setAttribute("aria-invalid", "true");
    const fold = field.node.closest("details");
    if (fold) fold.open = true;
    first = first || field.node;
  }
  wrong.replaceChildren(...loose.map((text) => make("p", { text })));
  wrong.hidden = loose.length === 0;
  if (first) {
    // What is wrong stands below the field.
    first.focus({ preventScroll: true });
    (first.closest(".kl-field") || first).scrollIntoView({ block: "nearest" });
  } else if (loose.length) bring(wrong);
}

// A row of choices of which one holds: radio buttons, so that the arrow keys work.
export function makeChoice(legend, name, items, pick) {
  const radios = new Map();
  const labels = items.map(([value, text]) => {
    const radio = make("input", { type: "radio", name, id: `${name}-${value}`, value });
    radio.addEventListener("change", () => radio.checked && pick(value));
    radios.set(value, radio);
    return make("label", { class: "kl-option", for: radio.id }, radio, make("span", { text }));
  });
  const root = make("fieldset", { class: "kl-choice" }, make("legend", { text: legend }), make("div", { class: "kl-options" }, ...labels));
  return { root, radios };
}
