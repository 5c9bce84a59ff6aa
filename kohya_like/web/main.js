// The entry of the page: what draws each of its parts. Python's page.part() makes the places for them.

import { top } from "./common/top.js";
import { guide, reference } from "./help/help.js";
import { panel, runs } from "./runs/runs.js";
import { tools } from "./tools/tools.js";
import { cluster } from "./train/cluster.js";
import { answers } from "./train/answers.js";
import { fieldset, toolbar } from "./train/form.js";
import { keep } from "./train/imports.js";
import { memory } from "./train/memory.js";
import { kinds, presets, welcome } from "./train/presets.js";
import { foresight } from "./train/starting.js";
import { sweep } from "./train/sweeping.js";

// Fetched when it is shown for the first time.
const inference = async (place) => (await import("./inference/inference.js")).inference(place);

const data = async (place) => (await import("./data/data.js")).data(place);

const PARTS = { top, data, kinds, presets, welcome, fieldset, toolbar, foresight, memory, cluster, sweep, answers, keep, panel, runs, tools, inference, guide, reference };

// name: that of a part, and after a colon what it shall show. The rest is what gradio gives to a component's own code.
export function mount(name, element, props, trigger, watch) {
  const [kind, detail] = name.split(/:(.*)/);
  const root = element.querySelector(".kl-part, .kl-live");
  root.replaceChildren();
  PARTS[kind]({ element, root, props, trigger, watch, detail });
}
