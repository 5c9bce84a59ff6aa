// What the views of a run compute: parts of a step, tables of evaluations, readings of GPUs.

import assert from "node:assert/strict";
import { test } from "node:test";
import { few, heat, over, pieces, powerLimit } from "../../kohya_like/web/runs/gpus.js";
import { pairOf, rowsOf, when } from "../../kohya_like/web/runs/matrix.js";
import { askedFor, promptsOf } from "../../kohya_like/web/runs/previews.js";
import { partsOf } from "../../kohya_like/web/runs/times.js";

test("a prompt that took the place of another has previews of its own", () => {
  const drawn = (step, index, prompt) => ({ step, index, prompt });
  const samples = [drawn(0, 0, "a star"), drawn(0, 1, "a moon"), drawn(50, 0, "a sun"), drawn(50, 1, "a moon")];
  assert.deepEqual(promptsOf(samples).map(({ prompt, step }) => [prompt, step]), [["a sun", 50], ["a star", 0], ["a moon", 50]]);
});

test("an image that somebody has asked for is found by its prompt, also where one of the same prompt was there", () => {
  const drawn = (file, prompt, time) => ({ file, prompt, time });
  const before = [drawn("0-0", "a star", 1), drawn("0-1", "a moon", 2)];
  assert.equal(askedFor(before, before, "a star"), undefined);
  const after = [...before, drawn("5-0", "a star", 3), drawn("5-2", "a sun", 4)];
  assert.equal(askedFor(after, before, "# new\n a sun --w 64\na house").file, "5-2");
  assert.equal(askedFor(after, before, "a star --d 4").file, "5-0");
});

test("what is in no part of a step is the rest, and never below 0", () => {
  const head = [7, 1, 1, 1, 1, 1e-4]; // step, four losses, rate
  const [row] = partsOf([head, [...head, 0.1, 0.5, 0.2, 1]], false);
  assert.deepEqual(row.map((value) => Number(value.toFixed(6))), [7, 0.1, 0.5, 0.2, 0.2]);
  assert.equal(partsOf([[...head, 0.5, 0.5, 0.5, 1]], false)[0][4], 0);
});

test("a GPU's clock knows no data, and only steps that it was read in", () => {
  const point = [1, 1, 1, 1, 1, 1e-4, 0.1, 0.5, 0.2, 1];
  assert.deepEqual(partsOf([point, [...point, 0.25, 0.25, 0.75]], true), [[1, 0, 0.25, 0.25, 0.25]]);
});

test("sources of one style are told apart by their images, and old evaluations by their pairs", () => {
  const source = (style, stem) => ({ style, stem, file: "a.png", vae: "" });
  assert.deepEqual(rowsOf({ sources: [source("flat", "a"), source("flat", "b")], pairs: [] }).map(({ words }) => words), ["flat, a", "flat, b"]);
  assert.deepEqual(rowsOf({ sources: [source("flat", "a"), source("line", "b")], pairs: [] }).map(({ words }) => words), ["flat", "line"]);
  const pairs = [{ from: "flat", stem: "", to: "line" }, { from: "flat", stem: "", to: "night" }, { from: "line", stem: "", to: "flat" }];
  assert.deepEqual(rowsOf({ sources: [], pairs }).map(({ words }) => words), ["flat", "line"]);
});

test("a pair is found by its image where it names one", () => {
  const pairs = [{ from: "flat", stem: "a", to: "line", file: "1" }, { from: "flat", stem: "b", to: "line", file: "2" }, { from: "flat", stem: "", to: "night", file: "3" }];
  assert.equal(pairOf({ pairs }, { from: "flat", stem: "b", to: "line" }).file, "2");
  assert.equal(pairOf({ pairs }, { from: "flat", stem: "b", to: "night" }).file, "3");
  assert.equal(pairOf({ pairs }, { from: "line", stem: "b", to: "flat" }), undefined);
});

test("an evaluation before the first step is named so", () => {
  assert.deepEqual([{ epoch: 0, step: null }, { epoch: 2, step: null }, { epoch: 2, step: 40 }].map(when), ["before the first step", "epoch 2", "epoch 2, step 40"]);
});

test("GPUs that keep silent are no zeros", () => {
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  assert.equal(over(sum, [1, null, 2, undefined]), 3);
  assert.equal(over(sum, [null, undefined]), null);
  assert.equal(few({ numGpus: 4 }, [1, null, 0, null]), "2 of 4 GPUs");
  assert.equal(few({ numGpus: 2 }, [1, 2]), "");
  assert.equal(few({ numGpus: 2 }, [null, null]), "");
  assert.equal(heat(null), "not told");
  assert.match(heat(81), /hot$/);
});

test("a line of readings is broken where nobody looked or the driver was silent, and stays in its box", () => {
  const rows = [[300, 0], [298, 50], [290, 100], [288, null], [286, 200], [284, -1]];
  assert.deepEqual(pieces(rows, 100, 300), [["0.0 39.0", "2.0 20.0"], ["10.0 1.0"], ["14.0 1.0", "16.0 39.0"]]);
  assert.deepEqual(pieces([[4, null]], 100, 300), []);
});

test("the limit of all is told only where each that is read has one", () => {
  const gpu = (power, limit) => ({ power, powerLimit: limit });
  assert.equal(powerLimit({ gpus: [gpu(100, 300), gpu(null, null)] }), 300);
  assert.equal(powerLimit({ gpus: [gpu(100, 300), gpu(90, null)] }), null);
  assert.equal(powerLimit({ gpus: [gpu(null, 300)] }), null);
});
