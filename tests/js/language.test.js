// Texts in another language: what the page writes, and sentences of the studio with values in them.

import assert from "node:assert/strict";
import { test } from "node:test";

const GERMAN = {
  page: { "{1} image": ["{1} Bild", "{1} Bilder"], "Show {1} of {2}": "{2}: {1}", Help: "Hilfe", "{1} (as in the form)": "{1} (wie im Formular)", "sweep {1}": "Reihenversuch {1}" },
  said: {
    "{1} has started.": "{1} hat begonnen.",
    "Starts a new run.": "Neuer Lauf.",
    "{1}: {2} is out of range; {3} is allowed": "{1}: {2} liegt außerhalb; erlaubt ist {3}",
    "{1}: {2} is not {3}": "{1}: {2} ist nicht {3}",
    "a number": "eine Zahl",
    "Learning rate": "Lernrate",
    on: "an",
    "({1} is allowed)": "({1} ist erlaubt)",
    "{1} to {2}": "{1} bis {2}",
    "{1} of {2}": "{1} von {2}",
    "{1} is the best of {2}.": "Von {2} ist {1} das beste.",
    "{1} of {2} are copies.": "Kopien: {1} von {2}.",
    "The disk of {1} is full.": "Die Platte von {1} ist voll.",
  },
};

globalThis.document = { documentElement: {} };
globalThis.localStorage = { getItem: () => null };
Object.defineProperty(globalThis, "navigator", { value: { languages: ["fr-FR", "de-DE", "en"] }, configurable: true });
globalThis.fetch = async () => ({ ok: true, json: async () => GERMAN });
const { inWords, plural, t, translated } = await import("../../kohya_like/web/common/language.js");
const { calledWords, clock, moment, runWords, tagWords } = await import("../../kohya_like/web/common/words.js");

test("a text keeps its values, wherever the language puts them, and one without a translation stays English", () => {
  assert.equal(t`Show ${3} of ${"a {1}"}`, "a {1}: 3");
  assert.equal(t`Help`, "Hilfe");
  assert.equal(t`Not ${1} yet`, "Not 1 yet");
});

test("a number takes the form that the language has for it", () => {
  assert.deepEqual([0, 1, 2, 21].map((count) => plural(count, "image", "images")), ["0 Bilder", "1 Bild", "2 Bilder", "21 Bilder"]);
  assert.equal(plural(1, "row", "rows"), "1 row");
});

test("sentences of the studio are found by what does not change in them, one after another, behind the name of an option", () => {
  assert.equal(translated("my run has started."), "my run hat begonnen.");
  assert.equal(translated("Starts a new run. cat has started."), "Neuer Lauf. cat hat begonnen.");
  assert.equal(translated("learning_rate: 12 is out of range; 0 to 1 is allowed"), "learning_rate: 12 liegt außerhalb; erlaubt ist 0 bis 1");
  assert.equal(translated('learning_rate: "so fast" is not a number (0 to 1 is allowed)'), 'learning_rate: "so fast" ist nicht eine Zahl (0 bis 1 ist erlaubt)');
  assert.equal(translated("a number. Starts a new run."), "eine Zahl. Neuer Lauf.");
  assert.equal(translated("cat is the best of 3. 0 of 4 are copies."), "Von 3 ist cat das beste. Kopien: 0 von 4.");
  assert.equal(translated("The disk of a folder. Not mine is full."), "Die Platte von a folder. Not mine ist voll.");
  assert.equal(translated("The disk of a folder of mine is full."), "Die Platte von a folder of mine ist voll.");
});

test("what is not known, and names, stay as they are", () => {
  assert.equal(translated("a picture of a cat in the rain"), "a picture of a cat in the rain");
  assert.equal(translated("It is new. Nobody knows it."), "It is new. Nobody knows it.");
  assert.equal(translated(""), "");
  assert.deepEqual(inWords({ name: "x", label: "Starts a new run.", choices: ["Help"], range: "0 to 1" }), { name: "x", label: "Neuer Lauf.", choices: ["Help"], range: "0 bis 1" });
});

test("a run of a sweep is called by what is tried, in the reader's language, unless somebody has given it a name", () => {
  const tried = { settings: [["Learning rate", "3e-4"], ["DoRA", "on"]], own: false };
  const none = { settings: [], own: false };
  assert.equal(calledWords({ label: "", tried }), "Lernrate 3e-4, DoRA an");
  assert.equal(calledWords({ label: "", tried: { ...tried, own: true } }), "Lernrate 3e-4, DoRA an (wie im Formular)");
  assert.equal(calledWords({ label: "Learning rate 3e-4", tried }), "Learning rate 3e-4");
  assert.equal(calledWords({ label: "", tried: none }), "");
  assert.equal(runWords("20261129-101500-toy", { label: "", tried }), `Lernrate 3e-4, DoRA an · ${moment(new Date(2026, 10, 29, 10, 15))}`);
  assert.equal(runWords("20201129-101500_2-toy", { label: "", tried: none }), "toy · 29. Nov. 2020, 10:15");
  assert.equal(runWords("from-a-terminal", { label: "mine", tried: none }), "mine");
  assert.equal(runWords("from-a-terminal", { label: "", tried: none }), "from-a-terminal");
  assert.doesNotMatch(moment(new Date()), /\d{4}/, "of this year");
  assert.deepEqual(["sweep 20261129-toy", "my sweep", "sweep of mine"].map(tagWords), ["Reihenversuch 20261129-toy", "my sweep", "sweep of mine"]);
});

test("a time of the day is written as the reader's language writes it, whatever the browser's is", () => {
  assert.equal(clock(new Date(2026, 10, 29, 14, 5, 2)), "14:05:02");
});
