// How numbers, sizes and times are written.

import assert from "node:assert/strict";
import { test } from "node:test";
import { bytes, duration, figure, grouped, plural } from "../../kohya_like/web/common/words.js";

test("a figure keeps its leading digits, and very large and small ones have a power of ten", () => {
  const written = { 0: "0", 1: "1", 0.10834567: "0.1083", 123456.7: "123500", "-2.50001": "-2.5" };
  for (const [value, text] of Object.entries(written)) assert.equal(figure(Number(value)), text);
  assert.equal(figure(1e-4), "1e-4");
  assert.equal(figure(4.77e-6), "4.77e-6");
  assert.equal(figure(2_000_000), "2e6");
  assert.equal(figure(1 / 3, 2), "0.33");
  assert.equal(figure(null), "–");
  assert.equal(figure(undefined), "–");
});

test("thousands stand apart in the same way in every browser", () => {
  assert.deepEqual([0, 999, 1600, 1234567].map((value) => grouped(value)), ["0", "999", "1,600", "1,234,567"]);
  assert.equal(grouped(0.12345, 2), "0.12");
});

test("a duration has the two units that matter, and is rounded before it is split", () => {
  assert.deepEqual([0, -3, 0.43, 0.96, 59.4, 59.6, 3570, 3600, 5400, 86399, 90000].map(duration), ["0 s", "0 s", "0.4 s", "1 s", "59 s", "1 min", "1 h 0 min", "1 h 0 min", "1 h 30 min", "1 d 0 h", "1 d 1 h"]);
});

test("sizes have units of 1024 and three digits", () => {
  assert.deepEqual([0, 1023, 1024, 1536, 1023 * 1024, 5 * 2 ** 30, 2 ** 41].map(bytes), ["0 B", "1023 B", "1.00 KiB", "1.50 KiB", "1023 KiB", "5.00 GiB", "2.00 TiB"]);
});

test("one is singular, all others are plural", () => {
  assert.deepEqual([0, 1, 2].map((count) => plural(count, "row", "rows")), ["0 rows", "1 row", "2 rows"]);
});
