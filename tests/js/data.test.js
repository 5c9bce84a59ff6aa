// What the Data tab counts in captions.

import assert from "node:assert/strict";
import { test } from "node:test";
import { aboutTokens } from "../../kohya_like/web/data/tokens.js";

test("tokens are counted about: words, long words in parts, marks and numbers each", () => {
  assert.equal(aboutTokens(""), 0);
  assert.equal(aboutTokens("a cat, sitting"), 5);
  assert.equal(aboutTokens("antidisestablishmentarianism"), 6);
  assert.equal(aboutTokens("1024 x"), 5);
  assert.equal(aboutTokens("\u732b\u72ac"), 2);
});
