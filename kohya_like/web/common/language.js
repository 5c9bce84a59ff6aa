// The language of the page. English stands in the code, is the key of every translation, and costs nothing; another language is one file
// that is fetched before the page is drawn. A sentence without a translation stays English.

import { stored } from "./stored.js";

export const LANGUAGES = { en: "English", de: "Deutsch (beta)", ru: "Русский (beta)", zh: "简体中文 (beta)" };

const inBrowser = typeof document !== "undefined";

// What was chosen here, otherwise the first language of the browser that the page has.
function wanted() {
  if (!inBrowser) return "en";
  const asked = [stored("kl.language"), ...navigator.languages].map((tag) => String(tag).toLowerCase().split("-")[0]);
  return asked.find((tag) => tag in LANGUAGES) || "en";
}

async function fetched(name) {
  if (name === "en") return {};
  try {
    const response = await fetch(new URL(`../languages/${name}.json`, import.meta.url));
    if (!response.ok) throw new Error(`the studio answered ${response.status}`);
    return await response.json();
  } catch (error) {
    console.info("The page stays English:", error.message);
    return null;
  }
}

const found = await fetched(wanted());

export const language = found ? wanted() : "en";

/**
 * English -> its translation. page: of t and plural, which has one for each plural form, in the order of FORMS; said: of translated.
 * @type {{page: Record<string, string | string[]>, said: Record<string, string>}}
 */
const catalogue = { page: {}, said: {}, ...found };
const forms = new Intl.PluralRules(language);
const FORMS = forms.resolvedOptions().pluralCategories.sort((a, b) => ["one", "few", "many", "other"].indexOf(a) - ["one", "few", "many", "other"].indexOf(b));
if (inBrowser) document.documentElement.lang = language === "zh" ? "zh-Hans" : language;

const filled = (text, values) => text.replace(/\{(\d+)\}/g, (hole, number) => (number - 1 in values ? values[number - 1] : hole));
const numbered = (strings) => strings.reduce((text, piece, index) => `${text}{${index}}${piece}`);

/**
 * Text of the page in the reader's language: t`Show ${count} more`. The English is the key, with {1}, {2} ... for what is put in.
 * @param {TemplateStringsArray} strings
 * @param {...unknown} values
 */
export function t(strings, ...values) {
  const key = numbered(strings);
  const own = catalogue.page[key];
  return filled(typeof own === "string" ? own : key, values);
}

// A number with its word. Both English words are literals where this is called; shown is how the number is written.
export function plural(count, one, many, shown = count) {
  const own = catalogue.page[`{1} ${one}`];
  if (!Array.isArray(own)) return `${shown} ${count === 1 ? one : many}`;
  const form = FORMS.indexOf(forms.select(count));
  return filled(own[Math.min(form < 0 ? own.length : form, own.length - 1)], [shown]);
}

// Several things in one line, and sentences one behind the other, as the language writes them: Chinese has marks of its own and no spaces.
const isChinese = language === "zh";
const between = (mark) => (/** @type {(string | number | null | undefined | false)[]} */ pieces) => pieces.filter(Boolean).join(mark);
export const listed = between(isChinese ? "、" : ", ");
export const phrased = between(isChinese ? "，" : ", ");
export const joined = between(isChinese ? "" : " ");
/** @param {string} text */
export const ended = (text) => `${text}${isChinese ? "。" : "."}`;
/** @param {string} text */
export const bracketed = (text) => (isChinese ? `（${text}）` : ` (${text})`);

// ---- what the studio says: whole English sentences, with values in them

/** @type {{own: string, pattern: RegExp}[] | null} */
let templates = null;
const heard = new Map();

const ENDED = /[.!?…] \S/;

// The longest first. Where little of a sentence is fixed, only single words are put in, or it would be found in any other.
function madeTemplates() {
  const letters = (key) => key.replace(/\{\d+\}/g, "").length;
  const keys = Object.keys(catalogue.said).filter((key) => /\{\d+\}/.test(key)).sort((a, b) => letters(b) - letters(a));
  const literal = (piece) => piece.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return keys.map((key) => ({
    own: catalogue.said[key],
    pattern: new RegExp(`^${key.split(/\{\d+\}/).map(literal).join(letters(key) < 8 ? "(\\S+)" : "(.+?)")}$`, "s"),
  }));
}

// spans: a value may go over the end of a sentence.
function whole(text, spans = false) {
  if (catalogue.said[text]) return catalogue.said[text];
  templates = templates || madeTemplates();
  for (const { own: words, pattern } of templates) {
    const match = pattern.exec(text);
    // What was put in may itself be a sentence; a single word is a name.
    if (match && (spans || !match.slice(1).some((value) => ENDED.test(value)))) return filled(words, match.slice(1).map((value) => (/\s/.test(value) ? translated(value) : value)));
  }
  return null;
}

// The longest beginnings that are known, sentence by sentence, and what stands in brackets at the end.
function bySentence(text) {
  const [, before = "", brackets = ""] = /^(.+?) (\(.+\))$/s.exec(text) || [];
  const inside = brackets && whole(brackets);
  if (inside) return `${translated(before)} ${inside}`;
  // Names, and how many more there are.
  const [, names = "", rest = ""] = /^(.+) (and \d+ more)$/s.exec(text) || [];
  if (rest && whole(rest)) return `${names} ${whole(rest)}`;
  // A file, and what is wrong with it.
  const [, file = "", wrong = ""] = /^(\S.*?\.\w{2,12}) (.+)$/s.exec(text) || [];
  const own = wrong && whole(wrong);
  if (own) return `${file} ${own}`;
  const pieces = text.split(/(?<=[.!?…]) (?=\S)|(\n)/).filter((piece) => piece !== undefined);
  if (pieces.length < 2) return text;
  for (let end = pieces.length - 1; end > 0; end -= 1) {
    const beginning = pieces.slice(0, end).join(" ");
    // A sentence alone ends without a full stop; before another it has one.
    const bare = beginning.endsWith(".") ? whole(beginning.slice(0, -1)) : null;
    const own = whole(beginning) ?? (bare === null ? null : `${bare}${language === "zh" ? "。" : "."}`);
    if (own !== null) return `${own}${language === "zh" ? "" : " "}${translated(text.slice(beginning.length).trimStart())}`;
  }
  return whole(text, true) ?? `${pieces[0]} ${translated(text.slice(pieces[0].length).trimStart())}`;
}

/**
 * A sentence of the studio in the reader's language. It is for sentences only: names, captions and files are not passed through here.
 * @param {string} text
 * @returns {string}
 */
export function translated(text) {
  if (!text || language === "en" || typeof text !== "string") return text;
  if (!heard.has(text)) {
    if (heard.size > 500) heard.clear();
    const [, option = "", rest = text] = /^([a-z][a-z0-9_]*: )(.+)$/s.exec(text) || [];
    heard.set(text, whole(text) ?? (option ? `${option}${whole(rest) ?? bySentence(rest)}` : bySentence(text)));
  }
  return heard.get(text);
}

// ---- the options

/**
 * A field as the page draws it, with its words in the reader's language. Names, values and choices are those of the command line.
 * @template {Record<string, any>} Spec
 * @param {Spec} spec
 * @returns {Spec}
 */
export function inWords(spec) {
  if (language === "en") return spec;
  const words = {};
  for (const key of ["label", "help", "unit", "range"]) if (spec[key]) words[key] = translated(spec[key]);
  return { ...spec, ...words };
}

// The schema of the form: its fields, and the sentences about sections, kinds of run and training modes.
export function schemaInWords(schema) {
  if (language === "en") return schema;
  const about = (group) => ({ ...group, blocks: group.blocks.map((block) => ({ ...block, about: translated(block.about) })) });
  const runs = Object.entries(schema.runs).map(([key, run]) => [key, { ...run, label: translated(run.label), groups: run.groups.map(about) }]);
  const modes = schema.modes.map((each) => ({ ...each, label: translated(each.label), about: translated(each.about) }));
  const families = Object.entries(schema.families).map(([key, label]) => [key, translated(label)]);
  return { ...schema, fields: schema.fields.map(inWords), runs: Object.fromEntries(runs), families: Object.fromEntries(families), modes };
}
