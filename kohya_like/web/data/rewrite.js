// Search and replace, prefix and suffix for the captions of the images that are shown: first a preview, then the change, which Undo takes back.

import { t, translated } from "../common/language.js";
import { make, say } from "../common/page.js";
import { plural } from "../common/words.js";
import { openDialog } from "../picking/dialog.js";

// after(texts) is told what was written.
export function rewrite(desk, indices, after) {
  const field = (id, text) => make("input", { type: "text", id: `kl-data-${id}`, "aria-label": text, placeholder: text, autocomplete: "off", spellcheck: "false" });
  const check = (id, text) => {
    const box = make("input", { type: "checkbox", id: `kl-data-${id}` });
    return { box, root: make("label", { class: "kl-toggle", for: box.id }, box, make("span", { text })) };
  };
  const texts = { find: field("find", t`Find`), replace: field("replace", t`Replace by`), prefix: field("prefix", t`Put before`), suffix: field("suffix", t`Put behind`) };
  const regex = check("regex", t`Regular expression`);
  const exact = check("case", t`Match case`);
  const rows = make("div", { class: "kl-data-rows", tabindex: "0", role: "region", "aria-label": t`Preview`, hidden: true });
  const status = make("p", { class: "kl-status", role: "status", text: t`For ${plural(indices.length, "image", "images")}, those that are shown.` });
  const apply = make("button", { type: "button", class: "kl-button kl-strong", text: t`Change them`, disabled: true, onclick: () => go(digest) });
  const look = make("button", { type: "button", class: "kl-button", text: t`Preview`, onclick: () => go(null) });
  const close = make("button", { type: "button", class: "kl-button", text: t`Close`, "aria-label": t`Close without changing`, onclick: () => dialog.close() });
  const dialog = openDialog(t`Search and replace`, make("div", { class: "kl-data-fields" }, ...Object.values(texts)), make("div", { class: "kl-row" }, regex.root, exact.root), status, rows,
    make("div", { class: "kl-row" }, look, apply, close));
  let digest = null;
  texts.find.focus();
  for (const input of [...Object.values(texts), regex.box, exact.box]) {
    input.addEventListener("input", () => (apply.disabled = true));
    input.addEventListener("keydown", (event) => event.key === "Enter" && go(null));
  }

  async function go(known) {
    const order = { ...Object.fromEntries(Object.entries(texts).map(([name, input]) => [name, input.value])), regex: regex.box.checked, case: exact.box.checked };
    const answer = await desk.order("change", { indices, order, known });
    if (answer.problem) {
      say(status, translated(answer.problem));
      return;
    }
    if (known !== null) {
      dialog.close();
      after(answer.texts);
      return;
    }
    digest = answer.digest;
    apply.disabled = answer.count === 0;
    say(status, answer.count ? t`Would change: ${plural(answer.count, "caption", "captions")}${answer.count > answer.rows.length ? t`; the first ${answer.rows.length} are shown` : ""}.` : t`No caption changes.`);
    rows.hidden = !answer.count;
    rows.replaceChildren(...answer.rows.map((row) => make("div", {}, make("strong", { text: desk.known.items[row.index].name }), make("del", { text: row.before || t`(no caption)` }), make("ins", { text: row.after || t`(an empty text)` }))));
  }
}
