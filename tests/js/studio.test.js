// How often the page asks its studio.

import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { setImmediate as settled } from "node:timers/promises";
import { repeat } from "../../kohya_like/web/common/studio.js";

const seen = /** @type {any} */ ({ isConnected: true, offsetParent: {} });
globalThis.document = /** @type {any} */ ({ hidden: false, addEventListener() {} });
mock.timers.enable({ apis: ["setTimeout"] });

test("what is asked for while an answer is on its way is asked for once more after it, and not beside it", async () => {
  /** @type {((pause: number) => void)[]} */
  const waiting = [];
  let atOnce = 0;
  let most = 0;
  const turn = repeat(seen, async () => {
    most = Math.max(most, ++atOnce);
    const pause = await new Promise((answered) => waiting.push(answered));
    atOnce -= 1;
    return pause;
  });
  assert.equal(waiting.length, 1);
  let told = 0;
  for (let call = 0; call < 2; call++) turn().then(() => told++);
  assert.equal(waiting.length, 1, "one at a time");
  waiting[0](60);
  await settled();
  assert.equal(waiting.length, 2, "without the pause, and once for both");
  assert.equal(told, 0, "a caller waits for what was asked after it called");
  waiting[1](60);
  await settled();
  assert.equal(told, 2);
  assert.equal(waiting.length, 2);
  turn();
  assert.equal(waiting.length, 3, "and at once where nothing is on its way");
  waiting[2](8);
  await settled();
  mock.timers.tick(7999);
  assert.equal(waiting.length, 3);
  mock.timers.tick(1);
  assert.equal(waiting.length, 4, "again by itself after the pause");
  assert.equal(most, 1);
});

test("what cannot be seen asks nothing, however often it is called", async () => {
  let count = 0;
  const hidden = /** @type {any} */ ({ isConnected: true, offsetParent: null });
  const turn = repeat(hidden, () => {
    count += 1;
    return 60;
  });
  await Promise.all([turn(), turn()]);
  hidden.offsetParent = {};
  await turn();
  assert.equal(count, 1);
});
