// What Undo brings back, and what the palette finds.

import assert from "node:assert/strict";
import { test } from "node:test";
import { found } from "../../kohya_like/web/palette/finding.js";
import { History } from "../../kohya_like/web/train/history.js";

test("a history goes back and forth, and forgets what was undone when something new is done", () => {
  const of = (value) => ({ run: "a", mode: "m", values: { x: value } });
  const history = new History(of("1"));
  assert.equal(history.back(), null);
  assert.equal(history.note(of("1")), false);
  assert.equal(history.note(of("2")), true);
  history.note(of("3"));
  assert.deepEqual(history.back(), of("2"));
  assert.deepEqual(history.back(), of("1"));
  assert.equal(history.back(), null);
  assert.deepEqual(history.forth(), of("2"));
  history.note(of("4"));
  assert.equal(history.forth(), null);
  assert.deepEqual(history.back(), of("2"));
});

test("the palette finds what has all words, and what begins with them first", () => {
  const entries = [{ words: "Text encoder LR", also: "text_encoder_lr learning rate" }, { words: "UNet learning rate" }, { words: "Learning rate" }, { words: "Start training" }];
  assert.deepEqual(found(entries, "LEARNING  rate").map(({ words }) => words), ["Learning rate", "UNet learning rate", "Text encoder LR"]);
  assert.deepEqual(found(entries, "nothing"), []);
  assert.equal(found(entries, "").length, 4);
});
