// What is pasted is known for what it is, and other texts are left to the browser.

import assert from "node:assert/strict";
import { test } from "node:test";
import { nameOfPasted } from "../../kohya_like/web/train/pasted.js";

test("lines, scripts and settings are told apart by what they look like", () => {
  const texts = {
    "pasted.txt": ["accelerate launch sdxl_train_network.py --network_dim 8", "python run.py config/job.yml", "A=1 deepspeed --num_gpus=1 train.py --deepspeed --config a.toml"],
    "pasted.json": ['{"network_dim": 8}', '\n{\n  "config": {"name": "x"}\n}\n'],
    "pasted.toml": ["network_dim = 8\nlearning_rate = 1e-4", '[network]\nnetwork_dim = 8\n', "[[datasets]]\n[[datasets.subsets]]\n"],
    "pasted.yaml": ["job: extension\nconfig:\n  name: mine\n  process:\n", "model:\r\n  arch: flux\r\n"],
    "": ["", "a photo of a cat", "see python.org for more", "a = b", "Note: this is text\nand more: of it", "https://a.b/c.json"],
  };
  for (const [name, some] of Object.entries(texts)) for (const text of some) assert.equal(nameOfPasted(text), name, text);
});
