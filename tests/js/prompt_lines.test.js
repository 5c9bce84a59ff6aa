// Sample prompts as kohya's lines.

import assert from "node:assert/strict";
import { test } from "node:test";
import { isFile, parse, serialise, setFlag, setFurther } from "../../kohya_like/web/train/prompt_lines.js";

test("a line is a prompt and its flags; blanks and comments are kept beside them", () => {
  const lines = parse("a cat --w 512 --n blurry, low\r\n\n# a note --w 3\nx--y --d 7");
  assert.deepEqual(lines.map(({ prompt, flags }) => [prompt, flags]), [
    ["a cat", [{ name: "w", value: "512" }, { name: "n", value: "blurry, low" }]], [undefined, undefined], [undefined, undefined], ["x--y", [{ name: "d", value: "7" }]],
  ]);
});

test("what nobody edits is written as it was, to the last character", () => {
  for (const text of ["", "\n", " a  cat \t--w  512 ", "a\u2028b\x85c\r\n\r\n", "--", "a --\nb ---w 1"]) assert.equal(serialise(parse(text)), text);
});

test("a flag is set, changed in its place, and taken away", () => {
  const [line] = parse("a cat --w 512 --d 7");
  setFlag(line, "w", "768");
  setFlag(line, "n", "blurry");
  assert.equal(serialise([line]), "a cat --w 768 --d 7 --n blurry");
  setFlag(line, "d", "");
  assert.equal(serialise([line]), "a cat --w 768 --n blurry");
});

test("further flags take the place of those that no column shows", () => {
  const [line] = parse("a cat --w 512 --cn a.png --x 1");
  setFurther(line, new Set(["w"]), "--x 2");
  assert.equal(serialise([line]), "a cat --w 512 --x 2");
});

test("one line that ends like a file is the path of one", () => {
  assert.deepEqual([" prompts.txt ", "a.TOML", "a cat", "a.txt\nb"].map(isFile), [true, true, false, false]);
});
