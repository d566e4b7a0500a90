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
  const LETTERS = 18;
  const cut = (text) => (text.length > LETTERS ? "…" + text.slice(1 - LETTERS) : text);
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
    fit(figure);
  };
  // One scale for the drawings of a figure: as large as they are, or as the narrowest place lets them be, if one can
  // still read them then; else they scroll. Letters that are wider than those that were measured are pressed together.
  const SMALLEST = 0.8;
  const widthOf = (drawing) => parseFloat(drawing.style.getPropertyValue("--width"));
  const fit = (figure) => {
    const canvases = $$(".canvas", figure);
    const room = canvases.map((canvas) => (canvas.clientWidth - 24) / widthOf($("svg", canvas)));
    figure.style.setProperty("--scale", Math.max(SMALLEST, Math.min(1, ...room)));
    for (const canvas of canvases) canvas.scrollLeft = (canvas.scrollWidth - canvas.clientWidth) / 2;
    for (const text of $$("text", figure)) {
      const most = $("rect", text.parentElement).width.baseVal.value - 8;
      text.removeAttribute("textLength");
      if (text.getComputedTextLength() > most) {
        text.setAttribute("textLength", most);
        text.setAttribute("lengthAdjust", "spacingAndGlyphs");
      }
    }
  };
  addEventListener("resize", () => $$(".figure:not([hidden])").forEach(fit));
  for (const group of $$(".group")) {
    for (const button of $$(".instance", group)) button.addEventListener("click", () => choose(group, button));
    const first = $(".instance:enabled", group);
    if (first) choose(group, first);
  }

  // A drawing over the whole window: plus, minus and Ctrl with the wheel zoom, arrows and the pointer move.
  const lightbox = $("#lightbox");
  if (lightbox) {
    const stage = $(".stage", lightbox), shown = $(".zoom output", lightbox), choices = $(".choices", lightbox);
    let scale = 1;
    const drawing = () => $("svg", stage);
    const zoom = (wished) => {
      const across = stage.scrollLeft + stage.clientWidth / 2, down = stage.scrollTop + stage.clientHeight / 2;
      const factor = Math.max(0.1, Math.min(8, wished)) / scale;
      scale *= factor;
      drawing().style.setProperty("--scale", scale);
      shown.textContent = `${Math.round(scale * 100)}%`;
      stage.scrollTo({ left: across * factor - stage.clientWidth / 2, top: down * factor - stage.clientHeight / 2, behavior: "instant" });
    };
    const whole = (least = 0) => {
      const box = drawing().viewBox.baseVal, across = (stage.clientWidth - 44) / box.width;
      zoom(Math.max(Math.min(least, across), Math.min(4, across, (stage.clientHeight - 44) / box.height)));
    };
    const put = (panel) => {
      const holder = document.createElement("div");
      holder.className = panel.className;
      holder.appendChild($("svg", panel).cloneNode(true));
      for (const box of $$("[tabindex]", holder)) box.removeAttribute("tabindex");
      stage.replaceChildren(holder);
      for (const button of choices.children) button.setAttribute("aria-pressed", String(button.textContent === $("b", panel).textContent));
      zoom(scale);
    };
    const enlarge = (panel) => {
      const group = panel.closest(".group"), instance = $(".instance[aria-pressed=true]", group);
      $("#lightbox-title").textContent = `${$("h3 code", group).textContent} ${instance?.firstChild.nextSibling.textContent ?? ""}`;
      choices.replaceChildren(...$$(".panel", panel.parentElement).filter((other) => $("svg", other)).map((other) => {
        const button = document.createElement("button");
        button.type = "button";
        button.textContent = $("b", other).textContent;
        button.addEventListener("click", () => put(other));
        return button;
      }));
      lightbox.showModal();
      put(panel);
      whole(1.4);
      stage.scrollTop = 0;
      stage.focus();
    };
    for (const button of $$(".enlarge")) button.addEventListener("click", () => enlarge(button.closest(".panel")));
    const ACTS = { in: () => zoom(scale * 1.25), out: () => zoom(scale / 1.25), fit: () => whole(), close: () => lightbox.close() };
    for (const button of $$("[data-zoom]", lightbox)) button.addEventListener("click", ACTS[button.dataset.zoom]);
    const KEYS = { "+": "in", "=": "in", "-": "out", 0: "fit" };
    lightbox.addEventListener("keydown", (event) => {
      if (!(event.key in KEYS) || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      ACTS[KEYS[event.key]]();
    });
    stage.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      zoom(scale * (event.deltaY < 0 ? 1.15 : 1 / 1.15));
    }, { passive: false });
    stage.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button) return;
      stage.setPointerCapture(event.pointerId);
      stage.classList.add("dragged");
    });
    stage.addEventListener("pointermove", (event) => {
      if (stage.classList.contains("dragged")) stage.scrollBy({ left: -event.movementX, top: -event.movementY, behavior: "instant" });
    });
    for (const end of ["pointerup", "pointercancel"]) stage.addEventListener(end, () => stage.classList.remove("dragged"));
    lightbox.addEventListener("click", (event) => { if (event.target === lightbox) lightbox.close(); });
  }

  // The graph: all nodes in memory, those that one looks at in the page. Names are texts, never markup.
  const SHOWN = 150;
  const { words, rows, values } = data.nodes;
  const [makers, readers] = [new Map(), new Map()];
  const nodes = rows.map((row, place) => {
    const cells = row.slice(0, 5).map((word) => words[word]);
    cells[4] ||= "source";
    for (const value of row[6]) makers.set(value, place);
    for (const value of new Set(row[5])) {
      if (!readers.has(value)) readers.set(value, []);
      readers.get(value).push(place);
    }
    return { place, cells, inputs: row[5], outputs: row[6], shapes: cells[2].split(", "), low: cells.map((cell) => cell.toLowerCase()) };
  });
  const types = new Map(values);
  for (const node of nodes) node.outputs.forEach((value, place) => types.set(value, node.shapes[place]));
  const typeOf = (value) => (typeof types.get(value) === "number" ? words[types.get(value)] : types.get(value)) ?? "";
  const COLUMNS = { name: 0, op: 1, shape: 2, output: 2, module: 3, pass: 4 };
  const element = (tag, name = "", text = "") => {
    const created = document.createElement(tag);
    if (name) created.className = name;
    created.textContent = text;
    return created;
  };
  // A <details> whose content is made when it is first opened.
  const folded = (name, summary, content) => {
    const box = element("details", name), head = element("summary");
    head.append(...summary);
    box.appendChild(head);
    box.fill = () => { box.fill = () => {}; box.appendChild(content()); };
    box.addEventListener("toggle", () => { if (box.open) box.fill(); });
    return box;
  };
  const table = $("#rows");
  if (table) {
    const query = $("#query"), count = $("#count"), more = $("#more"), tree = $("#tree");
    let order = { column: -1, sign: 1 }, all = false, form = "tree", homes = [];

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
      return nodes.filter((node) => tests.every((one) => one(node)));
    };
    const sorted = (kept) => {
      if (order.column < 0) return kept;
      const compare = new Intl.Collator("en", { numeric: true }).compare;
      return kept.sort((a, b) => order.sign * compare(a.cells[order.column], b.cells[order.column]));
    };
    const line = (node) => {
      const row = document.createElement("tr");
      for (const cell of node.cells) row.appendChild(document.createElement("td")).textContent = cell;
      return row;
    };

    // Modules in the order of their first nodes; without torch's metadata, the slashes of names are paths.
    const pathOf = (node) => node.cells[3] ? node.cells[3].split(".") : node.cells[0].split("/").slice(0, -1).filter(Boolean);
    const modulesOf = (kept) => {
      const top = { name: "", items: [], groups: new Map(), count: 0, ops: new Map(), parent: null };
      homes = [];
      for (const node of kept) {
        let group = top;
        for (const part of [null, ...pathOf(node)]) {
          if (part !== null) {
            if (!group.groups.has(part)) {
              const inner = { name: part, items: [], groups: new Map(), count: 0, ops: new Map(), parent: group };
              group.groups.set(part, inner);
              group.items.push(inner);
            }
            group = group.groups.get(part);
          }
          group.count += 1;
          group.ops.set(node.cells[1], (group.ops.get(node.cells[1]) ?? 0) + 1);
        }
        group.items.push(node);
        homes[node.place] = group;
      }
      return top;
    };
    const listOf = (items) => {
      const list = element("div", "inner");
      let at = 0;
      list.until = (end) => {
        if (list.lastChild?.className === "rest") list.lastChild.remove();
        const next = items.slice(at, Math.max(end, at));
        list.append(...next.map((item) => (item.cells ? nodeBox(item) : groupBox(item))));
        at += next.length;
        if (at >= items.length) return;
        const rest = element("button", "rest", `${items.length - at} more`);
        rest.type = "button";
        rest.addEventListener("click", () => list.until(at + SHOWN));
        list.appendChild(rest);
      };
      list.until(SHOWN);
      return list;
    };
    const groupBox = (group) => {
      let name = group.name, inner = group;
      while (inner.items.length === 1 && !inner.items[0].cells) {
        inner = inner.items[0];
        name += `.${inner.name}`;
      }
      const ops = [...group.ops].sort((a, b) => b[1] - a[1]);
      const summaryOfOps = ops.slice(0, 4).map(([op, times]) => (times > 1 ? `${times} ${op}` : op)).join(", ");
      const summary = [element("code", "", name), element("small", "", `${group.count} ${group.count === 1 ? "node" : "nodes"}: ${summaryOfOps}${ops.length > 4 ? " …" : ""}`)];
      inner.box = folded("module", summary, () => (inner.list = listOf(inner.items)));
      return inner.box;
    };
    const nodeBox = (node) => {
      const made = node.cells[4] !== "source";
      const summary = [element("b", "", node.cells[1]), element("code", "", node.cells[0]), element("span", "type", node.cells[2])];
      if (made) summary.push(element("span", "tag", node.cells[4]));
      node.box = folded(made ? "op made" : "op", summary, () => {
        const facts = element("table");
        const row = (title, value, places, type) => {
          const cells = [element("th", "", title), element("td"), element("td", "type", type)];
          cells[1].append(element("code", "", value));
          for (const place of places) {
            const link = element("button", "", `${nodes[place].cells[1]} ${nodes[place].cells[0]}`);
            link.type = "button";
            link.addEventListener("click", () => goTo(nodes[place]));
            cells[1].append(title === "input" ? " ← " : " → ", link);
          }
          const line = element("tr");
          line.append(...cells);
          facts.appendChild(line);
        };
        for (const value of node.inputs) row("input", words[value], makers.has(value) ? [makers.get(value)] : [], typeOf(value));
        for (const value of node.outputs) row("output", words[value], readers.get(value) ?? [], typeOf(value));
        row("module", node.cells[3] || "–", [], "");
        row("made by", node.cells[4], [], "");
        return facts;
      });
      return node.box;
    };
    const goTo = (node) => {
      if (!homes[node.place]) search("");
      const above = [];
      for (let group = homes[node.place]; group?.parent; group = group.parent) above.unshift(group);
      let list = tree.list;
      for (const item of [...above, node]) {
        if (!item.box && item !== node && item.items.length === 1 && !item.items[0].cells) continue; // joined with the next
        if (!item.box) list.until(Infinity);
        item.box.open = true;
        item.box.fill();
        list = item.list;
      }
      node.box.scrollIntoView({ block: "center" });
      $("summary", node.box).focus({ preventScroll: true });
    };
    const showTree = (kept) => {
      for (const node of nodes) node.box = undefined;
      const top = modulesOf(kept);
      tree.replaceChildren();
      if (!kept.length) return;
      tree.appendChild((tree.list = listOf(top.items)));
      if (kept.length > SHOWN || kept.length === nodes.length) return;
      const open = (items) => items.forEach((item) => { // what was looked for is in sight
        if (item.items) { if (item.box) { item.box.open = true; item.box.fill(); } open(item.items); }
      });
      open(top.items);
    };

    const FORMS = ["tree", "table", "drawing"].filter((id) => $(`#as-${id}`));
    const draw = async () => {  /* the viewer is a page of its own, packed, and made when it is first asked for */
      if ($("#drawing").srcdoc) return;
      const bytes = Uint8Array.from(atob($("#packed").textContent), (sign) => sign.charCodeAt(0));
      $("#drawing").srcdoc = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
    };
    const show = () => {
      const kept = found();
      for (const id of FORMS) $(`#${id}`).hidden = id !== form;
      query.parentElement.hidden = form === "drawing";
      more.hidden = form !== "table" || all || kept.length <= SHOWN;
      if (form === "tree") showTree(kept);
      else if (form === "drawing") draw();
      else table.replaceChildren(...(all ? sorted(kept) : sorted(kept).slice(0, SHOWN)).map(line));
      more.textContent = `Show all ${kept.length}`;
      count.textContent = kept.length === nodes.length ? `${nodes.length} nodes` : `${kept.length} of ${nodes.length} nodes`;
    };
    const search = (text) => { query.value = text; all = false; show(); };

    query.addEventListener("input", () => { all = false; show(); });
    more.addEventListener("click", () => { all = true; show(); });
    for (const id of FORMS) {
      $(`#as-${id}`).addEventListener("click", () => {
        form = id;
        for (const other of FORMS) $(`#as-${other}`).setAttribute("aria-pressed", String(other === id));
        show();
      });
    }
    for (const button of $$("#table th button")) {
      button.addEventListener("click", () => {
        const column = Number(button.dataset.column);
        order = { column, sign: order.column === column ? -order.sign : 1 };
        for (const head of $$("#table th")) head.setAttribute("aria-sort", "none");
        button.parentElement.setAttribute("aria-sort", order.sign > 0 ? "ascending" : "descending");
        show();
      });
    }

    // A box of the final model leads to its node.
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
