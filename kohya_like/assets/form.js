// The form of the Train tab: draws the options from window.klSchema, keeps what the person types, searches, and shows what is wrong.
// Text of options and of people only ever enters the page through textContent.
(() => {
  "use strict";
  if (window.kl && window.kl.mount) return;

  const schema = window.klSchema;
  const DRAFT = "kl.draft";
  const SEEN = "kl.seen";
  const parts = {};
  const views = new Map(); // group -> fieldset on the page
  const controls = new Map(); // option -> control on the page
  const drafts = {}; // kind of run -> {option: text}
  const problems = new Map(); // option -> [sentence]
  const filter = { words: [], changed: false, opened: null };
  let run = Object.keys(schema.runs)[0];
  const listeners = [];

  const kl = (window.kl = Object.assign(window.kl || {}, {
    mount(name, element, props, trigger, watch, events) {
      const [kind, detail] = name.split(/:(.*)/);
      const root = element.querySelector(".kl-part") || element;
      root.replaceChildren();
      parts[kind]({ root, props, trigger, watch, detail, events });
    },
    fill,
    focus: goTo,
    make,
    values: () => ({ run, values: { ...drafts[run] } }),
  }));

  // ---- small things

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      if (name === "text") node.textContent = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  // Names in help texts stand between backticks.
  function rich(text) {
    return text.split("`").map((piece, index) => (index % 2 ? make("code", { text: piece }) : document.createTextNode(piece)));
  }

  function stored(key) {
    try {
      return JSON.parse(localStorage.getItem(key));
    } catch (error) {
      console.info("The browser keeps no drafts:", error.message);
      return null;
    }
  }

  function store(key, value) {
    try {
      localStorage.setItem(key, JSON.stringify(value));
    } catch (error) {
      console.info("The browser keeps no drafts:", error.message);
    }
  }

  function plural(count, one, many) {
    return `${count} ${count === 1 ? one : many}`;
  }

  // ---- what is in the form

  const groupsOf = (key) => schema.runs[key].groups;
  const fieldsOf = (key) => groupsOf(key).flatMap((group) => group.fields.map((index) => schema.fields[index]));
  const fieldsIn = (title) => (groupsOf(run).find((group) => group.title === title) || { fields: [] }).fields.map((index) => schema.fields[index]);
  const defaults = (key) => Object.fromEntries(fieldsOf(key).map((spec) => [spec.name, spec.default]));

  function same(spec, left, right) {
    if (left === right) return true;
    if (spec.control === "number" && String(left).trim() !== "" && String(right).trim() !== "") return Number(left) === Number(right);
    if (spec.control === "numbers" || spec.control === "size") {
      const plain = (text) => String(text).split(/[\s,x]+/).filter(Boolean);
      const [a, b] = [plain(left), plain(right)];
      if (spec.control === "size" && a.length === 1) a.push(a[0]);
      if (spec.control === "size" && b.length === 1) b.push(b[0]);
      return a.length === b.length && a.every((item, index) => Number(item) === Number(b[index]));
    }
    return false;
  }

  const isChanged = (spec) => !same(spec, drafts[run][spec.name], spec.default);

  function restore() {
    for (const key of Object.keys(schema.runs)) drafts[key] = defaults(key);
    const draft = stored(DRAFT);
    if (!draft || typeof draft !== "object" || !draft.runs) return;
    for (const [key, values] of Object.entries(draft.runs)) {
      if (!drafts[key]) continue;
      for (const spec of fieldsOf(key)) {
        const text = values[spec.name];
        if (typeof text === typeof spec.default) drafts[key][spec.name] = text;
      }
    }
    if (drafts[draft.run]) run = draft.run;
  }

  let saving = 0;
  function save() {
    saving = 0;
    const kept = {};
    for (const key of Object.keys(drafts)) {
      const different = fieldsOf(key).filter((spec) => drafts[key][spec.name] !== spec.default);
      if (different.length || key === run) kept[key] = Object.fromEntries(different.map((spec) => [spec.name, drafts[key][spec.name]]));
    }
    store(DRAFT, { run, runs: kept });
  }
  function saveSoon() {
    if (!saving) saving = setTimeout(save, 200);
  }
  addEventListener("pagehide", () => saving && save());

  function publish(view) {
    view.props.value = { run, values: Object.fromEntries(fieldsIn(view.title).map((spec) => [spec.name, drafts[run][spec.name]])) };
  }

  function edit(spec, text) {
    drafts[run][spec.name] = text;
    const control = controls.get(spec.name);
    if (problems.delete(spec.name)) showProblem(spec.name);
    if (control) control.mark();
    const view = views.get(spec.group);
    if (view) {
      publish(view);
      view.count();
    }
    saveSoon();
    listeners.forEach((listen) => listen());
  }

  function fill(key, texts) {
    if (!schema.runs[key]) return;
    const other = key !== run;
    run = key;
    const fresh = defaults(key);
    for (const spec of fieldsOf(key)) {
      const text = texts[spec.name];
      if (typeof text === typeof spec.default) fresh[spec.name] = text;
    }
    drafts[key] = fresh;
    problems.clear();
    refresh(other);
    save();
  }

  function refresh(redraw) {
    for (const view of views.values()) {
      if (redraw) view.draw();
      else for (const spec of fieldsIn(view.title)) if (controls.has(spec.name)) controls.get(spec.name).set(drafts[run][spec.name]);
      publish(view);
      view.count();
    }
    for (const name of controls.keys()) showProblem(name);
    applyFilter();
    listeners.forEach((listen) => listen());
  }

  function chooseRun(key) {
    if (!schema.runs[key] || key === run) return;
    const untouched = fieldsOf(key).every((spec) => drafts[key][spec.name] === spec.default);
    if (untouched) {
      const there = new Set(fieldsOf(key));
      for (const spec of fieldsOf(run)) if (there.has(spec) && isChanged(spec)) drafts[key][spec.name] = drafts[run][spec.name];
    }
    run = key;
    problems.clear();
    refresh(true);
    save();
  }

  // ---- one control

  const id = (name) => `kl-${name}`;

  function input(spec) {
    const common = { id: id(spec.name), name: spec.name, autocomplete: "off", spellcheck: "false", "aria-describedby": `${id(spec.name)}-help` };
    if (spec.required) common["aria-required"] = "true";
    if (spec.control === "check") return make("input", { ...common, type: "checkbox" });
    if (spec.control === "select") {
      const node = make("select", common);
      if (spec.optional) node.append(make("option", { value: "", text: "none" }));
      node.append(...spec.choices.map((choice) => make("option", { value: choice, text: choice })));
      return node;
    }
    if (spec.control === "lines" || spec.control === "area") {
      const rows = spec.control === "area" ? "3" : "2";
      return make("textarea", { ...common, rows, placeholder: spec.control === "lines" ? "one a line" : null });
    }
    const node = make("input", { ...common, type: "text" });
    if (spec.control === "number") node.inputMode = /^-?\d+$/.test(spec.default) ? "numeric" : "decimal";
    if (spec.optional) node.placeholder = "none";
    if (spec.control === "numbers") node.placeholder = "numbers with spaces between them";
    if (spec.suggestions) node.setAttribute("list", `${id(spec.name)}-list`);
    return node;
  }

  function shownDefault(spec) {
    if (spec.control === "check") return spec.default ? "on" : "off";
    return spec.default === "" ? (spec.optional ? "none" : "empty") : spec.default.replace(/\n/g, ", ");
  }

  function drawControl(spec) {
    const node = input(spec);
    const isCheck = spec.control === "check";
    const wide = spec.control === "area" || spec.control === "lines" || (spec.group === "Basics" && spec.control === "text");
    const facts = [spec.range, spec.required ? "required" : `default ${shownDefault(spec)}`].filter(Boolean).join(" · ");
    const help = make("p", { class: "kl-help", id: `${id(spec.name)}-help` }, ...rich(`${spec.help} `), make("span", { class: "kl-facts", text: facts }));
    const error = make("p", { class: "kl-error", id: `${id(spec.name)}-error`, hidden: true });
    const reset = make("button", {
      type: "button", class: "kl-reset", hidden: true, text: "reset", "aria-label": `Reset ${spec.label} to ${shownDefault(spec)}`,
      onclick: () => {
        set(spec.default);
        edit(spec, spec.default);
        node.focus();
      },
    });
    const label = make("label", { for: id(spec.name), text: spec.label });
    const head = make("div", { class: "kl-head" }, isCheck ? node : null, label, make("code", { text: spec.name }), reset);
    const body = isCheck ? null : make("div", { class: "kl-control" }, node, spec.unit ? make("span", { class: "kl-unit", text: spec.unit }) : null);
    if (spec.suggestions) {
      body.append(make("datalist", { id: `${id(spec.name)}-list` }, ...spec.suggestions.map((text) => make("option", { value: text }))));
    }
    const root = make("div", { class: `kl-field${wide ? " kl-wide" : ""}`, "data-name": spec.name }, head, body, error, help);
    const read = () => (isCheck ? node.checked : node.value);

    function set(text) {
      if (isCheck) {
        node.checked = text === true;
      } else if (node.value !== text) {
        // A value that the list does not have (an old file) is shown as it is, so that the error has something to point at.
        if (spec.control === "select" && ![...node.options].some((option) => option.value === text)) node.append(make("option", { value: text, text }));
        node.value = text;
      }
      control.mark();
    }
    const control = {
      root, node, set, error, spec,
      mark() {
        const changed = isChanged(spec);
        root.classList.toggle("kl-changed", changed);
        reset.hidden = !changed || spec.required === true;
      },
    };
    node.addEventListener(isCheck || spec.control === "select" ? "change" : "input", () => edit(spec, read()));
    controls.set(spec.name, control);
    set(drafts[run][spec.name]);
    return root;
  }

  function showProblem(name) {
    const control = controls.get(name);
    if (!control) return;
    const sentences = problems.get(name) || [];
    const { node, error, root, spec } = control;
    error.hidden = sentences.length === 0;
    // The name and the help stand beside it already.
    error.textContent = sentences.map((text) => (text === `${name} is missing: ${spec.help}` ? "This is required." : text.replace(`${name}: `, ""))).join(" ");
    root.classList.toggle("kl-wrong", sentences.length > 0);
    if (sentences.length) node.setAttribute("aria-invalid", "true");
    else node.removeAttribute("aria-invalid");
    node.setAttribute("aria-describedby", sentences.length ? `${id(name)}-error ${id(name)}-help` : `${id(name)}-help`);
  }

  // ---- one group

  function drawGrid(specs) {
    const blocks = [];
    let about = null;
    for (const spec of specs) {
      if (spec.about !== about) {
        about = spec.about;
        blocks.push({ about, nodes: [] });
      }
      blocks[blocks.length - 1].nodes.push(drawControl(spec));
    }
    return blocks.flatMap(({ about: text, nodes }) => [
      blocks.length > 1 ? make("h3", { class: "kl-about", text }) : null,
      make("div", { class: "kl-grid" }, ...nodes),
    ]).filter(Boolean);
  }

  parts.fieldset = ({ root, props, detail: title }) => {
    const basics = title === "Basics";
    const view = { title, props, details: null, built: false, draw, count() {}, build() {} };
    views.set(title, view);

    function draw() {
      root.replaceChildren();
      view.built = false;
      const specs = fieldsIn(title);
      root.hidden = specs.length === 0;
      for (const spec of specs) controls.delete(spec.name);
      if (!specs.length) return;
      const body = make("div", { class: "kl-body" });
      view.build = () => {
        if (view.built) return;
        view.built = true;
        if (basics) body.append(make("div", { class: "kl-grid" }, ...specs.map(drawControl)));
        else body.append(...drawGrid(specs));
        for (const spec of specs) showProblem(spec.name);
      };
      if (basics) {
        view.details = null;
        root.append(make("section", { class: "kl-card kl-basics", "aria-labelledby": "kl-basics" }, make("h2", { id: "kl-basics", text: "Basics" }), body));
        view.build();
        return;
      }
      const badge = make("span", { class: "kl-badge" });
      const heading = make("h2", { class: "kl-title", text: title });
      const names = specs.slice(0, 4).map((spec) => spec.label.toLowerCase()).join(", ");
      const hint = make("span", { class: "kl-hint", text: `${names} … ${specs.length} settings` });
      view.details = make("details", { class: "kl-card kl-section" }, make("summary", {}, heading, hint, badge), body);
      // A click comes before the browser opens it, the toggle event a moment after: somebody tabbing on at once must find the fields.
      view.details.firstChild.addEventListener("click", () => view.build());
      view.details.addEventListener("toggle", () => {
        if (view.details.open) view.build();
      });
      view.count = () => {
        const changed = specs.filter(isChanged).length;
        const wrong = specs.filter((spec) => problems.has(spec.name)).length;
        badge.textContent = [wrong ? plural(wrong, "problem", "problems") : "", changed ? `${changed} changed` : ""].filter(Boolean).join(" · ");
        badge.classList.toggle("kl-wrong", wrong > 0);
        hint.hidden = changed + wrong > 0;
      };
      root.append(view.details);
      view.count();
    }
    draw();
    publish(view);
  };

  // ---- search, filter, open and close

  function applyFilter() {
    const active = filter.words.length > 0 || filter.changed;
    if (active && !filter.opened) filter.opened = new Map([...views].map(([title, view]) => [title, Boolean(view.details && view.details.open)]));
    let total = 0;
    for (const [title, view] of views) {
      const specs = fieldsIn(title);
      const found = new Set(specs.filter((spec) => matches(spec)).map((spec) => spec.name));
      total += found.size;
      if (active && found.size) view.build();
      if (view.details) {
        view.details.hidden = active && !found.size;
        view.details.open = active ? found.size > 0 : filter.opened ? filter.opened.get(title) === true : view.details.open;
      }
      for (const spec of specs) if (controls.has(spec.name)) controls.get(spec.name).root.hidden = active && !found.has(spec.name);
    }
    if (!active) filter.opened = null;
    document.querySelectorAll(".kl-fieldset .kl-about").forEach((heading) => {
      const grid = heading.nextElementSibling;
      heading.hidden = active && ![...grid.children].some((field) => !field.hidden);
    });
    return { active, total };
  }

  function matches(spec) {
    if (filter.changed && !isChanged(spec)) return false;
    const text = `${spec.name} ${spec.name.replace(/_/g, " ")} ${spec.label} ${spec.help} ${spec.group}`.toLowerCase();
    return filter.words.every((word) => text.includes(word));
  }

  parts.toolbar = ({ root }) => {
    const status = make("p", { class: "kl-status", role: "status" });
    const search = make("input", { type: "search", id: "kl-search", placeholder: "Search all settings", "aria-label": "Search all settings", autocomplete: "off" });
    const changed = make("input", { type: "checkbox", id: "kl-only-changed" });
    const update = () => {
      filter.words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      filter.changed = changed.checked;
      const { active, total } = applyFilter();
      status.textContent = active ? (total ? plural(total, "setting", "settings") : "No setting matches; try another word") : "";
    };
    const all = (open) => () => {
      for (const view of views.values()) if (view.details && !view.details.hidden) view.details.open = open;
    };
    search.addEventListener("input", update);
    changed.addEventListener("change", update);
    filter.clear = () => {
      search.value = "";
      changed.checked = false;
      update();
    };
    root.append(make("div", { class: "kl-toolbar", role: "search" }, search,
      make("label", { class: "kl-toggle" }, changed, make("span", { text: "Only changed" })),
      make("button", { type: "button", class: "kl-quiet", text: "Open all", onclick: all(true) }),
      make("button", { type: "button", class: "kl-quiet", text: "Close all", onclick: all(false) })), status);
  };

  function goTo(name) {
    const spec = fieldsOf(run).find((item) => item.name === name);
    const view = spec && views.get(spec.group);
    if (!view) return false;
    view.build();
    if (view.details) view.details.open = true;
    let control = controls.get(name);
    if (control.root.hidden || (view.details && view.details.hidden)) {
      filter.clear();
      if (view.details) view.details.open = true;
      control = controls.get(name);
    }
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    control.root.scrollIntoView({ block: "center", behavior: still ? "auto" : "smooth" });
    control.node.focus({ preventScroll: true });
    return true;
  }

  restore();
  kl.form = {
    schema, parts, views, controls, drafts, problems, make, rich, plural, store, stored,
    fill, goTo, chooseRun, fieldsOf, fieldsIn, groupsOf, shownDefault, showProblem, DRAFT, SEEN,
    run: () => run,
    onChange: (listen) => listeners.push(listen),
  };
})();
