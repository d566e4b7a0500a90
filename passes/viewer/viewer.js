"use strict";
/* One page, one or two graphs. A graph is drawn folded: each module of torch is one box until it is unfolded. Without
   modules, runs of nodes are folded into groups, so that a large graph opens at once. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const MOST = 6000, SHOWN_AT_FIRST = 160, GROUP = 40;
  const PALETTE = ["#4c78a8", "#59a5a0", "#86b36b", "#d8b656", "#e0915a", "#cc6c7a", "#977fb8", "#a58771", "#6f9fd4", "#8a8f98"];
  const STATES = { only: "#d1483e", changed: "#d8a13a", same: "#8a8f98" };
  const STATE_WORDS = { only: "only in this model", changed: "changed", same: "in both" };
  const isDark = () => document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const element = (tag, text, name) => { const made = document.createElement(tag); if (text !== undefined) made.textContent = text; if (name) made.className = name; return made; };

  /* ---- folding ---- */
  class Tree {
    /* Boxes in nested groups: a group is a path of modules, or a run of boxes where a level has too many. */
    constructor(scene) {
      this.root = { id: "", name: "", parent: null, groups: new Map(), boxes: [], count: 0 };
      this.home = [];
      const named = scene.boxes.some((box) => box.module);
      scene.boxes.forEach((box, at) => {
        let group = this.root;
        const path = box.module ? box.module.split(".") : [];
        if (named) for (const part of path) group = this.child(group, part);
        group.boxes.push(at);
      });
      this.groups = new Map();
      this.settle(this.root);
    }
    child(group, part) {
      if (!group.groups.has(part)) group.groups.set(part, { id: (group.id ? group.id + "." : "") + part, name: part, parent: group, groups: new Map(), boxes: [], count: 0 });
      return group.groups.get(part);
    }
    settle(group) {
      /* A level with many boxes gets runs of GROUP boxes, as often as it takes. */
      let boxes = group.boxes, level = 0;
      if (boxes.length > SHOWN_AT_FIRST) {
        let runs = [];
        for (let at = 0; at < boxes.length; at += GROUP) {
          const id = `${group.id}#${level}.${at / GROUP}`;
          runs.push({ id, name: `${at + 1}–${Math.min(at + GROUP, boxes.length)}`, parent: group, groups: new Map(), boxes: boxes.slice(at, at + GROUP), count: 0, run: true });
        }
        while (runs.length > SHOWN_AT_FIRST) {
          level += 1;
          const above = [];
          for (let at = 0; at < runs.length; at += GROUP) {
            const part = runs.slice(at, at + GROUP), ends = [part[0], part[part.length - 1]].map((run) => run.name.split("–"));
            const made = { id: `${group.id}#${level}.${at / GROUP}`, name: `${ends[0][0]}–${ends[1][1]}`, parent: group, groups: new Map(), boxes: [], count: 0, run: true };
            for (const run of part) { run.parent = made; made.groups.set(run.id, run); }
            above.push(made);
          }
          runs = above;
        }
        group.boxes = [];
        for (const run of runs) group.groups.set(run.id, run);
      }
      group.count = 0;
      for (const inner of group.groups.values()) { this.settle(inner); group.count += inner.count; }
      for (const box of group.boxes) this.home[box] = group;
      group.count += group.boxes.length;
      this.groups.set(group.id, group);
    }
    path(box) { const path = []; for (let group = this.home[box]; group.parent; group = group.parent) path.unshift(group); return path; }
  }

  class View {
    constructor(scene, holder) {
      this.scene = scene;
      this.tree = new Tree(scene);
      this.open = new Set();
      this.frame = element("section", undefined, "graph");
      this.frame.tabIndex = 0;
      this.frame.setAttribute("aria-label", `Graph of ${scene.title || "the model"}`);
      if (scene.title && data.scenes.length > 1) this.frame.append(element("h2", scene.title));
      this.canvas = element("div", undefined, "canvas");
      this.frame.append(this.canvas);
      holder.append(this.frame);
      /* Unfold from the outside in, while few boxes are shown. */
      const front = [this.tree.root];
      let shown = this.tree.root.boxes.length + this.tree.root.groups.size;
      while (front.length) {
        const group = front.shift();
        const cost = group.boxes.length + group.groups.size - 1;
        if (group.parent) { if (shown + cost > SHOWN_AT_FIRST) continue; shown += cost; this.open.add(group.id); }
        front.push(...group.groups.values());
      }
      this.draw(true);
    }
    visible(box) {
      for (const group of this.tree.path(box)) if (!this.open.has(group.id)) return group;
      return null;
    }
    elements() {
      const nodes = new Map(), edges = new Map(), place = [];
      this.scene.boxes.forEach((box, at) => {
        const folded = this.visible(at);
        const id = folded ? "g" + folded.id : "n" + at;
        place[at] = id;
        if (!nodes.has(id)) {
          const path = this.tree.path(at), home = folded ? folded.parent : path[path.length - 1];
          nodes.set(id, folded ? { id, group: folded.id, label: `${folded.name}\n${folded.count} nodes`, members: [], home } : { id, box: at, label: label(box), members: [], home });
        }
        nodes.get(id).members.push(at);
      });
      for (const [source, target, value, type] of this.scene.edges) {
        const from = place[source], to = place[target];
        if (from === to) continue;
        const key = from + "→" + to;
        if (!edges.has(key)) edges.set(key, { id: "e" + key, source: from, target: to, label: type, value });
        else edges.get(key).label = "";
      }
      return [[...nodes.values()], [...edges.values()]];
    }
    draw(fit) {
      const [nodes, edges] = this.elements();
      const layout = new dagre.graphlib.Graph({ multigraph: false });
      layout.setGraph({ rankdir: "TB", nodesep: 18, ranksep: edges.length > 400 ? 28 : 38, ranker: nodes.length > 120 ? "longest-path" : "network-simplex" });
      layout.setDefaultEdgeLabel(() => ({}));
      for (const node of nodes) { [node.width, node.height] = sizeOf(node); layout.setNode(node.id, { width: node.width, height: node.height }); }
      for (const edge of edges) layout.setEdge(edge.source, edge.target);
      if (nodes.length <= 800) dagre.layout(layout); else ranks(layout, nodes, edges);
      const items = [];
      for (const node of nodes) {
        const at = layout.node(node.id);
        items.push({ group: "nodes", data: { ...node, home: undefined, colour: colourOf(this.scene, node), state: stateOf(this.scene, node) }, position: { x: at.x, y: at.y } });
      }
      for (const edge of edges) items.push({ group: "edges", data: edge });
      const place = this.cy && !fit ? { zoom: this.cy.zoom(), pan: this.cy.pan() } : null;
      if (this.cy) this.cy.destroy();
      this.cy = cytoscape({
        container: this.canvas, elements: items, layout: { name: "preset" }, style: style(),
        minZoom: 0.02, maxZoom: 4, autoungrabify: true, boxSelectionEnabled: false,
        textureOnViewport: items.length > 800, hideEdgesOnViewport: items.length > 3000, pixelRatio: items.length > 1500 ? 1 : "auto",
      });
      if (place) this.cy.viewport(place); else this.fit();
      this.cy.on("tap", "node", (event) => this.choose(event.target));
      this.cy.on("dbltap", "node", (event) => this.toggle(event.target));
      this.cy.on("tap", (event) => { if (event.target === this.cy) close(); });
      return this;
    }
    fit() {
      this.cy.fit(undefined, 24);
      if (this.cy.zoom() > 1.2) { this.cy.zoom(1.2); this.cy.center(); }
      if (this.cy.zoom() < 0.25 && this.cy.nodes().length) {  /* a long graph: show its beginning so that it can be read */
        this.cy.zoom(0.6);
        const box = this.cy.nodes().sort((one, other) => one.position("y") - other.position("y")).slice(0, 12).boundingBox();
        this.cy.pan({ x: this.cy.width() / 2 - 0.6 * (box.x1 + box.x2) / 2, y: 30 - 0.6 * box.y1 });
      }
    }
    move(change) {
      /* Cytoscape moves a picture of a large graph while the mouse does; to draw each box anew takes 80 ms. Keys are told to it as a wheel is. */
      const renderer = this.cy.renderer(), state = renderer.data;
      state.wheelZooming = true;
      clearTimeout(state.wheelTimeout);
      state.wheelTimeout = setTimeout(() => { state.wheelZooming = false; if (!this.cy.destroyed() && this.cy.renderer() === renderer) { renderer.redrawHint("eles", true); renderer.redraw(); } }, 150);
      change(this.cy);
    }
    choose(node) {
      this.cy.elements(".chosen").removeClass("chosen");
      node.addClass("chosen");
      node.connectedEdges().addClass("chosen");
      showPanel(this, node.data());
      const twin = node.data("box") !== undefined && this.scene.boxes[node.data("box")].twin;
      if (twin) for (const other of views) if (other !== this) other.find(twin);
    }
    find(name) {
      const at = this.scene.boxes.findIndex((box) => box.name === name);
      if (at >= 0) this.reveal(at);
    }
    reveal(box) {
      const path = this.tree.path(box), closed = path.filter((group) => !this.open.has(group.id));
      closed.forEach((group) => this.open.add(group.id));
      if (closed.length) this.draw(false);
      const node = this.cy.getElementById("n" + box);
      this.cy.elements(".chosen").removeClass("chosen");
      node.addClass("chosen");
      this.cy.viewport({ zoom: Math.max(this.cy.zoom(), 0.7), pan: this.cy.pan() });
      this.cy.center(node);
      return node;
    }
    toggle(node) {
      const group = node.data("group");
      if (group !== undefined) this.open.add(group);
      else {
        const path = this.tree.path(node.data("box"));
        if (!path.length) return;
        const home = path[path.length - 1].id;
        for (const id of [...this.open]) if (id === home || id.startsWith(home + ".") || id.startsWith(home + "#")) this.open.delete(id);
      }
      this.draw(false);
    }
    all(isOpen) {
      if (isOpen && this.scene.boxes.length > MOST) {
        say(`${this.scene.boxes.length} nodes are too many to unfold at once; double-click a box`);
        return;
      }
      this.open.clear();
      if (isOpen) for (const id of this.tree.groups.keys()) this.open.add(id);
      this.draw(true);
    }
  }

  /* Layers by depth, for what is too large for dagre. */
  function ranks(layout, nodes, edges) {
    const depth = new Map(nodes.map((node) => [node.id, 0])), next = new Map(), waits = new Map(nodes.map((node) => [node.id, 0]));
    for (const { source, target } of edges) { if (!next.has(source)) next.set(source, []); next.get(source).push(target); waits.set(target, waits.get(target) + 1); }
    const front = nodes.filter((node) => !waits.get(node.id)).map((node) => node.id), rows = [];
    for (let at = 0; at < front.length; at += 1) {
      const id = front[at], row = depth.get(id);
      (rows[row] = rows[row] || []).push(id);
      for (const reader of next.get(id) || []) { depth.set(reader, Math.max(depth.get(reader), row + 1)); waits.set(reader, waits.get(reader) - 1); if (!waits.get(reader)) front.push(reader); }
    }
    const placed = new Set(front);
    for (const node of nodes) if (!placed.has(node.id)) (rows[0] = rows[0] || []).push(node.id);
    rows.forEach((row, at) => row.forEach((id, place) => { const node = layout.node(id); node.x = (place - (row.length - 1) / 2) * 150; node.y = at * 70; }));
  }

  const label = (box) => box.op + (box.op === "input" || box.op === "output" ? `\n${box.name}` : "");
  const sizeOf = (node) => [Math.min(220, Math.max(64, 8 * Math.max(...node.label.split("\n").map((line) => line.length)) + 18)), node.label.includes("\n") ? 40 : 26];

  /* ---- colours ---- */
  let by = data.scenes.length > 1 ? "state" : "op";
  const tally = (key) => { const counts = new Map(); for (const scene of data.scenes) for (const box of scene.boxes) if (box[key] !== undefined && box.op !== "input" && box.op !== "output") counts.set(box[key], (counts.get(box[key]) || 0) + 1); return [...counts].sort((one, other) => other[1] - one[1]); };
  const order = { op: tally("op").map(([name]) => name), kind: tally("kind").map(([name]) => name) };
  const ofName = (key, name) => { const at = order[key].indexOf(name); return at < 0 ? "#8a8f98" : PALETTE[Math.min(at, PALETTE.length - 1)]; };
  const ofRatio = (db) => db === null ? "#3b9c6a" : `hsl(${Math.round(Math.max(0, Math.min(140, (db - 10) * 2.8)))}, 60%, 45%)`;
  function colourOf(scene, node) {
    const boxes = node.members.map((at) => scene.boxes[at]);
    if (by === "state") return STATES[stateOf(scene, node)] || "#8a8f98";
    if (by === "db") { const known = boxes.filter((box) => box.db !== undefined); return known.length ? ofRatio(known.reduce((least, box) => box.db === null ? least : least === null ? box.db : Math.min(least, box.db), null)) : "#8a8f98"; }
    const names = boxes.map((box) => box[by]).filter((name) => name !== undefined && name !== "input" && name !== "output");
    if (node.group !== undefined && by === "op") return "#8a8f98";
    return names.length ? ofName(by, names[0]) : "#8a8f98";
  }
  const stateOf = (scene, node) => { const states = node.members.map((at) => scene.boxes[at].state).filter(Boolean); return ["only", "changed", "same"].find((state) => states.includes(state)) || ""; };
  function style() {
    const ink = isDark() ? "#e7e8ea" : "#1d1f23", card = isDark() ? "#22262b" : "#ffffff", line = isDark() ? "#565d66" : "#b4b8bf";
    return [
      { selector: "node", style: { shape: "round-rectangle", width: "data(width)", height: "data(height)", "background-color": card, "border-width": 2, "border-color": "data(colour)", label: "data(label)", "text-valign": "center", "text-halign": "center", "text-wrap": "wrap", "text-max-width": 210, "font-size": 12, color: ink, "min-zoomed-font-size": 6 } },
      { selector: "node[group]", style: { "border-style": "double", "border-width": 5, "font-weight": 600 } },
      { selector: "node[state = 'only']", style: { "background-color": "data(colour)", "background-opacity": 0.22 } },
      { selector: "edge", style: { width: 1.2, "line-color": line, "target-arrow-color": line, "target-arrow-shape": "triangle", "arrow-scale": 0.7, "curve-style": "straight", label: "data(label)", "font-size": 9, color: isDark() ? "#a4a9b1" : "#5f636b", "text-rotation": "none", "min-zoomed-font-size": 8, "text-background-color": isDark() ? "#131518" : "#fbfbf9", "text-background-opacity": 0.8 } },
      { selector: "node.chosen", style: { "overlay-color": "#2c5fb3", "overlay-opacity": 0.18, "overlay-padding": 5 } },
      { selector: "edge.chosen", style: { width: 2.5, "line-color": "#2c5fb3", "target-arrow-color": "#2c5fb3" } },
    ];
  }
  function legend() {
    const shown = by === "state" ? Object.keys(STATES).map((state) => [STATE_WORDS[state], STATES[state]])
      : by === "db" ? [["10 dB or less", ofRatio(10)], ["35 dB", ofRatio(35)], ["60 dB or more", ofRatio(60)], ["not measured", "#8a8f98"]]
      : order[by].slice(0, PALETTE.length - 1).map((name) => [name, ofName(by, name)]);
    byId("legend").replaceChildren(...shown.map(([name, colour]) => { const entry = element("span"), dot = element("i"); dot.style.background = colour; entry.append(dot, name); return entry; }));
  }

  /* ---- the panel of a box ---- */
  function showPanel(view, node) {
    const panel = byId("panel"), list = element("dl"), button = element("button", "×", "close");
    button.setAttribute("aria-label", "Close");
    button.onclick = close;
    const row = (name, content) => { if (content === undefined || content === "" || content.length === 0) return; const cell = element("dd"); for (const part of Array.isArray(content) ? content : [content]) cell.append(part instanceof Node ? part : element("div", part)); list.append(element("dt", name), cell); };
    const box = node.box === undefined ? null : view.scene.boxes[node.box];
    const title = element("h3", box ? `${box.op} ${box.name}` : view.tree.groups.get(node.group).id);
    if (box) {
      row("module", box.module); row("takes", box.ins || []); row("makes", box.outs || []); row("attributes", box.attrs || []); row("bodies", box.bodies || []);
      row("made by", box.by); row("structure", box.kind); row("SQNR", box.db === undefined ? undefined : box.db === null ? "equal" : box.db <= -300 ? "nothing in common" : `${box.db} dB`);
      row("difference", box.state && data.scenes.length > 1 ? STATE_WORDS[box.state] + (box.twin ? `: ${box.twin}` : "") : undefined);
      row("in the other", box.was);
      row("constants", (box.weights || []).map(histogram));
    } else {
      row("nodes", String(node.members.length));
      const counts = new Map();
      for (const at of node.members) counts.set(view.scene.boxes[at].op, (counts.get(view.scene.boxes[at].op) || 0) + 1);
      row("operators", [...counts].sort((one, other) => other[1] - one[1]).slice(0, 12).map(([op, count]) => `${op} ${count}`));
      const unfold = element("button", "unfold"); unfold.onclick = () => { view.open.add(node.group); view.draw(false); close(); };
      row("", unfold);
    }
    panel.replaceChildren(button, title, list);
    panel.hidden = false;
  }
  function histogram(weight) {
    const holder = element("div");
    holder.append(element("div", `${weight.name} ${weight.type}${weight.value !== undefined ? ` = ${+weight.value.toPrecision(6)}` : ""}`));
    if (weight.was !== undefined) holder.append(element("div", weight.was ? `changed; in the other: ${weight.was}` : STATE_WORDS.only, "differs"));
    if (weight.bars) {
      const NS = "http://www.w3.org/2000/svg", svg = document.createElementNS(NS, "svg"), most = Math.max(...weight.bars);
      svg.setAttribute("viewBox", `0 0 ${weight.bars.length} 10`); svg.setAttribute("preserveAspectRatio", "none");
      weight.bars.forEach((count, at) => { const bar = document.createElementNS(NS, "rect"); const height = 10 * count / most; bar.setAttribute("x", at + 0.05); bar.setAttribute("width", 0.9); bar.setAttribute("y", 10 - height); bar.setAttribute("height", height); svg.append(bar); });
      holder.append(svg, element("div", `${+weight.low.toPrecision(4)} … ${+weight.high.toPrecision(4)}`));
    }
    return holder;
  }
  function close() { byId("panel").hidden = true; for (const view of views) view.cy.elements(".chosen").removeClass("chosen"); }
  const say = (text) => { byId("hits").textContent = text; };

  /* ---- search and keys ---- */
  let hits = [], at = -1;
  function search(text) {
    const wanted = text.trim().toLowerCase();
    hits = [];
    at = -1;
    if (!wanted) { say(""); return; }
    for (const view of views) view.scene.boxes.forEach((box, index) => {
      if ([box.name, box.op, box.module, box.kind, ...(box.outs || [])].some((part) => part && part.toLowerCase().includes(wanted))) hits.push([view, index]);
    });
    say(`${hits.length} found`);
  }
  function step(by_) {
    if (!hits.length) return;
    at = (at + by_ + hits.length) % hits.length;
    const [view, index] = hits[at];
    view.choose(view.reveal(index));
    say(`${at + 1} of ${hits.length}`);
  }
  const field = byId("search");
  field.addEventListener("input", () => search(field.value));
  field.addEventListener("keydown", (event) => { if (event.key === "Enter") step(event.shiftKey ? -1 : 1); if (event.key === "Escape") { field.value = ""; search(""); field.blur(); } });
  const current = () => views.find((view) => view.frame.contains(document.activeElement)) || views[0];
  const KEYS = {
    "/": () => field.focus(), "+": () => current().all(true), "=": () => current().all(true), "-": () => current().all(false), "0": () => current().fit(),
    t: theme, n: () => step(1), N: () => step(-1), Escape: close,
    ArrowUp: () => pan(0, 80), ArrowDown: () => pan(0, -80), ArrowLeft: () => pan(80, 0), ArrowRight: () => pan(-80, 0),
    z: () => zoom(1.25), Z: () => zoom(0.8),
  };
  const pan = (x, y) => current().move((cy) => cy.panBy({ x, y }));
  const zoom = (factor) => current().move((cy) => cy.zoom({ level: cy.zoom() * factor, renderedPosition: { x: cy.width() / 2, y: cy.height() / 2 } }));
  document.addEventListener("keydown", (event) => {
    if (/INPUT|SELECT|TEXTAREA/.test(event.target.tagName) || event.ctrlKey || event.metaKey || !KEYS[event.key]) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  function theme() { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; restyle(); }
  function restyle() { for (const view of views) view.cy.style(style()); }
  function recolour() { legend(); for (const view of views) view.cy.nodes().forEach((node) => node.data("colour", colourOf(view.scene, node.data()))); }
  byId("theme").onclick = theme;
  byId("fit").onclick = () => views.forEach((view) => view.fit());
  byId("fold").onclick = () => views.forEach((view) => view.all(false));
  byId("unfold").onclick = () => views.forEach((view) => view.all(true));
  const select = byId("colour");
  const has = { op: true, kind: order.kind.length > 0, db: data.scenes.some((scene) => scene.boxes.some((box) => box.db !== undefined)), state: data.scenes.length > 1 };
  for (const option of [...select.options]) if (!has[option.value]) option.remove();
  if (has.db && by === "op") by = "db";
  select.value = by;
  select.onchange = () => { by = select.value; recolour(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", restyle);
  byId("summary").textContent = data.summary;

  const views = [];
  for (const scene of data.scenes) views.push(new View(scene, byId("graphs")));
  if (views.length > 1) for (const view of views) { view.cy.resize(); view.fit(); }  /* the first one was drawn alone */
  legend();
  addEventListener("resize", () => views.forEach((view) => view.cy.resize()));
  window.onnxlineViews = views;
  performance.mark("onnxline-ready");
})();
