// Duplicates and blurred images, as proposals: nothing is left out that nobody has ticked.

import { make, say } from "../common/page.js";
import { eachLine, headers } from "../common/studio.js";
import { plural } from "../common/words.js";
import { openDialog } from "../picking/dialog.js";

const SHOWN_GROUPS = 200;

export async function proposals(desk, bar, status, { mark, leaveOut }) {
  /** @type {any} */
  let last = { problem: "The studio went away before it had looked at all." };
  bar.root.hidden = false;
  try {
    await eachLine(await fetch("/kl/data/triage", { method: "POST", headers: headers(), body: JSON.stringify({ room: desk.known.room }) }), (said) => {
      last = said;
      if (said.of) bar.show(said.done / said.of);
      if (said.of) say(status, `Comparing: ${said.done} of ${said.of} images …`);
    });
  } catch (error) {
    last = { problem: error.message };
  }
  bar.root.hidden = true;
  say(status, last.problem || "");
  if (last.problem) return;
  const small = desk.known.items.flatMap((item, index) => (item.small ? [index] : []));
  const marks = new Map();
  for (const [word, groups] of [["blurred", [[-1, ...last.blurred]]], ["nearly the same", last.near], ["the same file", last.same]]) {
    for (const [, ...others] of groups) for (const index of others) marks.set(index, word);
  }
  mark(marks);
  show(last, small);

  function show({ same, near, blurred, unreadable }, tiny) {
    const ticked = new Set();
    const go = make("button", { type: "button", class: "kl-button kl-strong", text: "Leave out", disabled: true, onclick: async () => {
      dialog.close();
      await leaveOut([...ticked]);
    } });
    const close = make("button", { type: "button", class: "kl-button", text: "Close", "aria-label": "Close the proposals", onclick: () => dialog.close() });
    const tick = (index, isOn) => {
      if (isOn) ticked.add(index);
      else ticked.delete(index);
      go.disabled = !ticked.size;
      go.textContent = ticked.size ? `Leave out ${plural(ticked.size, "image", "images")}` : "Leave out";
    };
    const choice = (index, isProposed, kind) => {
      const box = make("input", { type: "checkbox", id: `kl-data-${kind}-${index}`, checked: isProposed });
      const item = desk.known.items[index];
      box.addEventListener("change", () => tick(index, box.checked));
      if (isProposed) tick(index, true);
      return make("label", { class: "kl-data-choice", for: box.id }, make("img", { src: desk.image(index), alt: "", loading: "lazy" }), make("span", { text: `${item.name}, ${item.size.join(" x ")}` }), box);
    };
    // Of those that are the same the best stays; what is blurred or small is shown, and nothing of it is ticked.
    const groups = (title, kind, found, proposes) => (found.length ? [make("h3", { text: `${title}: ${found.length}` }), ...found.slice(0, SHOWN_GROUPS).map((group) => make("div", { class: "kl-data-group" }, ...group.map((index, place) => choice(index, proposes && place > 0, kind)))),
      found.length > SHOWN_GROUPS ? make("p", { class: "kl-note", text: `The first ${SHOWN_GROUPS} are shown; look again afterwards.` }) : null] : []);
    const body = [...groups("The same file", "same", same, true), ...groups("Nearly the same", "near", near, true), ...groups("Blurred", "blurred", blurred.map((index) => [index]), false), ...groups("Small for the training size", "small", tiny.map((index) => [index]), false),
      ...unreadable.map(({ index, why }) => make("p", { class: "kl-note", text: `${desk.known.items[index].name} ${why}` }))].filter(Boolean);
    const dialog = openDialog("Proposals", make("p", { class: "kl-note", text: body.length ? "What is ticked would be left out: moved, with its caption, to a hidden folder of the data set, from where it can be brought back." : "No duplicates, nothing blurred, nothing small." }),
      make("div", { class: "kl-data-rows", tabindex: "0", role: "region", "aria-label": "What was found" }, ...body), make("div", { class: "kl-row" }, go, close));
  }
}
