// The grid of a comparison.

import assert from "node:assert/strict";
import { test } from "node:test";
import { byPrompt, neighbour } from "../../kohya_like/web/inference/cells.js";

test("an arrow goes to the next image that is drawn, and stays where there is none", () => {
  const there = [[true, false, true], [false, true, false]];
  assert.deepEqual(neighbour(there, { row: 0, column: 0 }, [0, 1]), { row: 0, column: 2 });
  assert.deepEqual(neighbour(there, { row: 0, column: 2 }, [0, -1]), { row: 0, column: 0 });
  for (const move of [[1, 0], [-1, 0], [0, -1]]) assert.deepEqual(neighbour(there, { row: 0, column: 0 }, move), { row: 0, column: 0 });
});

test("rows of one prompt stand together, in their order", () => {
  const rows = ["a", "a", "b", "a"].map((prompt) => ({ prompt }));
  assert.deepEqual(byPrompt(rows), [{ prompt: "a", rows: [0, 1] }, { prompt: "b", rows: [2] }, { prompt: "a", rows: [3] }]);
});
