"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
  const data = JSON.parse($("#data").textContent);

  // Light and dark: the system's, until somebody chooses. A page from a file may have no storage.
  const root = document.documentElement;
  const stored = (value) => {
    try { return value === undefined ? localStorage.getItem("onnxline-theme") : localStorage.setItem("onnxline-theme", value); }
    catch { return null; }
  };
  const chosen = stored();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  $("#theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    stored(root.dataset.theme);
  });

  // Passes: hide those that did nothing.
  const onlyChanged = $("#only-changed");
  onlyChanged?.addEventListener("click", () => {
    const on = $(".timeline").classList.toggle("only-changed");
    onlyChanged.setAttribute("aria-pressed", String(on));
  });

  // Structures: equal ones share a figure, so names are filled in when one is chosen.
  const LETTERS = 12;
  const cut = (text) => (text.length > LETTERS ? text.slice(0, LETTERS - 1) + "…" : text);
  const choose = (group, button) => {
    for (const other of $$(".instance", group)) other.setAttribute("aria-pressed", String(other === button));
    for (const figure of $$(".figure", group)) {
      figure.hidden = figure.dataset.figure !== button.dataset.figure;
      if (!figure.hidden) name(figure, data.names[group.dataset.group][button.dataset.row]);
    }
  };
  const name = (figure, names) => {
    $$("svg[role=img]", figure).forEach((drawing, panel) => {
      $$("g", drawing).forEach((box, place) => {
        const known = names[panel]?.[place] ?? "";
        box.dataset.name = known;
        const title = $("title", box);
        title.dataset.said ??= title.textContent;
        title.textContent = known && !box.classList.contains("input") ? `${title.dataset.said}\n${known}` : known || title.dataset.said;
        if (box.classList.contains("input")) $(".op", box).textContent = cut(known || "value");
      });
    });
  };
  for (const group of $$(".group")) {
    for (const button of $$(".instance", group)) button.addEventListener("click", () => choose(group, button));
    const first = $(".instance:enabled", group);
    if (first) choose(group, first);
  }

  // Nodes: everything in memory, the first of them in the page. Cells are texts, never markup.
  const SHOWN = 150;
  const { words, rows } = data.nodes;
  const nodes = rows.map((row) => {
    const cells = row.map((place) => words[place]);
    cells[4] ||= "source";
    return { cells, low: cells.map((cell) => cell.toLowerCase()) };
  });
  const COLUMNS = { name: 0, op: 1, shape: 2, output: 2, module: 3, pass: 4 };
  const table = $("#rows");
  if (table) {
    const query = $("#query"), count = $("#count"), more = $("#more");
    let order = { column: -1, sign: 1 }, all = false;

    // `op:MatMul layers.3` is every word in its column, or anywhere. An op is meant from its beginning.
    const test = (word) => {
      const [, prefix, rest] = /^(\w+):(.*)$/s.exec(word) ?? [];
      const column = Object.hasOwn(COLUMNS, prefix ?? "") ? COLUMNS[prefix] : -1;
      if (column === COLUMNS.op) return (node) => node.low[column].split("::").some((part) => part.startsWith(rest));
      if (column >= 0) return (node) => node.low[column].includes(rest);
      return (node) => node.low.some((cell) => cell.includes(word));
    };
    const found = () => {
      const tests = query.value.toLowerCase().split(/\s+/).filter(Boolean).map(test);
      const kept = nodes.filter((node) => tests.every((one) => one(node)));
      if (order.column < 0) return kept;
      const compare = new Intl.Collator("en", { numeric: true }).compare;
      return kept.sort((a, b) => order.sign * compare(a.cells[order.column], b.cells[order.column]));
    };
    const line = (node) => {
      const row = document.createElement("tr");
      for (const cell of node.cells) row.appendChild(document.createElement("td")).textContent = cell;
      return row;
    };
    const show = () => {
      const kept = found();
      table.replaceChildren(...(all ? kept : kept.slice(0, SHOWN)).map(line));
      more.hidden = all || kept.length <= SHOWN;
      more.textContent = `Show all ${kept.length}`;
      count.textContent = kept.length === nodes.length ? `${nodes.length} nodes` : `${kept.length} of ${nodes.length} nodes`;
    };
    const search = (text) => { query.value = text; all = false; show(); };

    query.addEventListener("input", () => { all = false; show(); });
    more.addEventListener("click", () => { all = true; show(); });
    for (const button of $$("th button")) {
      button.addEventListener("click", () => {
        const column = Number(button.dataset.column);
        order = { column, sign: order.column === column ? -order.sign : 1 };
        for (const head of $$("th")) head.setAttribute("aria-sort", "none");
        button.parentElement.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
        show();
      });
    }

    // A box of the final model leads to its row.
    for (const panel of $$(".panel:nth-child(2)")) {
      for (const box of $$(".node", panel)) {
        box.setAttribute("tabindex", "0");
        box.setAttribute("role", "link");
        const go = () => { search(`name:${box.dataset.name}`); $("#nodes").scrollIntoView(); };
        box.addEventListener("click", go);
        box.addEventListener("keydown", (event) => { if (event.key === "Enter") go(); });
      }
    }
    document.addEventListener("keydown", (event) => {
      if (event.key === "/" && document.activeElement !== query && !event.ctrlKey && !event.metaKey) {
        event.preventDefault();
        query.focus();
      }
    });
    show();
  }
  performance.mark("onnxline-ready");
})();
