// What is in the form of the Train tab: the options of each kind of run, what somebody has typed, and what of it counts. Draws nothing.

import schema from "../schema.js";
import { t } from "../common/language.js";
import { store, stored } from "../common/stored.js";
import { same } from "./texts.js";

const DRAFT = "kl.draft";
export const drafts = {}; // kind of run -> {option: text}
const shared = {}; // option -> text, or null for the default, as the kind of run had it that was left last
export const problems = new Map(); // option -> [sentence]
export const wanted = new Set(); // options that the chosen mode leaves out and somebody asked for
const listeners = [];
export const current = { run: keyOf(Object.keys(schema.families)[0], schema.modes[0]), mode: schema.modes[0] };

export const values = () => ({ run: current.run, values: { ...drafts[current.run] } });
export const onChange = (listen) => listeners.push(listen);
export const tell = () => listeners.forEach((listen) => listen());
export const hasDraft = () => stored(DRAFT) !== null;

export function keyOf(family, chosen) {
  return `${family}/${chosen.method}`;
}

export const familyOf = (key) => key.split("/")[0];
export const specsOf = (block) => block.fields.map((index) => schema.fields[index]);
export const groupsOf = (key) => schema.runs[key].groups;
export const fieldsOf = (key) => groupsOf(key).flatMap((group) => group.blocks.flatMap(specsOf));
export const blocksIn = (title) => (groupsOf(current.run).find((group) => group.title === title) || { blocks: [] }).blocks;
export const fieldsIn = (title) => blocksIn(title).flatMap(specsOf);
export const defaults = (key) => Object.fromEntries(fieldsOf(key).map((spec) => [spec.name, spec.default]));

// An option that the chosen mode leaves out is shown all the same when it has a value, since it will take effect, or a problem.
export const isShown = (spec) => !current.mode.hidden.includes(spec.name) || isChanged(spec) || problems.has(spec.name) || wanted.has(spec.name);
export const isGuest = (spec) => current.mode.hidden.includes(spec.name);

// A field sleeps until one of the options that it needs is on, has one of some values, or has none of them: see sleeping.py. One that
// the kind of run does not have is no hindrance. What sleeps is kept here, greyed, and not written.
const specOf = (name) => fieldsOf(current.run).find((spec) => spec.name === name);
function isMet({ other, values, but, off }) {
  const now = drafts[current.run][other.name];
  if (values.length) return values.some((value) => same(other, String(now), value)) !== but;
  if (other.control === "check") return now !== off;
  return (String(now).trim() !== "" && !(other.control === "number" && Number(now) === 0)) !== off;
}

export function hindrance(spec) {
  const needs = (spec.needs || []).map((need) => ({ ...need, other: specOf(need.name) })).filter(({ other }) => other);
  for (const need of needs) {
    const deeper = hindrance(need.other);
    if (deeper) return deeper;
    if (isMet(need)) return null;
  }
  return needs.length ? needs : null;
}

const OWN_RATES = ["unet_lr", "text_encoder_lr"];

// The rates of all that is trained, where each has one of its own: learning_rate, which they stand in place of, then trains nothing.
export function overruling() {
  const own = OWN_RATES.map(specOf).filter((spec) => spec && hindrance(spec) === null);
  return own.every((spec) => String(drafts[current.run][spec.name]).trim()) ? own : [];
}

export const needed = new Set([...OWN_RATES, ...schema.fields.flatMap((spec) => (spec.needs || []).map(({ name }) => name))]);

// Without effect, and nobody has given it a value or asked for it: left out.
export const isIdle = (spec) => !isChanged(spec) && !problems.has(spec.name) && !wanted.has(spec.name) && hindrance(spec) !== null;

export function condition(needs) {
  return needs.map(({ other, values, but, off }) => {
    if (values.length) return but ? t`${other.label} is not ${values.join(t` or `)}` : t`${other.label} is ${values.join(t` or `)}`;
    if (off) return t`${other.label} is empty`;
    if (other.control === "check") return t`${other.label} is on`;
    return other.control === "number" && !other.optional ? t`${other.label} is not 0` : t`${other.label} is given`;
  }).join(t` or `);
}
export const ownerOf = (spec) => schema.modes.find((other) => other !== current.mode && other.method === current.mode.method && !other.hidden.includes(spec.name));

export const isChanged = (spec) => !same(spec, drafts[current.run][spec.name], spec.default);

function restore() {
  for (const key of Object.keys(schema.runs)) drafts[key] = defaults(key);
  // Each tab of the browser has a draft of its own; a new one begins with what was typed last in any.
  const draft = stored(DRAFT, sessionStorage) || stored(DRAFT);
  if (!draft || typeof draft !== "object" || !draft.runs) return;
  for (const [key, values] of Object.entries(draft.runs)) {
    if (!drafts[key]) continue;
    for (const spec of fieldsOf(key)) {
      const text = values[spec.name in values ? spec.name : schema.former[spec.name] || spec.name];
      if (typeof text === typeof spec.default) drafts[key][spec.name] = text;
    }
  }
  Object.assign(shared, draft.shared);
  if (!drafts[draft.run]) return;
  current.run = draft.run;
  current.mode = schema.modes.find((each) => each.name === (draft.mode || draft.way) && keyOf(familyOf(current.run), each) === current.run) || modeFor(current.run, drafts[current.run]);
}

let saving = 0;
export function save() {
  saving = 0;
  const kept = {};
  for (const key of Object.keys(drafts)) {
    const different = fieldsOf(key).filter((spec) => drafts[key][spec.name] !== spec.default);
    if (different.length || key === current.run) kept[key] = Object.fromEntries(different.map((spec) => [spec.name, drafts[key][spec.name]]));
  }
  for (const place of [sessionStorage, localStorage]) store(DRAFT, { run: current.run, mode: current.mode.name, runs: kept, shared }, place);
}
export function saveSoon() {
  if (!saving) saving = setTimeout(save, 200);
}
addEventListener("pagehide", () => saving && save());

// The mode that settings are for: the one that has a place for every value, else the one that is chosen.
export function modeFor(key, texts) {
  const possible = schema.modes.filter((each) => keyOf(familyOf(key), each) === key);
  const specs = fieldsOf(key);
  const fits = (each) => !specs.some((spec) => each.hidden.includes(spec.name) && !same(spec, texts[spec.name], spec.default));
  const fitting = possible.filter(fits);
  return fitting.includes(current.mode) ? current.mode : fitting[0] || (possible.includes(current.mode) ? current.mode : possible[0]);
}

// From now on the form is for this kind of run and mode.
export function turn(key, next) {
  current.run = key;
  current.mode = next;
  problems.clear();
  wanted.clear();
}

// What kinds of run share goes along, also past one that has it not: a value, and that somebody put it back to the default, which then
// is each kind's own. What only one of them has stays with it and is there again later.
export function carry(from, to) {
  for (const spec of fieldsOf(from)) {
    const text = drafts[from][spec.name];
    shared[kindOf(spec)] = same(spec, text, spec.default) ? null : text;
  }
  for (const spec of fieldsOf(to)) {
    const text = shared[kindOf(spec)];
    // Each family has base models of its own; the built-in one goes along where there is one.
    const isToy = text === "toy" && spec.suggestions?.includes(text) && same(spec, drafts[to][spec.name], spec.default);
    const keepsOwn = spec.ofFamily && familyOf(from) !== familyOf(to) && !isToy;
    if (text !== undefined && !keepsOwn) drafts[to][spec.name] = text === null ? spec.default : text;
  }
}

// The same option with other choices is another one, and so is a number with another default: an adapter's learning rate would ruin a model.
const kindOf = (spec) => `${spec.name} ${spec.control} ${spec.choices || ""} ${spec.control === "number" ? spec.default : ""}`;

restore();
