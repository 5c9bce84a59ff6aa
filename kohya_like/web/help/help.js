// The Help tab: every option, searchable.

import schema from "../schema.js";
import { shownDefault } from "../common/field.js";
import { t, translated } from "../common/language.js";
import { make, rich } from "../common/page.js";
import { plural } from "../common/words.js";
import { groupsOf, onChange, run, specsOf } from "../train/settings.js";

export function reference({ root }) {
  const search = make("input", { type: "search", "aria-label": t`Search the options`, placeholder: t`Search the options`, autocomplete: "off" });
  const status = make("p", { class: "kl-status", role: "status" });
  const heading = make("h2", { text: t`Options` });
  const body = make("div");
  let drawn = "";
  let entries = [];
  let sections = [];

  function describe(spec, title) {
    const facts = [spec.choices && spec.choices.join(" | "), spec.unit, spec.range, spec.required ? t`required` : t`default ${shownDefault(spec)}`];
    const entry = make("div", { class: "kl-entry" }, make("dt", {}, make("code", { text: `--${spec.name}` })),
      make("dd", {}, ...rich(`${spec.help} `), make("span", { class: "kl-facts", text: facts.filter(Boolean).join(" · ") })));
    entries.push({ entry, text: `${spec.name} ${spec.label} ${spec.help} ${translated(title)}`.toLowerCase() });
    return entry;
  }

  function draw() {
    if (drawn === run) return;
    drawn = run;
    entries = [];
    heading.textContent = t`Options of ${schema.runs[drawn].label}`;
    sections = groupsOf(drawn).map(({ title, blocks }) =>
      make("section", {}, make("h3", { text: translated(title) }), make("dl", {}, ...blocks.flatMap(specsOf).map((spec) => describe(spec, title)))));
    body.replaceChildren(...sections);
    sift();
  }

  function sift() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const { entry, text } of entries) {
      entry.hidden = !words.every((word) => text.includes(word));
      count += entry.hidden ? 0 : 1;
    }
    for (const section of sections) section.hidden = [...section.querySelectorAll(".kl-entry")].every((entry) => entry.hidden);
    status.textContent = words.length ? plural(count, "option", "options") : "";
  }

  search.addEventListener("input", sift);
  // Only for somebody who looks: the tab is drawn when it is opened.
  new IntersectionObserver((seen) => seen.some((each) => each.isIntersecting) && draw()).observe(search);
  onChange(() => heading.offsetParent !== null && draw());
  root.append(make("div", { class: "kl-card kl-reference" }, heading, search, status, body));
}
