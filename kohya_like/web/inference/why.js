// "Why does it look different?": an image that another program made, and which of its settings are not those of the form. Talks with
// /kl/predict/why.

import { html, render } from "../common/html.js";
import { t, translated } from "../common/language.js";
import { bring, make } from "../common/page.js";
import { ask } from "../common/studio.js";

const ENOUGH = 8 << 20; // bytes of a file, in whose beginning its texts stand
const MARKS = { differs: t`differs`, "only there": t`only there`, same: t`the same` };

// asked() gives {texts, loras} of the form.
export function makeWhy(asked) {
  const file = make("input", { type: "file", id: "kl-inf-why", class: "kl-file", accept: "image/png", "aria-describedby": "kl-inf-why-help" });
  const told = make("div", { class: "kl-inf-told", role: "status" });
  const help = make("p", { class: "kl-help", id: "kl-inf-why-help", text: t`Give a PNG as ComfyUI or A1111 saved it. Its settings are listed beside those of the form, what differs first; nothing is kept.` });
  const root = make("details", { class: "kl-tool-more kl-inf-why" }, make("summary", { text: t`Why does it look different?` }), make("span", { class: "kl-upload" }, file, make("label", { for: file.id, class: "kl-button", text: t`Image of another program` })), help, told);
  file.addEventListener("change", async () => {
    const [chosen] = file.files;
    if (!chosen) return;
    try {
      const answer = await ask("/kl/predict/why", { method: "POST", body: new Blob([JSON.stringify(asked()), "\n", chosen.slice(0, ENOUGH)]) });
      if (answer.problems) throw new Error(answer.problems.map(({ message }) => translated(message)).join(" "));
      render(table(answer), told);
    } catch (error) {
      render(html`<p class="kl-error" role="alert">${error.message}</p>`, told);
    }
    bring(told);
    // The same file can be given again when the form has changed.
    file.value = "";
  });
  return root;
}

function table({ program, rows }) {
  const differing = rows.filter(({ verdict }) => verdict !== "same").length;
  return html`<p>${differing ? t`Made by ${program}. ${differing} of ${rows.length} settings are not those of the form.` : t`Made by ${program}. All settings that it tells are those of the form.`}</p>
    <div class="kl-pick-scroll" role="region" tabindex="0" aria-label=${t`Settings of both`}><table class="kl-table"><thead><tr><th>${t`Setting`}</th><th></th><th>${t`There`}</th><th>${t`Here`}</th></tr></thead>
    <tbody>${rows.map(({ label, theirs, there, ours, here, verdict }) => html`<tr><th scope="row">${translated(label)}</th><td>${verdict === "same" ? MARKS.same : html`<strong>${MARKS[verdict]}</strong>`}</td><td>${theirs || translated(there) || "–"}</td><td>${ours || translated(here) || "–"}</td></tr>`)}</tbody></table></div>`;
}
