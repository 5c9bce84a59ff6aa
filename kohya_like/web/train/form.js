// The form of the Train tab: draws the options, keeps what the person types, searches, and shows what is wrong.

import schema from "../schema.js";
import { makeBrowse, makeInput, shownDefault } from "../common/field.js";
import { joined, language, listed, phrased, t, translated } from "../common/language.js";
import { find, findAll, make, rich, say } from "../common/page.js";
import { plural } from "../common/words.js";
import { promptRows } from "./prompts.js";
import {
  blocksIn, carry, condition, current, defaults, drafts, fieldsIn, fieldsOf, hindrance, isChanged, isGuest, isIdle, isShown, keyOf, needed, overruling, ownerOf, problems, save,
  saveSoon, specsOf, tell, turn, wanted, modeFor,
} from "./settings.js";
import { aboutBase, gpuPicker, startPicker } from "./starting.js";
import { withPoint, withPoints } from "./texts.js";
import { makeUndo } from "./undo.js";

export const views = new Map(); // group -> fieldset on the page
export const controls = new Map(); // option -> control on the page
const DATA = "train_data_dir";
const BASE = "pretrained_model_name_or_path";
const RATE = "learning_rate";
const filter = { words: [], changed: false, opened: null };
const special = { prompts: promptRows, start: startPicker, gpus: gpuPicker }; // kind of control -> how it is drawn

function publish(view) {
  view.props.value = { run: current.run, values: Object.fromEntries(fieldsIn(view.title).map((spec) => [spec.name, drafts[current.run][spec.name]])) };
}

function edit(spec, text) {
  drafts[current.run][spec.name] = text;
  const control = controls.get(spec.name);
  if (problems.delete(spec.name)) showProblem(spec.name);
  if (control) control.mark();
  const view = views.get(spec.group);
  if (view) {
    publish(view);
    view.count();
    countFolds(view);
  }
  if (needed.has(spec.name)) applyFilter();
  saveSoon();
  tell();
}

export function fill(key, texts) {
  if (!schema.runs[key]) return;
  const other = key !== current.run;
  const fresh = defaults(key);
  for (const spec of fieldsOf(key)) {
    const text = texts[spec.name];
    if (typeof text === typeof spec.default) fresh[spec.name] = text;
  }
  drafts[key] = fresh;
  const before = current.mode;
  turn(key, modeFor(key, fresh));
  refresh(other || current.mode !== before);
  save();
}

// The form as it was, with its kind of run and mode.
function bringBack(key, chosen, texts) {
  const redraw = key !== current.run || chosen !== current.mode;
  drafts[key] = { ...texts };
  turn(key, chosen);
  refresh(redraw);
  save();
}

function refresh(redraw) {
  for (const view of views.values()) {
    if (redraw || view.isStale()) view.draw();
    else for (const spec of view.specs) if (controls.has(spec.name)) controls.get(spec.name).set(drafts[current.run][spec.name]);
    publish(view);
    view.count();
  }
  for (const name of controls.keys()) showProblem(name);
  applyFilter();
  tell();
}

// Brings options on the page that the chosen mode leaves out, once they have a value or a problem.
export function showMore() {
  for (const view of views.values()) if (view.isStale()) view.draw();
  applyFilter();
}

export function choose(family, name) {
  // A family that has not the chosen mode brings its own first one.
  const has = (each) => Boolean(schema.runs[keyOf(family, each)]);
  const next = schema.modes.find((each) => each.name === name && has(each)) || schema.modes.find(has) || current.mode;
  const key = keyOf(family, next);
  if (!schema.runs[key] || (key === current.run && next === current.mode)) return;
  if (key !== current.run) carry(current.run, key);
  turn(key, next);
  refresh(true);
  save();
}

// Images from the computer in front of somebody become a data set on the studio's, whose folder the form then has. given: what was dropped.
export async function addImages(given = { entries: [], files: [] }) {
  const { gather } = await import("../picking/images.js");
  gather(given, drafts[current.run][DATA], (folder) => {
    edit(fieldsOf(current.run).find((spec) => spec.name === DATA), folder);
    goTo(DATA);
    controls.get(DATA).set(folder);
  });
}

// A folder on the studio's computer becomes the form's data set; chosen() is called then.
export async function chooseImages(chosen) {
  const { browse } = await import("../picking/browse.js");
  const spec = fieldsOf(current.run).find((each) => each.name === DATA);
  browse({ label: spec.label, option: DATA, kind: "folder", path: drafts[current.run][DATA] }, (folder) => {
    edit(spec, folder);
    controls.get(DATA)?.set(folder);
    chosen();
  });
}

// ---- one control

const id = (name) => `kl-${name}`;

function drawControl(spec) {
  const node = makeInput(spec, id(spec.name));
  const isCheck = spec.control === "check";
  const wide = ["area", "lines", "prompts", "start", "gpus"].includes(spec.control) || (spec.group === "Basics" && spec.control === "text");
  const told = spec.required ? t`required` : spec.unless ? t`required, unless ${spec.unless} is given` : t`default ${shownDefault(spec)}`;
  const facts = [spec.range, told].filter(Boolean).join(" · ");
  const help = make("p", { class: "kl-help", id: `${id(spec.name)}-help` }, ...rich(`${spec.help} `), make("span", { class: "kl-facts", text: facts }));
  const error = make("p", { class: "kl-error", id: `${id(spec.name)}-error`, hidden: true });
  const reset = make("button", {
    type: "button", class: "kl-reset", hidden: true, text: t`reset`, "aria-label": t`Reset ${spec.label} to ${shownDefault(spec)}`,
    onclick: () => {
      set(spec.default);
      edit(spec, spec.default);
      control.focus();
    },
  });
  const label = make("label", { for: id(spec.name), text: spec.label });
  const head = make("div", { class: "kl-head" }, isCheck ? node : null, label, make("code", { text: spec.name }), reset);
  const body = isCheck ? null : make("div", { class: "kl-control" }, node, spec.unit ? make("span", { class: "kl-unit", text: spec.unit }) : null);
  if (spec.path) body.append(makeBrowse(spec, node));
  if (spec.name === DATA) {
    body.append(make("button", { type: "button", class: "kl-button kl-add", text: t`Add images`, onclick: () => addImages() }));
  }
  if (spec.suggestions) {
    body.append(make("datalist", { id: `${id(spec.name)}-list` }, ...spec.suggestions.map((text) => make("option", { value: text }))));
  }
  const owner = isGuest(spec) && ownerOf(spec);
  const guest = owner && make("p", { class: "kl-note kl-guest", text: t`An option of ${owner.label}, shown because it is set and takes effect.` });
  const idle = (spec.needs || spec.name === RATE) && make("p", { class: "kl-note", hidden: true });
  const root = make("div", { class: `kl-field${wide ? " kl-wide" : ""}`, "data-name": spec.name }, head, guest || null, idle || null, body, error, spec.name === BASE ? aboutBase() : null, help);
  const read = () => (isCheck ? node.checked : node.value);

  function set(text) {
    if (isCheck) {
      node.checked = text === true;
    } else if (node.value !== text) {
      // A value that the list does not have (an old file) is shown as it is, so that the error has something to point at.
      if (spec.control === "select" && ![...node.options].some((option) => option.value === text)) node.append(make("option", { value: text, text }));
      node.value = text;
    }
    if (control.editor) control.editor.set(text);
    control.mark();
  }
  const control = {
    root, node, set, error, spec,
    focus: () => (control.editor ? control.editor.focus() : node.focus({ preventScroll: true })),
    mark() {
      const changed = isChanged(spec);
      root.classList.toggle("kl-changed", changed);
      reset.hidden = !changed || spec.required === true;
    },
    explain() {
      if (spec.name === RATE) {
        const own = overruling().map(({ label }) => label);
        idle.hidden = !own.length;
        say(idle, own.length ? t`Has no effect, because these are given: ${listed(own)}.` : "");
      }
      if (!spec.needs) return;
      const missing = hindrance(spec);
      root.classList.toggle("kl-asleep", missing !== null);
      idle.hidden = missing === null;
      idle.textContent = missing ? t`Has no effect until ${condition(missing)}.` : "";
    },
  };
  node.addEventListener(isCheck || spec.control === "select" ? "change" : "input", () => edit(spec, read()));
  // A decimal comma is shown as it is taken; see form.py.
  if (spec.control === "number" || spec.fractions) {
    node.addEventListener("change", () => {
      const text = spec.fractions ? withPoints(node.value) : withPoint(node.value);
      if (text === node.value) return;
      node.value = text;
      edit(spec, text);
    });
  }
  controls.set(spec.name, control);
  if (special[spec.control]) control.editor = special[spec.control]({ spec, node, head, body, label, write: (text) => { node.value = text; edit(spec, text); } });
  set(drafts[current.run][spec.name]);
  return root;
}

export function showProblem(name) {
  const control = controls.get(name);
  if (!control) return;
  const sentences = problems.get(name) || [];
  const { node, error, root } = control;
  const mark = control.editor ? control.editor.marked : node;
  error.hidden = sentences.length === 0;
  // The name and the help stand beside it already.
  error.textContent = joined(sentences.map((text) => (text.startsWith(`${name} is missing: `) ? t`This is required.` : translated(text).replace(`${name}: `, ""))));
  root.classList.toggle("kl-wrong", sentences.length > 0);
  if (sentences.length && mark === node) node.setAttribute("aria-invalid", "true");
  else node.removeAttribute("aria-invalid");
  mark.setAttribute("aria-describedby", sentences.length ? `${id(name)}-error ${id(name)}-help` : `${id(name)}-help`);
}

// ---- one group

// Blocks of fields as they stand in an accordion: what the mode puts first, then section by section.
function ordered(title) {
  const blocks = blocksIn(title).map(({ about, fields }) => ({ about, specs: specsOf({ fields }).filter(isShown) }));
  const leading = current.mode.first.map((name) => blocks.flatMap((block) => block.specs).find((spec) => spec.name === name)).filter(Boolean);
  if (title === "Basics" || !leading.length) return blocks.filter((block) => block.specs.length);
  const rest = blocks.map(({ about, specs }) => ({ about, specs: specs.filter((spec) => !leading.includes(spec)) }));
  return [{ about: translated(current.mode.title), specs: leading, leads: true }, ...rest].filter((block) => block.specs.length);
}

// What is built of a view is noted in it: areas are {specs, more}, folds, which hide some of them, {specs, fold, count, opened}.
function drawBlocks(view, blocks) {
  return blocks.map(({ about, specs }) => {
    const folds = [...new Set(specs.map((spec) => spec.fold).filter(Boolean))];
    return make("div", { class: "kl-block" }, blocks.length > 1 ? make("h3", { class: "kl-about", text: about }) : null,
      ...drawFields(view, specs.filter((spec) => !spec.fold)), ...folds.map((title) => drawFold(view, title, specs.filter((spec) => spec.fold === title))));
  });
}

// Fields, and a button for each condition that some of them wait for.
function drawFields(view, specs) {
  const more = make("div", { class: "kl-waiting" });
  view.areas.push({ specs, more });
  return [make("div", { class: "kl-grid" }, ...specs.map(drawControl)), more];
}

function drawFold(view, title, specs) {
  const count = make("span", { class: "kl-facts" });
  const fold = make("details", { class: "kl-fold" }, make("summary", {}, make("span", { text: translated(title) }), count), ...drawFields(view, specs));
  view.folds.push({ specs, fold, count, opened: null });
  return fold;
}

function countFolds(view) {
  for (const { specs, count } of view.folds) {
    const changed = specs.filter(isChanged).length;
    count.textContent = changed ? t`${changed} changed` : plural(specs.length, "setting", "settings");
  }
}

// Shows and leaves out what is built of a group: what a search finds, or else what has an effect.
function tidy(view) {
  const active = isSifting();
  for (const { specs, more } of view.areas) {
    const waiting = new Map();
    for (const spec of specs) {
      const control = controls.get(spec.name);
      control.root.hidden = active ? !matches(spec) : isIdle(spec);
      control.explain();
      if (!control.root.hidden || active) continue;
      const text = condition(hindrance(spec));
      waiting.set(text, [...(waiting.get(text) || []), spec]);
    }
    more.replaceChildren(...[...waiting].map(([text, idle]) => make("button", {
      type: "button", class: "kl-quiet", text: t`Show ${plural(idle.length, "more setting", "more settings")}, for when ${text}`,
      onclick: () => {
        idle.forEach((spec) => wanted.add(spec.name));
        tidy(view);
        controls.get(idle[0].name).focus();
      },
    })));
  }
  countFolds(view);
  for (const each of view.folds) {
    const shown = each.specs.filter((spec) => !controls.get(spec.name).root.hidden);
    const wrong = each.specs.some((spec) => problems.has(spec.name));
    each.fold.hidden = active && !shown.length;
    if (active && each.opened === null) each.opened = each.fold.open;
    if (active) each.fold.open = shown.length > 0;
    else if (each.opened !== null) each.fold.open = each.opened;
    if (!active) each.opened = null;
    if (wrong) each.fold.open = true;
  }
}

export function fieldset({ root, props, detail: title }) {
  const basics = title === "Basics";
  const view = { title, props, details: null, card: null, built: false, specs: [], areas: [], folds: [], draw, count() {}, build() {}, unfold() {}, isStale };
  views.set(title, view);
  let drawn = null;

  function isStale() {
    const now = fieldsIn(title).filter(isShown);
    return now.length !== view.specs.length || now.some((spec) => !view.specs.includes(spec));
  }

  function draw() {
    const wasOpen = drawn === `${current.run} ${current.mode.name}` && view.details && view.details.open;
    drawn = `${current.run} ${current.mode.name}`;
    // An option may stand in another group now, whose control is drawn already.
    for (const spec of view.specs) if (controls.has(spec.name) && root.contains(controls.get(spec.name).root)) controls.delete(spec.name);
    root.replaceChildren();
    view.built = false;
    view.areas = [];
    view.folds = [];
    view.card = view.details = null;
    view.count = view.build = view.unfold = () => {};
    const blocks = ordered(title);
    const specs = (view.specs = blocks.flatMap((block) => block.specs));
    root.hidden = specs.length === 0;
    if (!specs.length) return;
    const body = make("div", { class: "kl-body" });
    view.build = () => {
      if (view.built) return;
      view.built = true;
      fillBody();
      for (const spec of specs) showProblem(spec.name);
      tidy(view);
    };
    const fillBody = () => {
      const [first, ...rest] = drawBlocks(view, blocks);
      body.append(first);
      if (!rest.length) return;
      const others = make("div", { class: "kl-rest" }, ...rest);
      body.append(others);
      if (!blocks[0].leads) return;
      const count = blocks.slice(1).reduce((sum, block) => sum + block.specs.length, 0);
      const more = make("button", { type: "button", class: "kl-quiet kl-unfold", text: t`Show the other ${count} settings of ${translated(title)}` });
      more.addEventListener("click", () => {
        view.unfold();
        find(others, "input, select, textarea").focus();
      });
      body.insertBefore(more, others);
      body.classList.add("kl-folded");
    };
    view.unfold = () => body.classList.remove("kl-folded");
    if (basics) {
      view.card = make("section", { class: "kl-card kl-basics", "aria-labelledby": "kl-basics" }, make("h2", { id: "kl-basics", text: t`Basics` }), body);
      root.append(view.card);
      view.build();
      return;
    }
    const badge = make("span", { class: "kl-badge" });
    const heading = make("h2", { class: "kl-title", text: translated(title) });
    const names = listed(specs.slice(0, 4).map((spec) => (language === "en" ? spec.label.replace(/^[A-Z](?![A-Z])/, (letter) => letter.toLowerCase()) : spec.label)));
    const hint = make("span", { class: "kl-hint", text: t`${names} … ${specs.length} settings` });
    view.card = view.details = make("details", { class: "kl-card kl-section" }, make("summary", {}, heading, hint, badge), body);
    // A click comes before the browser opens it, the toggle event a moment after: somebody tabbing on at once must find the fields.
    view.details.firstChild.addEventListener("click", () => view.build());
    view.details.addEventListener("toggle", () => {
      if (view.details.open) view.build();
    });
    view.count = () => {
      const changed = specs.filter(isChanged).length;
      const wrong = specs.filter((spec) => problems.has(spec.name)).length;
      badge.textContent = [wrong ? plural(wrong, "problem", "problems") : "", changed ? t`${changed} changed` : ""].filter(Boolean).join(" · ");
      badge.classList.toggle("kl-wrong", wrong > 0);
      hint.hidden = changed + wrong > 0;
    };
    root.append(view.details);
    if (wasOpen || (current.mode.opens && blocks[0].leads)) {
      view.build();
      view.details.open = true;
    }
    view.count();
  }
  draw();
  publish(view);
}

// ---- search, filter, open and close

const isSifting = () => filter.words.length > 0 || filter.changed;

function applyFilter() {
  const active = isSifting();
  if (active && !filter.opened) filter.opened = new Map([...views].map(([title, view]) => [title, Boolean(view.details && view.details.open)]));
  let total = 0;
  const elsewhere = filter.words.length ? fieldsOf(current.run).filter((spec) => !isShown(spec) && ownerOf(spec) && matches(spec)) : [];
  for (const view of views.values()) {
    const { title, specs } = view;
    const found = new Set(specs.filter((spec) => matches(spec)).map((spec) => spec.name));
    total += found.size;
    if (active && found.size) view.build();
    if (view.card) view.card.hidden = active && !found.size;
    if (view.details) view.details.open = active ? found.size > 0 : filter.opened ? filter.opened.get(title) === true : view.details.open;
    tidy(view);
  }
  if (!active) filter.opened = null;
  document.body.classList.toggle("kl-sifting", active);
  for (const heading of findAll(document, ".kl-fieldset .kl-about")) {
    heading.hidden = active && findAll(heading.parentElement, ".kl-field").every((field) => field.hidden);
  }
  return { active, total, elsewhere };
}

function matches(spec) {
  if (filter.changed && !isChanged(spec)) return false;
  const text = `${spec.name} ${spec.name.replace(/_/g, " ")} ${spec.label} ${spec.help} ${translated(spec.group)}`.toLowerCase();
  return filter.words.every((word) => text.includes(word));
}

export function toolbar({ root }) {
  const status = make("p", { class: "kl-status", role: "status" });
  const search = make("input", { type: "search", id: "kl-search", placeholder: t`Search all settings`, "aria-label": t`Search all settings`, autocomplete: "off" });
  const changed = make("input", { type: "checkbox", id: "kl-only-changed" });
  const update = () => {
    filter.words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    filter.changed = changed.checked;
    const { active, total, elsewhere } = applyFilter();
    const found = total ? plural(total, "setting", "settings") : elsewhere.length ? "" : t`No setting matches; try another word`;
    const more = phrased(elsewhere.map((spec) => t`${spec.name} belongs to ${ownerOf(spec).label}`));
    status.textContent = active ? [found, more].filter(Boolean).join("; ") : "";
  };
  const all = (open) => () => {
    for (const view of views.values()) {
      if (!view.details || view.details.hidden) continue;
      if (open) view.build();
      view.details.open = open;
      view.unfold();
      for (const { fold } of view.folds) fold.open = open;
    }
  };
  search.addEventListener("input", update);
  changed.addEventListener("change", update);
  filter.clear = () => {
    search.value = "";
    changed.checked = false;
    update();
  };
  root.append(make("div", { class: "kl-toolbar", role: "search" }, search,
    make("label", { class: "kl-toggle" }, changed, make("span", { text: t`Only changed` })),
    make("button", { type: "button", class: "kl-quiet", text: t`Open all`, onclick: all(true) }),
    make("button", { type: "button", class: "kl-quiet", text: t`Close all`, onclick: all(false) }), ...makeUndo(bringBack)), status);
}

export function goTo(name) {
  const spec = fieldsOf(current.run).find((item) => item.name === name);
  const view = spec && views.get(spec.group);
  if (!view) return false;
  wanted.add(name);
  if (view.isStale()) view.draw();
  view.build();
  if (view.details) view.details.open = true;
  applyFilter();
  let control = controls.get(name);
  if (control.root.closest(".kl-rest")) view.unfold();
  const fold = control.root.closest(".kl-fold");
  if (fold) fold.open = true;
  if (control.root.hidden || (view.details && view.details.hidden)) {
    filter.clear();
    if (view.details) view.details.open = true;
    control = controls.get(name);
  }
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  control.root.scrollIntoView({ block: "center", behavior: still ? "auto" : "smooth" });
  control.focus();
  return true;
}
