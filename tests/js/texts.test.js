// What the text in a control means.

import assert from "node:assert/strict";
import { test } from "node:test";
import { same, withPoint, withPoints } from "../../kohya_like/web/train/texts.js";

test("a decimal comma becomes a point, one that may part thousands stays", () => {
  const written = { "0,5": "0.5", " -1,25e-4 ": "-1.25e-4", ",5": ".5", "0,500": "0.500", "1,000": "1,000", "12,345": "12,345", "1,2,3": "1,2,3", "1.5": "1.5", "": "", abc: "abc" };
  for (const [text, point] of Object.entries(written)) assert.equal(withPoint(text), point);
});

test("between spaces a comma is a decimal sign", () => {
  const written = { "0,5 1": "0.5 1", " 0,5; 1,25e-4, 2": "0.5 1.25e-4 2", "1,5": "1,5", "1,2,3 4": "1,2,3 4", "1, 2": "1, 2", "0.5 1": "0.5 1", "1,000 2": "1,000 2", "": "" };
  for (const [text, points] of Object.entries(written)) assert.equal(withPoints(text), points);
});

test("texts mean the same as numbers where the option is one, and as words elsewhere", () => {
  assert.ok(same({ control: "number" }, "1e-4", "0.0001"));
  assert.ok(!same({ control: "number" }, "", "0"));
  assert.ok(!same({ control: "number" }, "1", "2"));
  assert.ok(!same({ control: "text" }, "1.0", "1"));
  assert.ok(same({ control: "check" }, true, true) && !same({ control: "check" }, true, false));
});

test("a size of one number is a square, and separators do not matter", () => {
  assert.ok(same({ control: "size" }, "512", "512,512"));
  assert.ok(same({ control: "size" }, "512x768", "512 768"));
  assert.ok(!same({ control: "size" }, "512", "512,768"));
  assert.ok(same({ control: "numbers" }, "1, 2", "1 2") && !same({ control: "numbers" }, "1", "1 1"));
});
