// Limits, marks and smoothing of the plots.

import assert from "node:assert/strict";
import { test } from "node:test";
import { limits, marks, nearest, round, smoothed } from "../../kohya_like/web/runs/scales.js";

const steps = (count, of) => Array.from({ length: count }, (_, place) => of(place));

test("the limits have room at both ends and do not go below 0 for values above it", () => {
  const [low, high] = limits([1, 2, 3], false);
  assert.ok(low < 1 && low > 0.8 && high > 3 && high < 3.2);
  assert.equal(limits([0, 10], false)[0], 0);
  assert.ok(limits([-1, 1], false)[0] < -1);
});

test("one wild value in a thousand does not flatten the others", () => {
  const [, high] = limits([...steps(999, () => 1), 1e6], false);
  assert.ok(high < 2);
});

test("a flat line and no line at all have an axis", () => {
  for (const log of [false, true]) {
    for (const values of [[], [0.5], [0.5, 0.5]]) {
      const [low, high] = limits(values, log);
      assert.ok(low < high && Number.isFinite(high - low), `${values} ${log}`);
    }
  }
  const [low, high] = limits([0, 0], false);
  assert.ok(low < high);
});

test("a logarithmic axis leaves out what has no logarithm", () => {
  const [low, high] = limits([-5, 0, 0.1, 10], true);
  assert.ok(low > 0.01 && low < 0.1 && high > 10 && high < 20);
});

test("marks are round numbers inside of the limits", () => {
  assert.deepEqual(round(0, 1, 5), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepEqual(round(0.13, 0.52, 4), [0.2, 0.3, 0.4, 0.5]);
  assert.deepEqual(marks(0.02, 3, 5, true), [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]);
  assert.deepEqual(marks(0.003, 3, 5, true), [0.01, 0.1, 1]);
  assert.deepEqual(marks(1, 4, 3, true), [1, 2, 3, 4]);
});

test("smoothing follows a constant at once, forgets slowly, and keeps holes", () => {
  assert.deepEqual(smoothed([2, 2, null, 2, undefined]), [2, 2, null, 2, null]);
  const means = smoothed([...steps(500, () => 1), ...steps(500, () => 0)]);
  assert.ok(means[509] > 0.5 && means[999] < 1e-3);
});

test("the nearest step is found, at the ends and between", () => {
  const rows = [[1], [10], [20]];
  assert.deepEqual([-5, 1, 5, 5.6, 14, 16, 99].map((step) => nearest(rows, step)), [0, 0, 0, 1, 1, 2, 2]);
});
