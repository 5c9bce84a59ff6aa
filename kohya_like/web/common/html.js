// What a state looks like, said as markup: `render(html`<p>${text}</p>`, root)` changes what is there to that. Text stays text.

import htm from "../vendor/htm/htm.module.js";
import { h, render } from "../vendor/preact/preact.module.js";

export const html = htm.bind(h);
export { render };
