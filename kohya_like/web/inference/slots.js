// Control images: an image that is chosen, or dropped or pasted anywhere on the tab, becomes the next one.

import { t, translated } from "../common/language.js";
import { make, rich, say, sharp } from "../common/page.js";
import { uploadImage } from "../common/upload.js";

const MAX_IMAGES = 3;

// page: {root, draft, keep(), known(), status, address()}; known is what the studio says, status where it is said what is going on.
export function makeSlots({ root, draft, keep, known, status, address }) {
  const list = make("div", { class: "kl-inf-slots", role: "group", "aria-label": t`Images` });
  const error = make("p", { class: "kl-error", id: "kl-inf-images-error", hidden: true });
  const file = make("input", { type: "file", id: "kl-inf-file", class: "kl-file", accept: "image/*,.jxl", multiple: true, "aria-describedby": "kl-inf-images-help kl-inf-images-error" });
  const word = make("span", { text: "" });
  const adder = make("div", { class: "kl-inf-slot kl-inf-add" }, file, make("label", { for: file.id, class: "kl-inf-addtext" }, make("strong", { "aria-hidden": "true", text: "+" }), word));
  const help = make("p", { class: "kl-help", id: "kl-inf-images-help" });
  const box = make("div", { class: "kl-field kl-wide" }, make("div", { class: "kl-head" }, make("h2", { text: t`Images` }), make("code", { text: "images" })), list, error, help);
  const clear = () => {
    error.hidden = true;
    file.removeAttribute("aria-invalid");
  };
  file.addEventListener("change", () => {
    take([...file.files]);
    file.value = "";
  });
  const inSight = () => root.offsetParent !== null && !box.hidden;
  const withFiles = (event) => inSight() && event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  addEventListener("dragover", (event) => {
    if (!withFiles(event)) return;
    event.preventDefault();
    adder.classList.add("kl-inf-over");
  });
  addEventListener("dragleave", () => adder.classList.remove("kl-inf-over"));
  addEventListener("drop", (event) => {
    adder.classList.remove("kl-inf-over");
    if (!withFiles(event)) return;
    event.preventDefault();
    take([...event.dataTransfer.files]);
  });
  addEventListener("paste", (event) => {
    const found = inSight() && event.clipboardData ? [...event.clipboardData.files] : [];
    if (!found.length) return;
    event.preventDefault();
    take(found);
  });

  function draw() {
    help.replaceChildren(...rich(translated(known().help.images)));
    list.replaceChildren(...draft.images.map((image, index) => {
      const shown = sharp(make("img", { src: address(image.name, "thumb"), alt: t`Image ${index + 1}` }));
      shown.addEventListener("error", () => {
        // Uploads are kept for a day.
        draft.images = draft.images.filter((each) => each !== image);
        keep();
        draw();
      });
      const remove = make("button", { type: "button", class: "kl-inf-remove", "aria-label": t`Remove image ${index + 1}`, text: "×", onclick: () => {
        draft.images.splice(index, 1);
        clear();
        keep();
        draw();
        file.focus();
      } });
      return make("div", { class: "kl-inf-slot" }, shown, make("span", { class: "kl-corner kl-corner-left", text: draft.images.length > 1 ? String(index + 1) : "" }), remove);
    }));
    word.textContent = draft.images.length ? t`Add an image` : t`Choose, drop or paste an image`;
    if (draft.images.length < MAX_IMAGES) list.append(adder);
  }

  async function take(files) {
    clear();
    for (const each of files) {
      if (draft.images.length >= MAX_IMAGES) break;
      say(status, t`Reading ${each.name || t`the image`} …`);
      try {
        draft.images.push(await uploadImage(each, known().maxBytes));
        keep();
        draw();
        say(status, "");
      } catch (failure) {
        say(status, "");
        error.textContent = failure.message;
        error.hidden = false;
      }
    }
  }

  return { root: box, draw, take, field: { node: file, error, clear } };
}
