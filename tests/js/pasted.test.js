// What is pasted is known for what it is, and other texts are left to the browser. The studio is asked of the same texts in
// tests/ui/test_importers_lines.py.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";
import { nameOfPasted } from "../../kohya_like/web/train/pasted.js";

const texts = JSON.parse(await readFile(new URL("../ui/pasted_texts.json", import.meta.url), "utf-8"));

test("lines, scripts and settings are told apart by what they look like", () => {
  for (const [name, some] of Object.entries(texts)) for (const text of some) assert.equal(nameOfPasted(text), name, text);
});
