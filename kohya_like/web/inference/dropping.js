// A LoRA file of the reader's own computer becomes something to draw with: dropped anywhere on the tab, or chosen. Talks with the route
// /kl/predict/drop of kohya_like/dropped.py.

import { t, translated } from "../common/language.js";
import { make, say } from "../common/page.js";
import { headers } from "../common/studio.js";

const MODELS = /\.(safetensors|sft|ckpt|pt|pth|bin|gguf)$/i;

// page: {root, known(), status, wrong(messages), address, take(path)}; known is what the studio says, take draws with a path of its computer.
export function makeDropping({ root, known, status, wrong, address, take }) {
  const file = make("input", { type: "file", id: "kl-inf-drop", class: "kl-file", accept: ".safetensors" });
  const label = make("label", { class: "kl-inf-drop", for: file.id, text: t`Drop a LoRA file here, or choose one of your computer` });
  const box = make("div", { class: "kl-inf-dropping" }, file, label);
  let busy = false;

  file.addEventListener("change", () => {
    accept([...file.files]);
    file.value = "";
  });
  const inSight = () => known() && known().choice.draws && !box.hidden && root.offsetParent !== null;
  const ofModels = (event) => inSight() && event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  addEventListener("dragover", (event) => {
    if (!ofModels(event)) return;
    event.preventDefault();
    box.classList.add("kl-inf-over");
  });
  addEventListener("dragleave", () => box.classList.remove("kl-inf-over"));
  // Before the control images, which take what is left.
  addEventListener("drop", (event) => {
    box.classList.remove("kl-inf-over");
    if (!ofModels(event)) return;
    const files = [...event.dataTransfer.files];
    if (known().choice.edits && !files.some((each) => MODELS.test(each.name))) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    accept(files);
  }, true);

  async function accept(files) {
    if (busy || !files.length) return;
    const [chosen] = files;
    if (files.length > 1) return wrong([t`Drop one file at a time; further LoRA files are added below.`]);
    if (!/\.safetensors$/i.test(chosen.name)) return wrong([t`${chosen.name} is not a .safetensors file; files of other kinds can run code when they are read, and images belong to models that edit.`]);
    if (chosen.size > known().maxDropBytes) return wrong([t`${chosen.name} is larger than ${known().maxDropBytes / 2 ** 30} GiB, which is the most; copy it to the studio's computer, and give its path.`]);
    busy = true;
    box.setAttribute("aria-busy", "true");
    try {
      const answer = await sent(chosen);
      say(status, "");
      if (answer.problems) wrong(answer.problems.map(({ message }) => translated(message)));
      else await take(answer.path);
    } catch (error) {
      say(status, "");
      wrong([error.message]);
    } finally {
      busy = false;
      box.removeAttribute("aria-busy");
    }
    return undefined;
  }

  // Not by fetch, which does not tell how much has gone out.
  function sent(chosen) {
    return new Promise((resolve, reject) => {
      const request = new XMLHttpRequest();
      request.open("POST", `${address}&name=${encodeURIComponent(chosen.name)}`);
      for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
      request.responseType = "json";
      say(status, t`Reading ${chosen.name} …`);
      request.upload.onprogress = ({ loaded, total }) => total > 50e6 && say(status, t`Reading ${chosen.name}: ${Math.floor((100 * loaded) / total)} %`);
      request.onload = () => (request.status === 200 && request.response ? resolve(request.response) : reject(new Error(t`The studio answered ${request.status}.`)));
      request.onerror = () => reject(new Error(t`${chosen.name} could not be sent to the studio; drop it again.`));
      request.send(chosen);
    });
  }

  return { root: box };
}
