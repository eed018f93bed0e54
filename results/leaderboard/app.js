"use strict";
/* The leaderboard page. Every string of an entry enters the document through textContent or setAttribute on inert
   attributes, never as markup. State lives in the address behind "#", so that a view can be linked to. */
(() => {
  const CLEAN = "template/regular";
  const OVERALL = "all";
  const PAGE_ROWS = 200;
  const LINES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];
  const view = document.getElementById("view");
  const status = document.getElementById("status");
  let board = null;
  let charts = [];
  let filtersOpen = matchMedia("(min-width: 40rem)").matches;

  /* ---------- data ---------- */

  async function load() {
    const packed = document.getElementById("data").textContent;
    const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    board = unpack(JSON.parse(await new Response(stream).text()));
  }

  /* Columns of scaled integers become row objects; see board.py for the other side. */
  function unpack(data) {
    const c = data.columns;
    const scale = (value) => (value === null ? null : value / 1000);
    const rows = c.entry.map((entry, i) => {
      const drafter = data.entries[entry].drafters[c.drafter[i]];
      const rounds = c.rounds[i];
      const atLeast = c.at_least[i];
      return {
        id: i, entry: data.entries[entry], drafter, address: `${data.entries[entry].id}.${c.drafter[i]}`,
        name: drafter.name, kind: drafter.kind, parameters: drafter.num_parameters, target: data.entries[entry].target,
        suite: data.suites[c.suite[i]], condition: data.conditions[c.condition[i]][0],
        family: data.conditions[c.condition[i]][1], path: data.paths[c.path[i]], runner: data.runners[c.runner[i]],
        sampling: data.samplings[c.sampling[i]], prompts_set: data.prompt_sets[c.prompt_set[i]], k: c.k[i],
        accepted: scale(c.accepted[i]), low: scale(c.low[i]), high: scale(c.high[i]),
        tokens: scale(c.accepted[i]) + 1,
        retention: scale(c.retention[i]), retention_low: scale(c.retention_low[i]),
        retention_high: scale(c.retention_high[i]),
        rounds, prompts: c.prompts[i],
        conditional: atLeast.map((w, j) => { const below = j ? atLeast[j - 1] : rounds; return below ? w / below : null; }),
        conditional_range: data.ranges[i] || null,
        draft_ms: scale(c.draft_ms[i]), verify_ms: scale(c.verify_ms[i]),
      };
    });
    const scores = new Map(data.scores.map((s) => [s.of.join("|"), s]));
    for (const row of rows) {
      row.score = scores.get([row.address, row.runner, row.sampling, row.k, row.path].join("|")) || null;
      row.robustness = row.score ? row.score.score : null;
    }
    return { ...data, rows };
  }

  /* ---------- document helpers ---------- */

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.filter((child) => child !== null && child !== undefined));
    return node;
  }

  const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
  const count = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
  const interval = (low, high, digits) => (low === null || high === null ? "" : `[${low.toFixed(digits)}, ${high.toFixed(digits)}]`);
  const unique = (values) => [...new Set(values)];
  const sorted = (values) => unique(values).sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b))));

  function size(parameters) {
    if (parameters === null) return "–";
    for (const [unit, factor] of [["B", 1e9], ["M", 1e6], ["k", 1e3]]) if (parameters >= factor) return (parameters / factor).toFixed(1) + unit;
    return String(parameters);
  }

  /* ---------- state in the address ---------- */

  const FILTERS = [
    ["suite", "Suite", (r) => r.suite], ["condition", "Condition", (r) => r.condition], ["k", "Depth k", (r) => String(r.k)],
    ["target", "Target", (r) => r.target], ["runner", "Runner", (r) => r.runner], ["sampling", "Sampling", (r) => r.sampling],
    ["path", "Answer path", (r) => r.path], ["prompts", "Prompt set", (r) => r.prompts_set],
  ];
  const ANY = "*";

  const state = () => new URLSearchParams(location.hash.slice(1));

  function change(changes) {
    const next = state();
    for (const [key, value] of Object.entries(changes)) {
      if (value === null) next.delete(key); else next.set(key, value);
    }
    history.replaceState(null, "", "#" + next);
    render();
  }

  /* The value of each filter that most rows share: a first view in which rows can be ranked. */
  function defaults() {
    let rows = board.rows;
    const chosen = {};
    const fixed = { suite: OVERALL, condition: CLEAN };
    for (const [key, , get] of FILTERS) {
      const counts = new Map();
      for (const row of rows) counts.set(get(row), (counts.get(get(row)) || 0) + 1);
      const most = [...counts].sort((a, b) => b[1] - a[1] || (a[0] < b[0] ? -1 : 1))[0];
      chosen[key] = counts.has(fixed[key]) ? fixed[key] : most ? most[0] : ANY;
      rows = rows.filter((row) => get(row) === chosen[key]);
    }
    return chosen;
  }

  function selection(query, except) {
    const preset = board.preset;
    const search = (query.get("search") || "").toLowerCase();
    return board.rows.filter((row) =>
      FILTERS.every(([key, , get]) => {
        if (key === except) return true;
        const wanted = query.get(key) || preset[key];
        return wanted === ANY || get(row) === wanted;
      }) && (!search || (row.name + " " + row.kind + " " + row.target).toLowerCase().includes(search)));
  }

  /* ---------- the table ---------- */

  const COLUMNS = [
    { key: "rank", label: "rank", value: (r) => r.rank_first ?? Infinity, text: (r) => r.rank || "–" },
    { key: "name", label: "drafter", name: true, value: (r) => r.name.toLowerCase(), cell: nameCell },
    { key: "target", label: "target", name: true, value: (r) => r.target, text: (r) => r.target, when: "target" },
    { key: "suite", label: "suite", name: true, value: (r) => r.suite, text: (r) => r.suite, when: "suite" },
    { key: "condition", label: "condition", name: true, value: (r) => r.condition, text: (r) => r.condition, when: "condition" },
    { key: "accepted", label: "accepted_per_round", value: (r) => r.accepted, cell: acceptedCell },
    { key: "tokens", label: "tokens_per_round", value: (r) => r.tokens, text: (r) => number(r.tokens, 2) },
    { key: "retention", label: "retention", value: (r) => r.retention, text: (r) => number(r.retention, 3), when: "changed" },
    { key: "robustness", label: "robustness", value: (r) => r.robustness, text: (r) => number(r.robustness, 1) },
    { key: "kind", label: "kind", name: true, value: (r) => r.kind, text: (r) => r.kind || "–" },
    { key: "k", label: "k", value: (r) => r.k, text: (r) => String(r.k) },
    { key: "parameters", label: "parameters", value: (r) => r.parameters, text: (r) => size(r.parameters) },
    { key: "rounds", label: "rounds", value: (r) => r.rounds, text: (r) => count(r.rounds) },
    { key: "prompts", label: "prompts", value: (r) => r.prompts, text: (r) => count(r.prompts) },
  ];

  function nameCell(row) {
    return el("th", { scope: "row", title: row.name },
      el("a", { href: "#drafter=" + encodeURIComponent(row.address) }, row.name));
  }

  function acceptedCell(row, most) {
    const range = el("span", { class: "range", "aria-hidden": "true" }, el("i"), el("b"));
    const share = (value) => 100 * Math.min(1, value / (most || 1)) + "%";
    range.firstChild.style.width = share(row.accepted);
    if (row.low !== null) {
      range.lastChild.style.left = share(row.low);
      range.lastChild.style.width = 100 * Math.min(1, (row.high - row.low) / (most || 1)) + "%";
    }
    return el("td", {}, range, number(row.accepted, 2), " ", el("span", { class: "soft" }, interval(row.low, row.high, 2)));
  }

  /* Ranks where all rows may be compared; returns what stands in the way otherwise. */
  function rank(rows) {
    const differing = FILTERS.filter(([, , get]) => unique(rows.map(get)).length > 1).map(([, label]) => label.toLowerCase());
    for (const row of rows) {
      row.rank = null;
      row.rank_first = null;
      if (differing.length || row.low === null) continue;
      const first = 1 + rows.filter((other) => other.low !== null && other.low > row.high).length;
      const last = rows.length - rows.filter((other) => other.high !== null && other.high < row.low).length;
      row.rank_first = first;
      row.rank = first === last ? String(first) : `${first}–${last}`;
    }
    return differing;
  }

  function order(rows, query) {
    const key = query.get("sort") || "accepted";
    const column = COLUMNS.find((c) => c.key === key) || COLUMNS.find((c) => c.key === "accepted");
    const sign = (query.get("order") || "down") === "up" ? 1 : -1;
    const empty = (value) => value === null || value === undefined;
    return [...rows].sort((a, b) => {
      const [x, y] = [column.value(a), column.value(b)];
      if (empty(x) || empty(y)) return empty(x) - empty(y) || a.id - b.id;
      return (x < y ? -1 : x > y ? 1 : 0) * sign || a.id - b.id;
    });
  }

  function table(rows, query) {
    const changed = unique(rows.map((r) => r.condition)).some((c) => c !== CLEAN);
    const several = (key) => unique(rows.map((r) => r[key])).length > 1;
    const columns = COLUMNS.filter((c) => !c.when || (c.when === "changed" ? changed : several(c.when)));
    const key = query.get("sort") || "accepted";
    const up = query.get("order") === "up";
    const head = columns.map((c) => el("th", {
      scope: "col", class: c.name ? "name" : null,
      "aria-sort": c.key === key ? (up ? "ascending" : "descending") : "none",
    }, el("button", { type: "button", "data-sort": c.key, onclick: () => {
      const ascendsFirst = c.name || c.key === "rank";
      change({ sort: c.key, order: c.key === key ? (up ? "down" : "up") : ascendsFirst ? "up" : "down" });
      document.querySelector(`[data-sort="${c.key}"]`)?.focus();
    } }, c.label)));
    const most = Math.max(...rows.map((r) => r.high ?? r.accepted));
    const shown = Number(query.get("show")) || PAGE_ROWS;
    const body = order(rows, query).slice(0, shown).map((row) => el("tr", {}, ...columns.map((c) =>
      c.cell ? c.cell(row, most) : el("td", { class: c.name ? "name" : null }, c.text(row)))));
    const more = rows.length > shown
      ? el("p", {}, el("button", { type: "button", onclick: () => change({ show: String(shown + PAGE_ROWS) }) },
        `Show ${Math.min(PAGE_ROWS, rows.length - shown)} more of ${rows.length}`))
      : null;
    return [
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Results" },
        el("table", { id: "results" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body))),
      more,
    ];
  }

  function filters(query) {
    const boxes = FILTERS.map(([key, label, get]) => {
      const wanted = query.get(key) || board.preset[key];
      let values = sorted(board.rows.map(get));
      if (key === "k") values.sort((a, b) => a - b);
      const select = el("select", { "data-filter": key, onchange: (event) => {
        change({ [key]: event.target.value, show: null });
        document.querySelector(`[data-filter="${key}"]`)?.focus();
      } }, el("option", { value: ANY, selected: wanted === ANY }, "any"),
      ...values.map((value) => el("option", { value, selected: value === wanted }, key === "suite" && value === OVERALL ? "all, pooled" : value)));
      return el("label", {}, label, select);
    });
    const search = el("input", { type: "search", "data-filter": "search", value: query.get("search") || "", placeholder: "name, kind or target", oninput: (event) => {
      const at = event.target.selectionStart;
      change({ search: event.target.value || null, show: null });
      const again = document.querySelector('[data-filter="search"]');
      again.focus();
      again.setSelectionRange(at, at);
    } });
    const reset = el("button", { type: "button", onclick: () => { location.hash = ""; } }, "Reset");
    return el("details", { class: "box", open: filtersOpen, ontoggle: (event) => { filtersOpen = event.target.open; } },
      el("summary", {}, "Filters"),
      el("form", { class: "filters", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() },
        el("label", {}, "Search", search), ...boxes, reset));
  }

  /* ---------- the heat map ---------- */

  function heatMap(query) {
    const rows = selection(query, "condition").filter((r) => r.condition !== CLEAN && r.retention !== null);
    if (!rows.length) return null;
    const known = board.conditions.filter(([name]) => rows.some((r) => r.condition === name));
    const lines = new Map();
    for (const row of rows) {
      const key = [row.address, row.k, row.runner, row.sampling, row.path, row.suite, row.prompts_set].join("|");
      if (!lines.has(key)) lines.set(key, { row, cells: new Map() });
      lines.get(key).cells.set(row.condition, row);
    }
    const list = [...lines.values()].sort((a, b) => (b.row.robustness ?? -1) - (a.row.robustness ?? -1));
    const shown = query.get("heat") === "all" ? list : list.slice(0, 40);
    const edge = (i) => (i && known[i][1] !== known[i - 1][1] ? "edge" : null);
    const body = shown.map(({ row, cells }) => el("tr", {},
      el("th", { scope: "row", title: row.name }, el("a", { href: "#drafter=" + encodeURIComponent(row.address) }, row.name)),
      ...known.map(([name], i) => heatCell(cells.get(name), name, edge(i)))));
    return el("section", { "aria-labelledby": "heat" },
      el("h2", { id: "heat" }, "Retention by condition"),
      el("p", { class: "note" }, "accepted_per_round relative to template/regular: orange lost, blue gained. Sorted by robustness."),
      el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Heat map" },
        el("table", { class: "heat", id: "heatmap" },
          el("thead", {}, el("tr", {}, el("th", { scope: "col", class: "name" }, "drafter"),
            ...known.map(([name], i) => el("th", { scope: "col", class: edge(i) }, name)))),
          el("tbody", {}, ...body))),
      list.length > shown.length
        ? el("p", {}, el("button", { type: "button", onclick: () => change({ heat: "all" }) }, `Show all ${list.length} drafters`)) : null);
  }

  function heatCell(row, name, edge) {
    if (!row) return el("td", { class: edge }, "–");
    const off = row.retention - 1;
    const cell = el("td", { class: edge, title: `${name}: ${row.retention.toFixed(3)} ${interval(row.retention_low, row.retention_high, 3)}` }, row.retention.toFixed(2));
    const strength = Math.min(0.75, Math.abs(off) * 1.2).toFixed(3);
    cell.style.backgroundColor = `rgba(var(${off < 0 ? "--loss" : "--gain"}), ${strength})`;
    return cell;
  }

  /* ---------- figures ---------- */

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function figure(title, label, config) {
    const canvas = el("canvas", { role: "img", "aria-label": label });
    const soft = css("--soft");
    const line = css("--line");
    for (const axis of Object.values(config.options.scales)) {
      axis.ticks = { color: soft, ...(axis.ticks || {}) };
      axis.grid = { color: line, ...(axis.grid || {}) };
      if (axis.title) axis.title.color = soft;
    }
    config.options.maintainAspectRatio = false;
    config.options.animation = false;
    config.options.plugins = { ...(config.options.plugins || {}) };
    config.options.plugins.legend = { labels: { color: css("--ink"), usePointStyle: true, filter: (item) => !item.text.startsWith("\u200b") } };
    queueMicrotask(() => { if (canvas.isConnected) charts.push(new Chart(canvas, config)); });
    return el("figure", {}, el("figcaption", {}, title), el("div", { class: "canvas" }, canvas));
  }

  const axis = (text, more) => ({ title: { display: true, text }, ...(more || {}) });

  /* Whiskers from low to high through every point that has them. */
  const whiskers = {
    id: "whiskers",
    afterDatasetsDraw(chart, _, options) {
      if (!options.ends) return;
      const { ctx } = chart;
      const horizontal = options.axis === "x";
      ctx.save();
      ctx.lineWidth = 1.5;
      chart.data.datasets.forEach((set, d) => {
        ctx.strokeStyle = set.borderColor;
        chart.getDatasetMeta(d).data.forEach((point, i) => {
          const ends = options.ends[d]?.[i];
          if (!ends || ends[0] === null) return;
          const [a, b] = ends.map((v) => chart.scales[options.axis].getPixelForValue(v));
          ctx.beginPath();
          if (horizontal) { ctx.moveTo(a, point.y); ctx.lineTo(b, point.y); } else { ctx.moveTo(point.x, a); ctx.lineTo(point.x, b); }
          ctx.stroke();
        });
      });
      ctx.restore();
    },
  };

  function scatter(rows) {
    const points = rows.filter((r) => r.robustness !== null);
    if (points.length < 2) return null;
    const kinds = sorted(points.map((r) => r.kind));
    const shapes = ["circle", "rect", "triangle", "rectRot", "star", "crossRot"];
    return figure("Acceptance and robustness", "Scatter plot of accepted per round against the robustness score; the table holds the same numbers.", {
      type: "scatter",
      data: { datasets: kinds.map((kind, i) => ({
        label: kind || "unknown", backgroundColor: LINES[i % LINES.length], borderColor: LINES[i % LINES.length],
        pointStyle: shapes[i % shapes.length], radius: 6, hoverRadius: 8,
        data: points.filter((r) => r.kind === kind).map((r) => ({ x: r.accepted, y: r.robustness, name: r.name, address: r.address })),
      })) },
      options: {
        scales: { x: axis("accepted_per_round (the target's own token not counted)"), y: axis("robustness score") },
        plugins: { tooltip: { callbacks: { label: (item) => `${item.raw.name}: ${item.raw.x.toFixed(2)} accepted, robustness ${item.raw.y.toFixed(1)}` } } },
        onClick: (_, hit, chart) => { if (hit.length) location.hash = "drafter=" + encodeURIComponent(chart.data.datasets[hit[0].datasetIndex].data[hit[0].index].address); },
      },
    });
  }

  function byDepth(rows) {
    const lines = rows.filter((r) => r.condition === CLEAN && r.suite === OVERALL && r.path === "free").slice(0, LINES.length);
    if (!lines.length) return null;
    const depth = Math.max(...lines.map((r) => r.k));
    const several = (key) => unique(lines.map((r) => r[key])).length > 1;
    const sets = lines.flatMap((row, i) => {
      const colour = LINES[i];
      const label = ["k " + row.k, several("runner") ? row.runner : "", several("sampling") ? row.sampling : "", several("prompts_set") ? row.prompts_set : ""].filter(Boolean).join(", ");
      const line = { label, data: row.conditional, borderColor: colour, backgroundColor: colour, pointStyle: ["circle", "rect", "triangle", "rectRot", "star", "crossRot"][i], radius: 4, borderDash: i ? [6, 2 * i] : [], tension: 0 };
      if (!row.conditional_range) return [line];
      const edge = (values, fill) => ({ label: "\u200b", data: values, borderWidth: 0, radius: 0, hitRadius: 0, fill, backgroundColor: colour + "2b" });
      return [line, edge(row.conditional_range[0], false), edge(row.conditional_range[1], "-1")];
    });
    return figure("Acceptance by depth, " + CLEAN, "Conditional acceptance rate by step with intervals; the table of steps holds the same numbers.", {
      type: "line",
      data: { labels: Array.from({ length: depth }, (_, i) => i + 1), datasets: sets },
      options: {
        scales: { x: axis("step i"), y: axis("conditional rate c_i", { min: 0, max: 1 }) },
        plugins: { tooltip: { filter: (item) => !item.dataset.label.startsWith("\u200b") } },
      },
    });
  }

  function byCondition(rows) {
    const own = rows.filter((r) => r.condition !== CLEAN && r.retention !== null);
    if (!own.length) return null;
    const names = unique([...own].sort((a, b) => a.family.localeCompare(b.family) || a.condition.localeCompare(b.condition)).map((r) => r.condition));
    const groups = sorted(own.map((r) => r.path));
    const sets = groups.map((path, i) => ({
      label: `answer path ${path}`, borderColor: LINES[i], backgroundColor: LINES[i], showLine: false, radius: 5,
      pointStyle: ["circle", "rect"][i % 2],
      data: names.map((name) => own.find((r) => r.condition === name && r.path === path) || null),
    }));
    const ends = sets.map((set) => set.data.map((r) => (r ? [r.retention_low, r.retention_high] : null)));
    for (const set of sets) set.data = set.data.map((r) => (r ? r.retention : null));
    const result = figure("Retention by condition", "Retention of every condition with intervals; the heat map and the tables hold the same numbers.", {
      type: "line",
      data: { labels: names, datasets: sets },
      options: { indexAxis: "y", scales: { x: axis("retention"), y: { ticks: { autoSkip: false } } }, plugins: { whiskers: { ends, axis: "x" } } },
      plugins: [whiskers],
    });
    result.querySelector(".canvas").style.height = Math.max(20, 1.5 * names.length + 6) + "rem";
    return result;
  }

  /* ---------- one drafter ---------- */

  function facts(pairs) {
    return el("dl", { class: "facts" }, ...pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
      .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
  }

  function sheet(headers, rows, label) {
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
      el("table", {}, el("thead", {}, el("tr", {}, ...headers.map((h, i) => el("th", { scope: "col", class: i ? null : "name" }, h)))),
        el("tbody", {}, ...rows.map((cells) => el("tr", {}, el("th", { scope: "row" }, cells[0]), ...cells.slice(1).map((c) => el("td", {}, c)))))));
  }

  function drafterPage(address) {
    const rows = board.rows.filter((r) => r.address === address);
    if (!rows.length) return [el("h2", {}, "No such drafter"), el("p", {}, el("a", { href: "#" }, "Back to the leaderboard"))];
    const { entry, drafter } = rows[0];
    const deepest = Math.max(...rows.map((r) => r.k));
    const deep = rows.filter((r) => r.k === deepest);
    const parts = [
      el("p", {}, el("a", { href: "#" }, "← Leaderboard")),
      el("h2", { id: "title", tabindex: "-1" }, drafter.name),
      facts([
        ["kind", drafter.kind], ["parameters", drafter.num_parameters === null ? null : count(drafter.num_parameters)],
        ["trained to depth", drafter.trained_depth], ["training data", drafter.training_data || "not stated"],
        ["settings", Object.entries(drafter.settings).map(([k, v]) => `${k} ${v}`).join(", ")],
        ["fingerprint", drafter.fingerprint], ["target", `${entry.target} (${entry.target_fingerprint})`],
      ]),
      el("div", { class: "figures" }, byDepth(rows), byCondition(deep.filter((r) => r.suite === OVERALL))),
      ...robustnessSection(rows),
      ...suiteSections(rows),
      el("h2", {}, "Where it comes from"),
      facts([
        ["run", entry.run_id], ["entry", entry.id], ["started", entry.started], ["specbench", entry.version],
        ["prompts hash", entry.prompts_hash], ["machine", entry.machine],
        ["versions", Object.entries(entry.versions).map(([k, v]) => `${k} ${v}`).join(", ")],
      ]),
      el("h3", {}, "Reproduce"),
      el("pre", { id: "command" }, entry.command || "the entry states no command"),
      entry.download ? el("p", {}, el("a", { href: entry.download }, "Raw rounds of this entry (Parquet)")) : null,
    ];
    return parts;
  }

  function robustnessSection(rows) {
    const scores = unique(rows.map((r) => r.score)).filter(Boolean);
    if (!scores.length) return [];
    return [el("h2", {}, "Robustness"), el("p", { class: "note" }, board.formula), ...scores.flatMap((s) => [
      el("h3", {}, `${s.score.toFixed(1)} ${interval(s.low, s.high, 1)} · k ${s.of[3]}, ${s.of[1]}, answer path ${s.of[4]}`),
      sheet(["family", "mean retention", "worst", "worst condition", "conditions"],
        s.families.map((f) => [f[0], number(f[1], 3), number(f[2], 3), f[3], String(f[4])]), "Families"),
      el("p", { class: "note" }, "Other weights: " + s.sensitivity.map(([name, value]) => `${name} ${value.toFixed(1)}`).join(", ")),
    ])];
  }

  function suiteSections(rows) {
    const depth = Math.max(...rows.map((r) => r.k));
    const several = (key) => unique(rows.map((r) => r[key])).length > 1;
    const extra = ["path", "runner", "sampling", "k"].filter(several);
    const steps = Array.from({ length: depth }, (_, i) => `c_${i + 1}`);
    let suites = sorted(rows.map((r) => r.suite)).sort((a, b) => (a === OVERALL ? -1 : b === OVERALL ? 1 : 0));
    if (suites.length === 2) suites = suites.filter((suite) => suite !== OVERALL);
    return suites.flatMap((suite) => {
      const own = rows.filter((r) => r.suite === suite)
        .sort((a, b) => (b.condition === CLEAN) - (a.condition === CLEAN) || a.condition.localeCompare(b.condition) || a.k - b.k);
      return [
        el("h2", {}, suite === OVERALL ? "All suites, pooled" : suite),
        sheet(["condition", ...extra, "accepted_per_round", "95 %", "tokens_per_round", "retention", "95 %", ...steps, "rounds", "prompts"],
          own.map((r) => [r.condition, ...extra.map((key) => String(r[key])), number(r.accepted, 2), interval(r.low, r.high, 2), number(r.tokens, 2),
            r.condition === CLEAN ? "" : number(r.retention, 3), interval(r.retention_low, r.retention_high, 3),
            ...steps.map((_, i) => number(r.conditional[i], 3)), count(r.rounds), count(r.prompts)]), suite),
      ];
    });
  }

  /* ---------- the page ---------- */

  function home(query) {
    const rows = selection(query);
    const differing = rank(rows);
    const note = !rows.length ? "No result matches these filters."
      : differing.length ? `No ranks: the rows shown differ in ${differing.join(", ")}. Choose one value of each to rank.`
        : "Ranks count only what the 95 % intervals tell apart.";
    return [
      filters(query),
      el("p", { class: "note", id: "ranking" }, `${count(rows.length)} results. ${note}`),
      ...(rows.length ? table(rows, query) : []),
      el("div", { class: "figures" }, scatter(rows)),
      heatMap(query),
    ];
  }

  function render() {
    for (const chart of charts) chart.destroy();
    charts = [];
    const query = state();
    const address = query.get("drafter");
    view.replaceChildren(...(address ? drafterPage(address) : home(query)).filter(Boolean));
    const name = address && view.querySelector("#title")?.textContent;
    document.title = name ? `${name} · ${board.title}` : board.title;
  }

  function themes() {
    const root = document.documentElement;
    const stored = (() => { try { return localStorage.getItem("theme"); } catch { return null; } })();
    if (stored === "dark" || stored === "light") root.dataset.theme = stored;
    document.getElementById("theme").addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      try { localStorage.setItem("theme", root.dataset.theme); } catch { /* a page opened from disk may have no storage */ }
      render();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", render);
  }

  load().then(() => {
    board.preset = defaults();
    themes();
    status.hidden = true;
    render();
    addEventListener("hashchange", () => {
      render();
      scrollTo(0, 0);
      (view.querySelector("#title") || document.getElementById("main")).focus({ preventScroll: true });
    });
    document.body.dataset.ready = "yes";
  }).catch((error) => { status.textContent = "The results cannot be read: " + error.message; });
})();
