// Export for cluster: a small form, and the files that train what is in the form on several machines, to read and to download. Starts nothing.

import { blame, makeBrowse, makeField } from "../common/field.js";
import { t } from "../common/language.js";
import { bring, download, make } from "../common/page.js";
import { store, stored } from "../common/stored.js";
import { post } from "../common/studio.js";
import { plural } from "../common/words.js";
import { onChange, values } from "./settings.js";

const DRAFT = "kl.cluster";

export function cluster({ root, props }) {
  const specs = props.value || [];
  const kept = stored(DRAFT) || {};
  const fields = new Map(); // option -> field
  const texts = () => Object.fromEntries([...fields].filter(([name]) => isMeant(specs.find((spec) => spec.name === name))).map(([name, field]) => [name, field.read()]));
  const wrong = make("div", { class: "kl-error", role: "alert", hidden: true });
  const made = make("section", { class: "kl-exported", hidden: true, tabindex: "-1", "aria-label": t`Files for the cluster` });
  const basics = make("div", { class: "kl-grid" });
  const more = make("div", { class: "kl-grid" });

  // Fields of another kind of cluster are left out.
  function isMeant(spec) {
    return (spec.needs || []).every(({ name, values }) => values.includes(String(fields.get(name).read())));
  }

  function tidy() {
    for (const spec of specs) fields.get(spec.name).root.hidden = !isMeant(spec);
  }

  for (const spec of specs) {
    const field = makeField(spec, `kl-cluster-${spec.name}`, () => {
      store(DRAFT, Object.fromEntries([...fields].map(([name, each]) => [name, each.read()])));
      made.hidden = true;
      tidy();
    });
    if (spec.path) field.node.after(makeBrowse(spec, field.node));
    fields.set(spec.name, field);
    field.set(typeof kept[spec.name] === typeof spec.default ? kept[spec.name] : spec.default);
    (spec.basic ? basics : more).append(field.root);
  }
  tidy();

  // The files are those of the form that they were made from.
  let madeFor = "";
  onChange(() => {
    if (JSON.stringify(values()) !== madeFor) made.hidden = true;
  });

  async function write() {
    button.disabled = true;
    const form = values();
    madeFor = JSON.stringify(form);
    try {
      show(await post("/kl/train/cluster", { form, texts: texts() }));
    } catch (error) {
      show({ problems: [{ option: "", message: t`The studio does not answer: ${error.message}` }] });
    } finally {
      button.disabled = false;
    }
  }

  function show(answer) {
    blame(fields, wrong, answer.problems || []);
    made.hidden = !answer.files;
    if (!answer.files) return;
    const save = make("button", { type: "button", class: "kl-button kl-strong", text: t`Download ${answer.name}`, onclick: () => keep(answer) });
    made.replaceChildren(make("div", { class: "kl-row kl-between" }, make("h3", { text: plural(answer.files.length, "file", "files") }), save),
      ...answer.files.map(({ name, text }) => make("details", { class: "kl-fold" }, make("summary", {}, make("code", { text: name })),
        make("pre", { tabindex: "0", role: "region", "aria-label": name }, make("code", { text })))));
    made.focus();
  }

  function keep({ name, zip }) {
    const bytes = Uint8Array.from(atob(zip), (letter) => letter.charCodeAt(0));
    download(name, new Blob([bytes], { type: "application/zip" }));
  }

  const button = make("button", { type: "button", class: "kl-button", text: t`Write the files`, onclick: write });
  root.append(make("details", { class: "kl-card kl-section kl-export" },
    make("summary", {}, make("h2", { class: "kl-title", text: t`Export for cluster` }), make("span", { class: "kl-hint", text: t`Slurm, torchrun, Kubernetes` })),
    make("div", { class: "kl-body" },
      make("p", { class: "kl-note", text: t`Files that train what is in the form on several machines. Nothing is started, and nothing is written here.` }),
      basics, make("details", { class: "kl-fold", ontoggle: (event) => event.target.open && bring(more) }, make("summary", {}, make("span", { text: t`More` })), more),
      make("div", { class: "kl-row" }, button), wrong, made)));
}
