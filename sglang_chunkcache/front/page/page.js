// Draws what /chunkcache/live tells. All text goes in as text nodes: labels are clients' words.
"use strict";
const POLL_MS = 3000, TIMEOUT_MS = 8000, RECENT_S = 600;
const FATES = ["exact", "relocated", "recomputed", "computed"];
const CLASS = {exact: "exact", loaded: "loaded", relocated: "moved", recomputed: "recomputed", computed: "computed"};
const NAME = {exact: "exact", relocated: "moved", recomputed: "recomputed", computed: "computed"};
let key = "", picked = null, waiting = null, round = 0, start = null;

const at = (id) => document.getElementById(id);
function make(tag, options = {}, ...children) {
  const {cls, on, ...attributes} = options;
  const element = document.createElement(tag);
  if (cls) element.className = cls;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  for (const [event, run] of Object.entries(on || {})) element.addEventListener(event, run);
  element.append(...children.map((each) => each instanceof Node ? each : document.createTextNode(String(each))));
  return element;
}
function drawn(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}
// A label's own direction stays its own.
const named = (label) => make("bdi", {}, label.trim() ? label : "(no id)");
const count = (n) => n == null ? "–" : Math.round(n).toLocaleString("en");
const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(1)} %` : "–";
const ms = (value) => value == null ? "–" : `${value < 100 ? value.toFixed(1) : count(value)} ms`;
function bytes(n) {
  if (n == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (n >= 1024 && step < units.length - 1) { n /= 1024; step += 1; }
  return `${n.toFixed(n < 10 && step ? 1 : 0)} ${units[step]}`;
}
function table(heads, rows, cls = "stack") {
  const cell = (tag) => (each, i) => make(tag, {cls: heads[i].startsWith("#") ? "number" : ""}, tag === "th" ? each.replace("#", "") : each);
  return make("div", {cls: "wide"}, make("table", {cls},
    make("thead", {}, make("tr", {}, ...heads.map(cell("th")))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell("td")))))));
}
// Parts are [class, amount, title]; of `whole` they fill their share.
function bar(parts, whole, cls = "") {
  const rects = [];
  let x = 0;
  for (const [name, amount, title] of parts) {
    const width = whole ? 1000 * amount / whole : 0;
    const rect = drawn("rect", {x, y: 0, width, height: 10, class: name});
    rect.append(drawn("title", {}, title));
    rects.push(rect);
    x += width;
  }
  const said = parts.map(([, , title]) => title).join(", ");
  return drawn("svg", {viewBox: "0 0 1000 10", preserveAspectRatio: "none", class: cls, role: "img", "aria-label": said}, ...rects);
}

async function get(path) {
  const headers = key ? {Authorization: `Bearer ${key}`} : {};
  const answer = await fetch(path, {headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(TIMEOUT_MS)});
  if (answer.status === 404) return null;
  if (!answer.ok) {
    const told = await answer.json().catch(() => ({}));
    throw Object.assign(new Error(told.error?.message || told.message || told.error || answer.statusText), {status: answer.status});
  }
  return answer.json();
}

// Charts. The page has its own legends; the library's, and its style of notes, would need inline styles.
const charts = {};
if (typeof Dygraph !== "undefined") {
  Dygraph.addedAnnotationCSS = true;
  Dygraph.PLUGINS = Dygraph.PLUGINS.filter((each) => each !== Dygraph.Plugins.Legend);
}
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
function chart(id, rows, labels, classes, options) {
  const legend = at(`${id}-legend`);
  legend.replaceChildren(...labels.map((label, i) => make("span", {}, make("i", {cls: classes[i]}), label)));
  if (typeof Dygraph === "undefined") {
    at(id).replaceChildren(make("p", {cls: "quiet"}, "Charts need the extra `page`: pip install sglang-chunkcache[page]"));
    return;
  }
  if (!rows.length) { at(id).replaceChildren(make("p", {cls: "quiet"}, "no request yet")); delete charts[id]; return; }
  const given = {
    labels: ["time", ...labels], colors: classes.map(color), strokeWidth: 2, drawPoints: true, pointSize: 2,
    axisLineColor: color("line"), gridLineColor: color("line"), axisLabelFontSize: 12, includeZero: true,
    xRangePad: 6, legend: "never", highlightCircleSize: 3, ...options,
    highlightCallback: (_, x, points) => {
      const spans = [...legend.children];
      for (const point of points) {
        const i = labels.indexOf(point.name);
        spans[i].lastChild.textContent = `${labels[i]} ${(options.show || count)(rows[point.idx]?.[i + 1])}`;
      }
    },
    unhighlightCallback: () => [...legend.children].forEach((each, i) => { each.lastChild.textContent = labels[i]; }),
  };
  if (charts[id]) charts[id].updateOptions({...given, file: rows});
  else { at(id).replaceChildren(); charts[id] = new Dygraph(at(id), rows, given); }
}
// Ten seconds without a request are a point of their own: nothing was computed in them.
function filled(live) {
  const all = [], width = live.bucket_s;
  const idle = (until) => {
    const last = all.at(-1);
    if (!last || until - last.t < 1.5 * width) return;
    all.push({...EMPTY, t: last.t + width});
    if (until - last.t > 2.5 * width) all.push({...EMPTY, t: until - width});
  };
  for (const each of live.buckets) { idle(each.t); all.push({...each, s: Math.max(1, Math.min(width, live.now - each.t))}); }
  idle(live.now);
  return all;
}
const EMPTY = {s: 1, requests: 0, retrieved: 0, hit: 0, fates: {}, ttft_ms: {}};
const sum = (values) => values.reduce((a, b) => a + b, 0);
const total = (fates) => sum(Object.values(fates));

function showCharts(live) {
  const all = filled(live), time = (each) => new Date(1000 * each.t);
  chart("fates", all.map((each) => [time(each), ...FATES.map((fate) => (each.fates[fate] || 0) / each.s)]),
    FATES.map((fate) => NAME[fate]), FATES.map((fate) => CLASS[fate]),
    {stackedGraph: true, fillAlpha: .55, strokeWidth: 1, drawPoints: false, show: (n) => `${count(n)} tokens/s`});
  chart("shares", all.map((each) => {
    const whole = total(each.fates);
    const share = (part) => whole ? part / whole : null;
    return [time(each), share(each.fates.exact || 0), share(each.fates.relocated || 0), each.retrieved ? each.hit / each.retrieved : null];
  }), ["tokens exact", "tokens moved", "chunks exact"], ["exact", "moved", "recomputed"], {valueRange: [0, 1.02], show: (n) => n == null ? "" : n.toFixed(2)});
  chart("ttft", all.map((each) => [time(each), each.ttft_ms.exact?.[0] ?? null, each.ttft_ms.moved?.[0] ?? null]),
    ["exact", "moved"], ["exact", "moved"], {show: (n) => ms(n)});
}

// Figures
function showTiles(live) {
  const since = live.now - RECENT_S, last = live.buckets.filter((each) => each.t >= since);
  const fates = Object.fromEntries(FATES.map((fate) => [fate, sum(last.map((each) => each.fates[fate] || 0))]));
  const whole = total(fates);
  // of the steps' medians, each as often as it has requests
  const middle = (kind) => {
    const found = last.map((each) => each.ttft_ms[kind]).filter(Boolean).sort((a, b) => a[0] - b[0]);
    let left = sum(found.map((each) => each[1])) / 2;
    return ms(found.find((each) => (left -= each[1]) <= 0)?.[0]);
  };
  const tiles = [
    ["requests in ten minutes", count(sum(last.map((each) => each.requests)))],
    ["prompt tokens found cached", percent(fates.exact, whole)],
    ["prompt tokens moved", percent(fates.relocated, whole)],
    ["prompt tokens recomputed", percent(fates.recomputed, whole)],
    ["first token of streams, exact", middle("exact")],
    ["first token of streams, moved", middle("moved")],
  ].filter(([name]) => live.stats.reuse !== "exact" || !/moved|recomputed/.test(name));
  at("tiles").replaceChildren(...tiles.map(([name, value]) => make("div", {cls: "tile"}, make("b", {}, value), make("span", {}, name))));
}
function showTiers(stats) {
  const rows = [];
  for (const rank of stats.ranks) {
    const name = `rank ${rank.dp_rank}`;
    const pool = [["moved", rank.protected, "in use"], ["exact", rank.evictable, "cached"]];
    const slots = sum([rank.protected, rank.evictable, rank.free].map((each) => each || 0));
    if (slots) rows.push([name, "device", bar(pool.map(([cls, n, what]) => [cls, n, `${count(n)} tokens ${what}`]), slots),
      `${count(rank.evictable)} tokens cached, ${count(rank.protected)} in use, of ${count(slots)}`, `${count(rank.evicted_chunks)} chunks evicted`]);
    const {host, storage, store} = rank;
    if (host) rows.push([name, "host", bar([["loaded", host.bytes, bytes(host.bytes)]], host.max_bytes),
      `${bytes(host.bytes)} of ${bytes(host.max_bytes)}${store ? `; ${count(store.num_variants)} entries to move` : ""}`,
      `${count(host.loads)} loads, ${count(host.loaded_tokens)} tokens loaded, ${count(host.saved_tokens)} saved${rank.moves ? `; ${count(rank.moves.tokens.moved_host || 0)} moved from it` : ""}`]);
    if (storage) rows.push([name, "storage", bar([["computed", storage.num_bytes, bytes(storage.num_bytes)]], storage.max_bytes),
      `${bytes(storage.num_bytes)} of ${bytes(storage.max_bytes)}, ${count(storage.num_entries)} entries`,
      `${count(storage.loaded)} loaded, ${count(storage.written)} written, ${count(storage.queue)} queued${storage.paused ? "; paused" : ""}`]);
  }
  at("tiers").replaceChildren(rows.length ? table(["", "tier", "filled", "holds", "since the start"], rows) : make("p", {cls: "quiet"}, "SGLang's own tree: see its metrics."));
}
function showFallbacks(live) {
  const ranks = {};
  for (const rank of live.stats.ranks) for (const [name, n] of Object.entries(rank.fallbacks || {})) ranks[name] = (ranks[name] || 0) + n;
  const counts = {...ranks, ...live.stats.fallbacks};
  const rows = Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([name, n]) => {
    const [means, advice] = live.explanations[name] || ["", ""];
    return [make("code", {}, name), count(n), count(live.stats.tokens_by_reason[name]), means, advice];
  });
  at("fallbacks").replaceChildren(rows.length ? table(["reason", "#requests", "#tokens", "what it means", "what to do"], rows) : make("p", {cls: "quiet"}, "nothing that might have been reused was computed"));
}
function showRanks(stats) {
  const held = stats.conversations;
  const rows = stats.ranks.map((rank, i) => [rank.dp_rank, count(stats.prompt_tokens_in_flight[i]), count(rank.waiting?.now), count(rank.mirror.chunk_nodes),
    rank.mirror.agrees === false ? make("span", {cls: "bad"}, "another") : rank.mirror.events_behind ? `${count(rank.mirror.events_behind)} events behind` : "up to date"]);
  at("ranks").replaceChildren(
    make("p", {}, `Conversations: ${count(held.count)}, with ${count(held.tokens)} tokens. Tenants: ${count(stats.tables.tenants)}. `
      + `Nodes in the tree: ${count(stats.tree.nodes)}, of them asked for often: ${count(stats.tree.promoted)}, behind ${count(stats.tree.namespaces)} different texts.`),
    table(["rank", "#prompt tokens under way", "#waiting", "#chunks held", "view of it"], rows, ""));
}

// Requests
function showRequests(recent) {
  const body = recent.map((each) => {
    const choose = () => { picked = each.number; showPlan(); showRequests(recent); };
    const fates = each.fates || {};
    return make("tr", {cls: `pick ${each.number === picked ? "picked" : ""}`, tabindex: 0, "data-number": each.number, "aria-selected": String(each.number === picked),
      on: {click: choose, keydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); choose(); } }}},
      make("td", {}, each.number), make("td", {cls: "wide-only"}, `${count(each.ago_s)} s ago`), make("td", {}, each.outcome),
      make("td", {cls: "number"}, count(each.prompt_tokens)),
      make("td", {}, bar(FATES.map((fate) => [CLASS[fate], fates[fate] || 0, `${NAME[fate]} ${count(fates[fate])}`]), each.prompt_tokens)),
      make("td", {cls: "number"}, ms(each.ttft_ms)), make("td", {cls: "number wide-only"}, ms(each.ms)));
  });
  const scroll = at("requests").scrollTop, focused = document.activeElement?.dataset?.number;
  at("requests").replaceChildren(recent.length ? make("table", {}, make("thead", {}, make("tr", {}, make("th", {}, ""), make("th", {cls: "wide-only"}, "ended"),
    make("th", {}, "outcome"), make("th", {cls: "number"}, "tokens"), make("th", {}, "by fate"), make("th", {cls: "number"}, "first token"), make("th", {cls: "number wide-only"}, "in all"))),
  make("tbody", {}, ...body)) : make("p", {cls: "quiet"}, "no request yet"));
  at("requests").scrollTop = scroll;
  if (focused) at("requests").querySelector(`[data-number="${focused}"]`)?.focus();
}
const origin = (each) => each.from.split(" ")[0];
const FROM = {exact: "found in place", loaded: "loaded, byte for byte", computed: "computed", unknown: "not told"};
async function showPlan() {
  const number = picked;
  const one = await get(`/chunkcache/live/request?number=${number}`).catch((error) => { problem(error); return undefined; });
  if (one === undefined || number !== picked) return;
  if (!one) { at("request").replaceChildren(make("p", {cls: "quiet"}, "That request is not among the last any more.")); return; }
  const place = new Map(one.prompt.map((each, i) => [each.chunk, i + 1]).reverse());
  at("request").replaceChildren(
    make("p", {}, `Request ${one.number}: ${one.mode}${one.is_conversation ? ", of a conversation" : ""}, rank ${one.rank}, ${ms(one.ms)} in all`
      + `${one.dropped ? `, chunks left out: ${count(one.dropped)}` : ""}.`),
    planned(one),
    make("p", {cls: "quiet"}, "Above as retrieved, below the prompt; empty boxes are text that is no chunk. "
      + (one.fates ? `Tokens: ${FATES.map((fate) => `${NAME[fate]} ${count(one.fates[fate])}`).join(", ")}.` : "Its rank does not tell the fates.")),
    one.fallbacks.length ? make("p", {}, "Computed because: ", make("code", {}, one.fallbacks.join(", "))) : "",
    make("h3", {}, "In the prompt"),
    make("ol", {cls: "plan"}, ...one.prompt.map((each) => make("li", {}, make("span", {cls: `key ${origin(each)}`}), named(each.label), " ",
      make("span", {cls: "quiet"}, `${FROM[each.from] || each.from}, ${count(each.end - each.start)} tokens`)))),
    make("h3", {}, "As retrieved"),
    make("ol", {cls: "plan"}, ...one.retrieved.map((each) => make("li", {}, named(each.label), " ", make("span", {cls: "quiet"}, place.has(each.chunk) ? `→ place ${place.get(each.chunk)}` : "")))));
}
// Two rows, the chunks as retrieved and the prompt; a ribbon joins each chunk with its place.
function planned(one) {
  const scale = 1000 / one.prompt_tokens, spans = new Map(one.prompt.map((each) => [each.chunk, each]).reverse());
  const svg = drawn("svg", {viewBox: "0 0 1000 90", preserveAspectRatio: "none", class: "plan", role: "img"});
  const box = (x, y, each) => {
    const width = (each.end - each.start) * scale;
    const rect = drawn("rect", {x, y, width, height: 26, class: `${origin(each)} edge`});
    rect.append(drawn("title", {}, `${each.label}: ${FROM[each.from] || each.from}, ${count(each.end - each.start)} tokens`));
    svg.append(rect);
    return width;
  };
  svg.append(drawn("rect", {x: 0, y: 64, width: 1000, height: 26, class: "text"}));
  let x = 0;
  for (const {chunk} of one.retrieved) {
    const each = spans.get(chunk);
    if (!each) continue;
    const to = each.start * scale, end = each.end * scale, width = end - to;
    svg.append(drawn("path", {d: `M${x} 26 L${x + width} 26 L${end} 64 L${to} 64 Z`, class: `${origin(each)} ribbon`}));
    x += box(x, 0, each);
  }
  for (const each of one.prompt) box(each.start * scale, 64, each);
  return svg;
}

// Tree
async function level(node, offset) {
  const found = await get(`/chunkcache/live/tree?offset=${offset}${node == null ? "" : `&node=${node}`}`).catch((error) => { problem(error); return null; });
  if (!found) return [make("li", {cls: "quiet"}, "not there any more")];
  const items = found.children.map(treeItem), next = offset + items.length;
  if (next < found.num_children) {
    const more = make("li", {}, make("button", {type: "button", on: {click: async () => more.replaceWith(...await level(node, next))}}, `${count(found.num_children - next)} more`));
    items.push(more);
  }
  if (!items.length) items.push(make("li", {cls: "quiet"}, "nothing is cached"));
  return items;
}
function treeItem(each) {
  const held = Object.entries(each.held).map(([rank, tier]) => `rank ${rank}: ${tier}`).join(", ");
  const below = make("ul", {cls: "tree", hidden: ""});
  const toggle = each.num_children ? make("button", {type: "button", "aria-expanded": "false", on: {click: async () => {
    const open = below.hidden;
    toggle.textContent = open ? "−" : "+";
    toggle.setAttribute("aria-expanded", String(open));
    below.hidden = !open;
    if (open) below.replaceChildren(...await level(each.node, 0));
  }}}, "+") : make("span", {cls: "leaf"}, "");
  const behind = each.nodes_behind ? `behind it ${count(each.tokens_behind)} tokens, chunks: ${count(each.nodes_behind)}` : "";
  const own = each.is_root ? [] : [`${count(each.tokens)} tokens`, `${count(each.hits)} hits`, each.promoted ? "asked for often" : "", held || (each.planned ? "under way" : "")];
  const about = [...own, behind].filter(Boolean).join(" · ");
  return make("li", {}, toggle, make("code", {}, each.is_root ? `text ${each.chunk}` : named(each.label || each.chunk)), " ", make("span", {cls: "quiet"}, about), below);
}
at("tree-load").addEventListener("click", async () => {
  at("tree-load").textContent = "Reload";
  at("tree").replaceChildren(make("ul", {cls: "tree"}, ...await level(null, 0)));
});

// The loop
function problem(error) {
  at("state").textContent = error.status === 401 || error.status === 403 ? "locked" : "no answer";
  at("state").className = "bad";
  at("notice").hidden = error.status === 401 && !key;
  at("notice").textContent = error.status === 401 ? "This key opens nothing here." : error.status === 403 && key ? "This key is not the admin's." : error.message;
}
async function poll() {
  clearTimeout(waiting);
  const mine = ++round;
  try {
    const live = await get("/chunkcache/live");
    if (mine !== round) return;
    if (start !== live.start) { // another server's requests have the same numbers
      start = live.start;
      picked = null;
      at("request").replaceChildren(make("p", {cls: "quiet"}, "Choose a request to see its plan."));
      at("tree").replaceChildren();
    }
    at("login").hidden = true; at("notice").hidden = true; at("main").hidden = false;
    at("about").textContent = `${live.stats.version}, ${live.stats.tree.kind} tree, reuse ${live.stats.reuse}`;
    at("state").textContent = `as of ${new Date().toLocaleTimeString()}`;
    at("state").className = "";
    showTiles(live); showCharts(live); showTiers(live.stats); showFallbacks(live); showRequests(live.recent); showRanks(live.stats);
  } catch (error) {
    if (mine !== round) return;
    if (error.status === 401 || error.status === 403) {
      if (start !== null) { location.reload(); return; } // nothing of what was shown stays
      at("login").hidden = error.status === 403 && !key;
    }
    problem(error);
  }
  if (!document.hidden && at("login").hidden) waiting = setTimeout(poll, POLL_MS);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden && at("login").hidden) poll(); });
at("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  at("key").value = "";
  if (/^[\x21-\x7e]+$/.test(key)) poll();
  else problem({status: 401});
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (at("login").hidden) poll(); });
poll();
