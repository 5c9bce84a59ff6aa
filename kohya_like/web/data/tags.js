// How often each tag stands in the captions, most frequent first.

import { t } from "../common/language.js";
import { make, say } from "../common/page.js";
import { plural } from "../common/words.js";
import { openDialog } from "../picking/dialog.js";

const SHOWN = 400;

// texts of captions -> [[tag, count]], most frequent first.
export function frequencies(texts, separator) {
  const counts = new Map();
  for (const text of texts) {
    for (const tag of new Set(text.split(separator.trim() || separator).map((part) => part.trim()).filter(Boolean))) counts.set(tag, (counts.get(tag) || 0) + 1);
  }
  return [...counts].sort(([one, many], [other, more]) => more - many || one.localeCompare(other));
}

// take(tag) is told which one somebody wants to see.
export function tags(desk, take) {
  const all = frequencies(desk.texts, desk.known.separator);
  const search = make("input", { type: "search", "aria-label": t`Find a tag`, placeholder: t`Find a tag`, autocomplete: "off" });
  const status = make("p", { class: "kl-status", role: "status" });
  const list = make("div", { class: "kl-data-tags", tabindex: "0", role: "region", "aria-label": t`Tags` });
  const draw = () => {
    const words = search.value.toLowerCase();
    const found = all.filter(([tag]) => tag.toLowerCase().includes(words));
    say(status, `${plural(found.length, "tag", "tags")}${found.length > SHOWN ? t`, the first ${SHOWN} are shown` : ""}`);
    list.replaceChildren(...found.slice(0, SHOWN).map(([tag, count]) => make("button", { type: "button", class: "kl-chip", text: `${tag.length > 80 ? `${tag.slice(0, 80)} …` : tag} ${count}`, "aria-label": t`Show ${tag}, ${count}`, onclick: () => {
      dialog.close();
      take(tag);
    } })));
  };
  search.addEventListener("input", draw);
  const dialog = openDialog(t`Tags`, search, status, list, make("div", { class: "kl-row" }, make("button", { type: "button", class: "kl-button", text: t`Close`, "aria-label": t`Close the tags`, onclick: () => dialog.close() })));
  draw();
}
