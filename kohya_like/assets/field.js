// Controls of the forms beside the Train tab's: one field of an option, and the place where it is said what is wrong with it.
(() => {
  "use strict";
  if (window.kl.field) return;

  const { make, rich, input, shownDefault } = window.kl.form;

  // edited() is called for each change. more: note, a sentence before the facts; beside and below, nodes next to the control and under it.
  window.kl.field = (spec, ident, edited, more = {}) => {
    const isCheck = spec.control === "check";
    const node = input(spec, ident);
    const facts = [spec.range, spec.required && !spec.default ? "required" : `default ${shownDefault(spec)}`].filter(Boolean).join(" · ");
    const help = make("p", { class: "kl-help", id: `${ident}-help` }, ...rich(`${spec.help} ${more.note || ""}`), make("span", { class: "kl-facts", text: facts }));
    const error = make("p", { class: "kl-error", id: `${ident}-error`, hidden: true });
    const label = make("label", { for: ident, text: spec.label });
    const head = make("div", { class: "kl-head" }, isCheck ? node : null, label, make("code", { text: spec.name }));
    const unit = spec.unit ? make("span", { class: "kl-unit", text: spec.unit }) : null;
    const body = isCheck ? null : make("div", { class: "kl-control" }, node, unit, ...(more.beside || []));
    if (spec.suggestions) body.append(make("datalist", { id: `${ident}-list` }, ...spec.suggestions.map((text) => make("option", { value: text }))));
    const clear = () => {
      error.hidden = true;
      node.removeAttribute("aria-invalid");
    };
    node.addEventListener(isCheck || spec.control === "select" ? "change" : "input", () => {
      clear();
      edited();
    });
    const wide = spec.path || spec.control === "lines" || spec.control === "area";
    return {
      root: make("div", { class: `kl-field${wide ? " kl-wide" : ""}` }, head, body, more.below || null, error, help),
      node, error, clear,
      read: () => (isCheck ? node.checked : node.value),
      set: (text) => (isCheck ? (node.checked = text === true) : (node.value = text)),
    };
  };

  // Puts each problem at its field, the others into `wrong`, and goes to the first. fields: option -> {node, error, clear}.
  window.kl.blame = (fields, wrong, problems) => {
    for (const field of fields.values()) field.clear();
    const loose = [];
    let first = null;
    for (const { option, message } of problems) {
      const field = fields.get(option);
      if (!field) {
        loose.push(message);
        continue;
      }
      field.error.textContent = [field.error.hidden ? "" : field.error.textContent, message.replace(`${option}: `, "")].filter(Boolean).join(" ");
      field.error.hidden = false;
      field.node.setAttribute("aria-invalid", "true");
      const fold = field.node.closest("details");
      if (fold) fold.open = true;
      first = first || field.node;
    }
    wrong.replaceChildren(...loose.map((text) => make("p", { text })));
    wrong.hidden = loose.length === 0;
    if (first) first.focus();
    else if (loose.length) window.kl.tools.bring(wrong);
  };
})();
