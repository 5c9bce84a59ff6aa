// What stands around the form: model family and way to train, presets, the first visit, the desk with the server's answers, the top of the page, Help.
(() => {
  "use strict";
  if (window.kl.around) return;
  window.kl.around = true;

  const { schema, parts, views, controls, drafts, problems, make, rich, plural, store, stored } = window.kl.form;
  const { fill, goTo, choose, fieldsOf, groupsOf, specsOf, familyOf, keyOf, showMore, shownDefault, showProblem, onChange, DRAFT, SEEN } = window.kl.form;
  const { run, way } = window.kl.form;

  // ---- kind of run

  // A row of choices of which one holds: radio buttons, so that the arrow keys work.
  function choice(legend, name, items, pick) {
    const radios = new Map();
    const labels = items.map(([value, text]) => {
      const radio = make("input", { type: "radio", name, id: `${name}-${value}`, value });
      radio.addEventListener("change", () => radio.checked && pick(value));
      radios.set(value, radio);
      return make("label", { class: "kl-option", for: radio.id }, radio, make("span", { text }));
    });
    const root = make("fieldset", { class: "kl-choice" }, make("legend", { text: legend }), make("div", { class: "kl-options" }, ...labels));
    return { root, radios };
  }
  window.kl.choice = choice;

  parts.kinds = ({ root }) => {
    const family = () => familyOf(run());
    const families = choice("Model family", "kl-family", Object.entries(schema.families), (name) => choose(name, way().name));
    const ways = choice("What is trained", "kl-way", schema.ways.map(({ name, label }) => [name, label]), (name) => choose(family(), name));
    const about = make("p", { class: "kl-note", id: "kl-way-about", role: "status" });
    const having = (each) => Object.entries(schema.families).filter(([name]) => schema.runs[keyOf(name, each)]).map(([, label]) => label).join(", ");
    const show = () => {
      families.radios.get(family()).checked = true;
      ways.radios.get(way().name).checked = true;
      const absent = schema.ways.filter((each) => !schema.runs[keyOf(family(), each)]);
      for (const each of schema.ways) ways.radios.get(each.name).disabled = absent.includes(each);
      const words = [way().about, ...absent.map((each) => `${each.label} is for ${having(each)}.`)].join(" ");
      if (about.textContent !== words) about.textContent = words;
    };
    onChange(show);
    root.append(make("div", { class: "kl-kinds" }, families.root, ways.root), about);
    show();
  };

  // ---- presets: choose, see what would change, use; keep one's own

  parts.presets = ({ root, props, trigger, watch }) => {
    const picker = make("select", { id: "kl-preset" });
    const view = make("div", { class: "kl-preset", "aria-live": "polite" });
    const name = make("input", { type: "text", id: "kl-preset-name", placeholder: "Name of your preset", "aria-label": "Name of your preset", autocomplete: "off" });
    const keep = () => trigger("keep_preset", { name: name.value });
    const form = make("div", { class: "kl-row" }, name, make("button", { type: "button", class: "kl-button", text: "Save my settings", onclick: keep }));
    const own = make("details", { class: "kl-own" }, make("summary", { text: "Save these settings as a preset" }), form);
    // Seen with the keyboard only: past all the settings.
    const start = () => document.getElementById("kl-start").focus();
    const skip = make("button", { type: "button", class: "kl-button kl-skip", text: "Skip to Start training", onclick: start });
    name.addEventListener("keydown", (event) => event.key === "Enter" && keep());
    picker.addEventListener("change", () => (picker.value ? trigger("choose_preset", { name: picker.value, run: run() }) : view.replaceChildren()));
    root.append(make("div", { class: "kl-pick" }, make("label", { for: "kl-preset", text: "Preset" }), picker), view, own, skip);

    function list() {
      const chosen = picker.value;
      const offered = ((props.value || {}).presets || []).filter((preset) => preset.run === run());
      const group = (label, items) => (items.length ? [make("optgroup", { label }, ...items.map((item) => make("option", { value: item.name, text: item.title })))] : []);
      picker.replaceChildren(make("option", { value: "", text: "Choose a starting point …" }),
        ...group("Built in", offered.filter((item) => !item.own)), ...group("Yours", offered.filter((item) => item.own)));
      picker.value = offered.some((item) => item.name === chosen) ? chosen : "";
    }

    function show() {
      const value = props.value || {};
      list();
      view.replaceChildren();
      if (value.message) view.append(make("p", { class: "kl-note", text: value.message }));
      const chosen = value.chosen;
      if (!chosen) return;
      picker.value = chosen.name;
      view.append(make("p", { class: "kl-note", text: chosen.about }));
      const use = () => {
        fill(chosen.run, chosen.texts);
        picker.value = "";
        view.replaceChildren(make("p", { class: "kl-note", text: `The form now has the settings of ${chosen.title}. Your folders, prompts and names stayed where the preset does not set them.` }));
        picker.focus();
      };
      const drop = () => {
        picker.value = "";
        view.replaceChildren();
        picker.focus();
      };
      const rows = chosen.changes.map((change) => make("tr", {}, make("th", { scope: "row", text: change.label }),
        make("td", { text: change.before }), make("td", { text: change.after })));
      if (rows.length) {
        view.append(make("div", { class: "kl-scroll", tabindex: "0", role: "region", "aria-label": "What the preset changes" },
          make("table", { class: "kl-table" }, make("thead", {}, make("tr", {}, make("th", { scope: "col", text: "Setting" }),
            make("th", { scope: "col", text: "Now" }), make("th", { scope: "col", text: "With the preset" }))), make("tbody", {}, ...rows))));
      } else {
        view.append(make("p", { class: "kl-note", text: "The form has these settings already." }));
      }
      view.append(make("div", { class: "kl-row" },
        make("button", { type: "button", class: "kl-button kl-strong", text: "Use this preset", onclick: use }),
        make("button", { type: "button", class: "kl-quiet", text: "Not now", onclick: drop })));
    }
    watch("value", show);
    let drawnFor = run();
    onChange(() => {
      // What was said about a preset is about another kind of run.
      if (run() !== drawnFor) view.replaceChildren();
      drawnFor = run();
      list();
    });
    show();
  };

  // ---- first visit

  parts.welcome = ({ root, props, trigger }) => {
    const known = stored(DRAFT) !== null || stored(SEEN) !== null || (props.value || {}).runs;
    if (known) return;
    const card = make("section", { class: "kl-card kl-welcome", "aria-labelledby": "kl-welcome" });
    const close = () => {
      store(SEEN, true);
      card.remove();
    };
    card.append(make("h2", { id: "kl-welcome", text: "New here? Watch a model learn something." }),
      make("p", { text: "The demo teaches a tiny built-in model a shape it has never seen: a star. It needs no download and no GPU, takes a few minutes on any computer, and goes through every step that a real run does." }),
      make("div", { class: "kl-row" },
        make("button", { type: "button", class: "kl-button kl-strong", text: "Train the demo", onclick: () => { close(); trigger("start_demo", { run: "demo" }); } }),
        make("button", { type: "button", class: "kl-quiet", text: "I have my own pictures", onclick: close })));
    root.append(card);
  };

  // ---- the desk: what the server answers

  parts.desk = ({ root, props, watch }) => {
    const status = make("p", { class: "kl-answer", role: "status" });
    const wrong = make("section", { class: "kl-card kl-problems", hidden: true, tabindex: "-1", "aria-labelledby": "kl-problems" });
    const report = make("section", { class: "kl-card kl-report", hidden: true, "aria-label": "Data set" });
    const output = make("section", { class: "kl-card kl-output", hidden: true, "aria-labelledby": "kl-command" });
    const imported = make("section", { class: "kl-card kl-import", hidden: true, tabindex: "-1", "aria-labelledby": "kl-imported" });
    root.append(status, wrong, imported, report, output);

    function listProblems(found) {
      wrong.replaceChildren();
      wrong.hidden = found.length === 0;
      problems.clear();
      const known = new Set(fieldsOf(run()).map((spec) => spec.name));
      const items = found.map(({ option, message, run: about }) => {
        if (!known.has(option)) return make("li", {}, make("span", { text: message }));
        problems.set(option, [...(problems.get(option) || []), message]);
        const link = make("button", { type: "button", class: "kl-link", text: message, onclick: () => goTo(option) });
        return make("li", {}, link, about ? make("div", { class: "kl-row" }, ...waysOn(about)) : null);
      });
      showMore();
      for (const view of views.values()) {
        if (view.details && view.specs.some((spec) => problems.has(spec.name))) {
          view.build();
          view.details.open = true;
          if (view.specs.some((spec) => problems.has(spec.name) && controls.get(spec.name).root.closest(".kl-rest"))) view.unfold();
        }
        view.count();
      }
      for (const name of controls.keys()) showProblem(name);
      if (!found.length) return;
      wrong.append(make("h2", { id: "kl-problems", text: plural(found.length, "thing to put right", "things to put right") }), make("ul", {}, ...items));
      wrong.focus();
    }

    // What somebody may want whose settings a run has already.
    function waysOn(name) {
      const again = () => {
        const values = window.kl.values();
        fill(values.run, { ...values.values, resume: "none" });
        document.getElementById("kl-start").click();
      };
      return [make("button", { type: "button", class: "kl-button", text: "Open it", onclick: () => window.kl.address.open(name) }),
        make("button", { type: "button", class: "kl-button", text: "Train again", onclick: again })];
    }

    // A command, and what was found in a data set, are those of the settings they were made for.
    let printed = "";
    let looked = "";
    const stale = make("p", { class: "kl-note", role: "status" });
    const now = () => JSON.stringify(window.kl.values());
    onChange(() => {
      stale.textContent = report.hidden || now() === looked ? "" : "The form has changed since; check again.";
      if (output.hidden || now() === printed) return;
      output.hidden = true;
      status.textContent = "The settings have changed since the command was printed.";
    });

    function answer(value) {
      status.textContent = value.note || "";
      output.hidden = output.hidden || value.output === null;
      if (value.fill) fill(value.fill.run, value.fill.texts);
      listProblems(value.problems || []);
      // The report is about what stands in the form; another file takes it away.
      if (value.fill) window.kl.showImport(imported, value.imported);
      if (value.output) showOutput(output, value.output);
      if (value.output) printed = now();
      if (value.output && value.download) download(value.output.name, new Blob([value.output.toml], { type: "text/plain" }));
      if (value.report !== undefined) {
        showReport(report, value.report);
        report.append(stale);
        stale.textContent = "";
        looked = now();
      }
      if (value.seen) store(SEEN, true);
      // The answer may lie far from the button, and its tab come to the front with it. What is wrong, and an import, take the focus.
      const told = value.report ? report : value.output ? output : status;
      if (!value.problems?.length && !value.imported && !value.download) setTimeout(() => window.kl.tools.bring(told));
      window.kl.foresee(0);
    }
    watch("value", () => props.value && answer(props.value));
  };

  // ---- the command

  function showOutput(box, { commands, toml, about }) {
    const code = make("code", { text: commands.sh });
    const pick = (shell, label) => {
      const radio = make("input", { type: "radio", name: "kl-shell", id: `kl-shell-${shell}`, value: shell });
      radio.addEventListener("change", () => {
        code.textContent = commands[shell];
        store("kl.shell", shell);
      });
      const wanted = stored("kl.shell") || (/Win/.test(navigator.platform) ? "powershell" : "sh");
      if (wanted === shell) {
        radio.checked = true;
        code.textContent = commands[shell];
      }
      return make("label", { class: "kl-toggle" }, radio, make("span", { text: label }));
    };
    const block = (node, label) => make("pre", { tabindex: "0", role: "region", "aria-label": label }, node);
    const tomlCode = make("code", { text: toml });
    box.replaceChildren(
      make("div", { class: "kl-row kl-between" }, make("h2", { id: "kl-command", text: "Command" }), copier(() => code.textContent, "Copy the command")),
      make("div", { class: "kl-row", role: "radiogroup", "aria-label": "Shell" }, pick("sh", "Linux, macOS"), pick("powershell", "PowerShell")),
      block(code, "Command"), make("p", { class: "kl-note", text: about }),
      make("div", { class: "kl-row kl-between" }, make("h3", { text: "Settings (TOML)" }), copier(() => toml, "Copy the TOML")), block(tomlCode, "Settings as TOML"));
    box.hidden = false;
  }

  function copier(text, label) {
    const button = make("button", { type: "button", class: "kl-quiet", text: "Copy", "aria-label": label });
    button.addEventListener("click", async () => {
      // navigator.clipboard exists only on https and on localhost.
      if (navigator.clipboard && window.isSecureContext) await navigator.clipboard.writeText(text());
      else copyBySelection(text());
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    });
    return button;
  }

  window.kl.copier = copier;

  function copyBySelection(text) {
    const area = make("textarea", { class: "kl-offscreen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }

  window.kl.download = download;

  function download(name, blob) {
    const url = URL.createObjectURL(blob);
    const link = make("a", { href: url, download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  // report: {title, facts: [[name, value]], tables: [{title, head, rows}], notes: [text]}
  function showReport(box, report) {
    box.hidden = !report;
    if (!report) return;
    const facts = make("dl", { class: "kl-factlist" }, ...(report.facts || []).flatMap(([name, value]) => [make("dt", { text: name }), make("dd", { text: value })]));
    const tables = (report.tables || []).flatMap((table) => [make("h3", { text: table.title }),
      make("div", { class: "kl-scroll", tabindex: "0", role: "region", "aria-label": table.title }, make("table", { class: "kl-table" },
        make("thead", {}, make("tr", {}, ...table.head.map((text) => make("th", { scope: "col", text })))),
        make("tbody", {}, ...table.rows.map((row) => make("tr", {}, ...row.map((text) => make("td", { text })))))))]);
    box.replaceChildren(make("h2", { text: report.title }), facts, ...tables, ...(report.notes || []).map((text) => make("p", { class: "kl-note", text })));
  }

  // ---- the top of the page

  parts.top = ({ root, props }) => {
    const { token, title = "kohya_like", tag = "the trainer you can trust" } = props.value || {};
    window.kl.token = token;
    const dark = () => document.body.classList.contains("dark");
    const button = make("button", { type: "button", class: "kl-quiet kl-theme" });
    const show = () => (button.textContent = dark() ? "Light" : "Dark");
    button.addEventListener("click", () => {
      document.body.classList.toggle("dark");
      store("kl.theme", dark() ? "dark" : "light");
      show();
    });
    const wanted = stored("kl.theme");
    if (wanted && !new URLSearchParams(location.search).has("__theme")) document.body.classList.toggle("dark", wanted === "dark");
    show();
    button.setAttribute("aria-label", "Switch between the light and the dark theme");
    root.append(make("header", { class: "kl-top" }, make("div", { class: "kl-brand" }, make("span", { class: "kl-mark", "aria-hidden": "true" }),
      make("h1", { text: title }), make("span", { class: "kl-tag", text: tag })), button));
  };

  // ---- Help: every option, searchable

  parts.reference = ({ root }) => {
    const search = make("input", { type: "search", "aria-label": "Search the options", placeholder: "Search the options", autocomplete: "off" });
    const status = make("p", { class: "kl-status", role: "status" });
    const heading = make("h2", { text: "Options" });
    const body = make("div");
    let drawn = "";
    let entries = [];
    let sections = [];

    function describe(spec, title) {
      const facts = [spec.choices && spec.choices.join(" | "), spec.unit, spec.range, spec.required ? "required" : `default ${shownDefault(spec)}`];
      const entry = make("div", { class: "kl-entry" }, make("dt", {}, make("code", { text: `--${spec.name}` })),
        make("dd", {}, ...rich(`${spec.help} `), make("span", { class: "kl-facts", text: facts.filter(Boolean).join(" · ") })));
      entries.push({ entry, text: `${spec.name} ${spec.label} ${spec.help} ${title}`.toLowerCase() });
      return entry;
    }

    function draw() {
      if (drawn === run()) return;
      drawn = run();
      entries = [];
      heading.textContent = `Options of ${schema.runs[drawn].label}`;
      sections = groupsOf(drawn).map(({ title, blocks }) =>
        make("section", {}, make("h3", { text: title }), make("dl", {}, ...blocks.flatMap(specsOf).map((spec) => describe(spec, title)))));
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
  };
})();
