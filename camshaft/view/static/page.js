"use strict";
// The page of camshaft runs. Texts of runs are inserted as text nodes only, never as HTML.

const COLORS = ["#2563eb", "#d9480f", "#2f9e44", "#9c36b5", "#c2255c", "#0c8599", "#5f3dc4", "#846358"];
const POLL = 2000;
const TABS = ["Curves", "Responses", "Time", "Config"];
const CHANNELS = {
  advantages: "advantage", old_log_probs: "log-prob", gap: "gap of trainer and generator", entropy: "entropy",
  kl: "log-prob minus reference", values: "value", returns: "return",
};
const embedded = document.getElementById("data");
const stored = embedded === null ? null : JSON.parse(embedded.textContent);
const state = {
  tab: "Curves", runs: [], now: 0, selected: null, x: "step", run: 0, step: null, channel: "advantages",
  source: "", text: "", bin: null, problems: false, shown: 20, signature: "", charts: [],
};

// -- elements and data ----------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick" || name === "onchange" || name === "oninput") node[name] = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (value !== false && value !== null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null).map((child) => child instanceof Node ? child : String(child)));
  return node;
}

function button(text, pressed, onclick) {
  return element("button", { "aria-pressed": String(pressed), type: "button", onclick }, text);
}

async function get(path) {
  if (stored === null) {
    const response = await fetch(path);
    const value = await response.json();
    if (!response.ok) throw new Error(value.error || `status ${response.status}`);
    return value;
  }
  const url = new URL(path, "http://page/");
  const runs = url.searchParams.getAll("run").map(Number);
  if (url.pathname === "/runs") return stored["/runs"];
  if (url.pathname === "/curves") return { ...stored.curves, runs: runs.map((run) => stored.curves.runs[run]) };
  if (url.pathname === "/config") return storedConfig(runs);
  const rows = stored.responses[`${runs[0]}/${url.searchParams.get("step")}`];
  if (rows === undefined) throw new Error("the file does not contain the responses of this step");
  return rows;
}

function storedConfig(runs) {
  const [first, other] = [stored.configs[runs[0]], stored.configs[runs[runs.length - 1]]];
  const keys = [...new Set([...Object.keys(first.config), ...Object.keys(other.config)])];
  const names = /^trainer\.(default_local_dir|experiment_name|validation_data_dir)$/;
  const differing = keys.filter((key) => !names.test(key) && first.config[key] !== other.config[key]);
  return {
    ...first, names: [first.names[0], other.names[0]],
    differences: Object.fromEntries(differing.map((key) => [key, [first.config[key] ?? "None", other.config[key] ?? "None"]])),
  };
}

function number(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

function age(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${Math.floor(seconds)} s`;
}

const query = (runs) => runs.map((run) => `run=${run}`).join("&");
const color = (run) => COLORS[run % COLORS.length];

// -- runs and advice ------------------------------------------------------------------------------

function drawRuns() {
  const cells = ["", "run", "state", "step", "phase", "for", "reward", "validation"];
  const head = element("tr", {}, ...cells.map((text) => element("th", {}, text)));
  const rows = state.runs.map((run, index) => {
    const box = element("input", { type: "checkbox", "aria-label": `show ${run.name}`, onchange: () => toggle(index) });
    box.checked = state.selected.includes(index);
    const name = element("td", {}, element("span", { class: "swatch", style: { background: color(index) } }), run.name);
    name.title = run.path;
    return element(
      "tr", {}, element("td", {}, box), name, element("td", { class: `state-${run.state}` }, run.state),
      element("td", {}, run.total ? `${run.step}/${run.total}` : run.step), element("td", {}, run.phase),
      element("td", {}, run.age === null ? "" : age(run.age)), element("td", {}, number(run.reward)),
      element("td", {}, number(run.validation)),
    );
  });
  document.getElementById("runs").replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
  const boxes = state.selected.flatMap((index) => state.runs[index].advice.map((advice) => element(
    "div", { class: "advice" }, element("strong", {}, `${state.runs[index].name}: ${advice.title}. `), advice.text,
  )));
  document.getElementById("advice").replaceChildren(...boxes);
}

function toggle(index) {
  const selected = new Set(state.selected);
  if (!selected.delete(index)) selected.add(index);
  state.selected = [...selected].sort((a, b) => a - b);
  drawRuns();
  show();
}

function drawTabs() {
  document.getElementById("tabs").replaceChildren(...TABS.map((tab) => button(tab, tab === state.tab, () => open(tab))));
}

function open(tab) {
  state.tab = tab;
  drawTabs();
  show();
}

function show() {
  state.signature = "";
  return update(true);
}

// -- curves ---------------------------------------------------------------------------------------

function positions(run, steps) {
  if (state.x === "step") return steps;
  const at = run["timing/at"];
  if (!at || !at.steps.length) return steps.map(() => null);
  return steps.map((step) => {
    let index = at.steps.findIndex((other) => other >= step);
    if (index < 0) index = at.steps.length - 1;
    return (at.values[index] - at.values[0]) / 3600;
  });
}

function axisNumber(values) {
  const span = Math.max(...values.map(Math.abs));
  return values.map((value) => value === 0 ? "0" : span < 1e-3 || span >= 1e5 ? value.toExponential(1) : String(Number(value.toPrecision(5))));
}

function chart(panel, reply) {
  const box = element("div", { class: "chart" }, element("h3", {}, panel.title));
  box.title = panel.names.map((name) => `${name}: ${reply.descriptions[name] || ""}`).join("\n");
  const tables = [], series = [];
  reply.runs.forEach((run, order) => panel.names.forEach((name, line) => {
    if (!run[name]) return;
    const points = positions(run, run[name].steps).map((x, i) => [x, run[name].values[i]]).filter((point) => point[0] !== null);
    if (!points.length) return;
    const index = state.selected[order];
    tables.push([points.map((point) => point[0]), points.map((point) => point[1])]);
    const label = [reply.runs.length > 1 ? state.runs[index].name : "", panel.names.length > 1 ? name : ""].filter(Boolean).join(" ");
    series.push({
      label: label || name, stroke: color(reply.runs.length > 1 ? index : line), width: 1.5,
      dash: reply.runs.length > 1 && line ? [4 * line, 3] : undefined, spanGaps: true,
      points: { show: points.length < 40, size: 4 }, value: (_, value) => number(value),
    });
  }));
  if (!tables.length) return null;
  const options = {
    width: 380, height: 190, series: [{ label: state.x, value: (_, value) => number(value) }, ...series],
    scales: { x: { time: false }, y: { range: yRange } },
    axes: [{ size: 32 }, { size: 70, values: (_, values) => axisNumber(values) }],
    cursor: { focus: { prox: 20 } },
  };
  return { box, draw: () => {
    options.width = box.clientWidth - 14;
    const plot = new uPlot(options, uPlot.join(tables), box);
    plot.over.addEventListener("click", () => {
      if (plot.cursor.idx === null || state.x !== "step") return;
      openStep(plot.data[0][plot.cursor.idx]);
    });
    state.charts.push(plot);
  } };
}

function clearCharts() {
  state.charts.forEach((plot) => plot.destroy());
  state.charts = [];
}

function yRange(_, low, high) {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const margin = (high - low) * 0.05;
  return [low - margin, high + margin];
}

async function drawCurves() {
  const reply = await get(`/curves?${query(state.selected)}`);
  const controls = element(
    "div", { class: "controls" }, "x axis:", ...["step", "hours"].map((x) => button(x, state.x === x, () => { state.x = x; show(); })),
    element("span", {}, "A click on a point opens the responses of its step. Drag to zoom; double-click resets."),
  );
  clearCharts();
  const drawn = [];
  const rows = reply.layout.flatMap((row) => {
    const charts = row.panels.map((panel) => chart(panel, reply)).filter((each) => each !== null);
    drawn.push(...charts);
    return charts.length ? [element("h2", {}, row.title), element("div", { class: "charts" }, ...charts.map((each) => each.box))] : [];
  });
  document.getElementById("view").replaceChildren(controls, ...(rows.length ? rows : ["No metrics yet."]));
  drawn.forEach((each) => each.draw());
}

function isZoomed(plot) {
  const positions = plot.data[0];
  return plot.scales.x.min > positions[0] || plot.scales.x.max < positions[positions.length - 1];
}

function openStep(step) {
  const run = state.selected.find((index) => state.runs[index].samples.length);
  if (run === undefined) return;
  const steps = state.runs[run].samples;
  state.run = run;
  state.step = steps.reduce((best, other) => Math.abs(other - step) < Math.abs(best - step) ? other : best, steps[0]);
  open("Responses");
}

// -- responses ------------------------------------------------------------------------------------

async function drawResponses() {
  clearCharts();
  const view = document.getElementById("view");
  const candidates = state.selected.filter((index) => state.runs[index].samples.length);
  if (!candidates.length) {
    view.replaceChildren("The selected runs have no stored responses.");
    return;
  }
  if (!candidates.includes(state.run)) [state.run, state.step] = [candidates[0], null];
  const steps = state.runs[state.run].samples;
  if (!steps.includes(state.step)) state.step = steps[steps.length - 1];
  const reply = await get(`/responses?run=${state.run}&step=${state.step}`);
  const rows = reply.rows;
  const choose = (options, value, onchange, label) => {
    const select = element("select", { "aria-label": label, onchange: () => onchange(select.value) },
      ...options.map(([key, text]) => element("option", { value: key }, text)));
    select.value = value;
    return select;
  };
  const at = steps.indexOf(state.step);
  const go = (offset) => { state.step = steps[Math.min(steps.length - 1, Math.max(0, at + offset))]; state.bin = null; show(); };
  const channels = Object.entries(CHANNELS).filter(([name]) => rows.some((row) => tokenValues(row, name)));
  if (channels.length && !channels.some(([name]) => name === state.channel)) state.channel = channels[0][0];
  const sources = [...new Set(rows.map((row) => row.data_source))];
  const text = element("input", { type: "search", placeholder: "text", "aria-label": "filter by text", onchange: () => { state.text = text.value; show(); } });
  text.value = state.text;
  const controls = element(
    "div", { class: "controls" },
    choose(candidates.map((index) => [index, state.runs[index].name]), state.run, (value) => { state.run = Number(value); state.step = null; show(); }, "run"),
    button("‹", false, () => go(-1)),
    choose(steps.map((step) => [step, `step ${step}`]), state.step, (value) => { state.step = Number(value); state.bin = null; show(); }, "step"),
    button("›", false, () => go(1)),
    choose([["", "all sources"], ...sources.map((source) => [source, source])], sources.includes(state.source) ? state.source : "", (value) => { state.source = value; show(); }, "source"),
    text, button("failed or cut", state.problems, () => { state.problems = !state.problems; show(); }),
    channels.length ? "colour tokens by" : null,
    channels.length ? choose(channels, state.channel, (value) => { state.channel = value; show(); }, "colour") : null,
    channels.length ? scale(rows) : null,
  );
  const bins = histogram(rows);
  const kept = rows.filter((row) => (!sources.includes(state.source) || row.data_source === state.source)
    && (!state.text || `${row.prompt}\n${row.response}`.includes(state.text))
    && (!state.problems || row.failure !== null || !row.finished)
    && (state.bin === null || bins.of(row.score) === state.bin));
  const groups = new Map();
  rows.forEach((row) => groups.set(row.uid, [...(groups.get(row.uid) || []), row]));
  const shown = [...new Set(kept.map((row) => row.uid))];
  const spread = (uid) => Math.max(...groups.get(uid).map((row) => row.score)) - Math.min(...groups.get(uid).map((row) => row.score));
  const hasTokens = (uid) => groups.get(uid).some((row) => row.token_ends) ? 1 : 0;
  shown.sort((a, b) => hasTokens(b) - hasTokens(a) || spread(b) - spread(a));
  const limits = channelLimits(rows);
  const more = shown.length > state.shown ? button(`show ${shown.length - state.shown} more groups`, false, () => { state.shown += 50; show(); }) : null;
  view.replaceChildren(
    controls, bins.node, element("p", {}, `${kept.length} of ${rows.length} responses in ${shown.length} groups`),
    ...shown.slice(0, state.shown).map((uid) => group(groups.get(uid), new Set(kept), limits)), ...(more ? [more] : []),
  );
}

function histogram(rows) {
  const scores = rows.map((row) => row.score).filter((score) => score !== null);
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  const count = low === high ? 1 : Math.min(20, new Set(scores).size);
  const of = (score) => Math.min(count - 1, Math.floor((score - low) / ((high - low) || 1) * count));
  const sizes = Array.from({ length: count }, () => 0);
  scores.forEach((score) => { sizes[of(score)] += 1; });
  const bars = sizes.map((size, bin) => {
    const bar = button("", state.bin === bin, () => { state.bin = state.bin === bin ? null : bin; show(); });
    bar.style.height = `${100 * size / Math.max(...sizes)}%`;
    bar.title = `score ${number(low + (high - low) * bin / count)} to ${number(low + (high - low) * (bin + 1) / count)}: ${size} responses`;
    bar.setAttribute("aria-label", bar.title);
    return bar;
  });
  const range = element("p", {}, `scores from ${number(low)} to ${number(high)}; a click on a bar selects its responses`);
  return { of, node: element("div", {}, element("div", { class: "histogram" }, ...bars), range) };
}

function group(rows, kept, limits) {
  const scores = rows.map((row) => row.score);
  const equal = rows.length > 1 && Math.min(...scores) === Math.max(...scores);
  const mean = scores.reduce((sum, score) => sum + score, 0) / scores.length;
  const head = element("p", {}, `${rows[0].uid} (${rows[0].data_source}), ${rows.length} responses, mean score ${number(mean)}, truth: ${rows[0].ground_truth}`,
    equal ? element("strong", {}, " All scores are equal: no signal.") : null);
  const heading = element("tr", {}, ...["score", "advantage", "tokens", "response"].map((text, i) => element("th", { class: i < 3 ? "number" : false }, text)));
  const lines = [...rows].sort((a, b) => b.score - a.score).map((row) => {
    const notes = [row.failure, row.finished ? null : "cut"].filter((note) => note !== null).map((note) => element("span", { class: "note" }, note));
    const parts = Object.keys(row).filter((name) => name.startsWith("score/") && row[name] !== null).map((name) => `${name.slice(6)} ${number(row[name])}`);
    const score = element("td", { class: "number" }, number(row.score));
    score.title = parts.join("\n");
    const node = element("tr", {}, score, element("td", { class: "number" }, number(row.advantage)),
      element("td", { class: "number" }, row.response_tokens), element("td", {}, ...notes, response(row, limits)));
    if (!kept.has(row)) node.style.opacity = "0.45";
    return node;
  });
  return element("div", { class: "group" }, head, element("div", { class: "prompt" }, rows[0].prompt),
    element("table", {}, element("thead", {}, heading), element("tbody", {}, ...lines)));
}

function tokenValues(row, channel) {
  const difference = (a, b) => a && b ? a.map((value, i) => value === null || b[i] === null ? null : value - b[i]) : null;
  if (channel === "gap") return difference(row.old_log_probs, row.rollout_log_probs);
  if (channel === "kl") return difference(row.old_log_probs, row.ref_log_prob);
  return row[channel] || null;
}

function channelLimits(rows) {
  let limit = 0;
  rows.forEach((row) => (tokenValues(row, state.channel) || []).forEach((value) => { limit = Math.max(limit, Math.abs(value || 0)); }));
  return limit || 1;
}

// Shades from -SHADES (red) to SHADES (green). Few shades let neighbours share an element.
const SHADES = 12;

function shade(share) {
  return Math.round(Math.max(-1, Math.min(1, share)) * SHADES);
}

function heat(level) {
  const alpha = Math.abs(level) / SHADES * 0.75;
  return level >= 0 ? `rgba(47, 158, 68, ${alpha})` : `rgba(224, 49, 49, ${alpha})`;
}

function addShades() {
  const rules = Array.from({ length: 2 * SHADES + 1 }, (_, i) => `.heat${i} { background: ${heat(i - SHADES)}; }`);
  document.head.append(element("style", {}, rules.join("\n")));
}

function scale(rows) {
  const limit = channelLimits(rows);
  const bar = element("span", { class: "scale", style: { background: `linear-gradient(90deg, ${heat(-SHADES)}, transparent, ${heat(SHADES)})` } });
  return element("span", {}, `${number(-limit)} `, bar, ` ${number(limit)}`);
}

function response(row, limit) {
  const box = element("div", { class: "response" });
  const values = tokenValues(row, state.channel);
  if (!row.token_ends || !values) {
    box.append(row.response);
    return box;
  }
  const characters = Array.from(row.response), ends = row.token_ends, parts = document.createDocumentFragment();
  const text = (first, last) => characters.slice(first ? ends[first - 1] : 0, ends[last]).join("");
  let first = 0;
  for (let i = 0; i < ends.length; i += 1) {
    const level = shade((values[i] || 0) / limit);
    if (i + 1 < ends.length && shade((values[i + 1] || 0) / limit) === level && i - first < 10) continue;
    const span = document.createElement("span");
    span.className = `heat${level + SHADES}`;
    span.textContent = text(first, i);
    const tokens = [first, i];
    span.onmouseenter = () => { span.title = describe(tokens, values, text); };
    parts.append(span);
    first = i + 1;
  }
  box.append(parts, characters.slice(ends[ends.length - 1]).join(""));
  return box;
}

function describe([first, last], values, text) {
  const lines = [];
  for (let i = first; i <= last; i += 1) lines.push(`${JSON.stringify(text(i, i))} ${number(values[i])}`);
  return lines.join("\n");
}

// -- time and config ------------------------------------------------------------------------------

async function drawTime() {
  clearCharts();
  const reply = await get(`/curves?${query(state.selected)}`);
  const blocks = reply.runs.map((run, order) => {
    const info = state.runs[state.selected[order]];
    const phases = Object.keys(run).filter((name) => /^timing_s\/(gen|gen_max|reward|reward_max|old_log_prob|ref|values|adv|update_critic|update_actor)$/.test(name));
    const mean = (name) => { const last = run[name].values.slice(-50).filter((value) => value !== null); return last.reduce((a, b) => a + b, 0) / (last.length || 1); };
    const seconds = phases.map(mean);
    const step = run["timing_s/step"] ? mean("timing_s/step") : seconds.reduce((a, b) => a + b, 0);
    const bar = element("div", { class: "phases" }, ...phases.map((name, i) => element("span", {
      style: { width: `${100 * seconds[i] / (step || 1)}%`, background: COLORS[i % COLORS.length] }, title: `${name}: ${number(seconds[i])} s`,
    })));
    const legend = phases.map((name, i) => element("tr", {}, element("td", {}, element("span", { class: "swatch", style: { background: COLORS[i % COLORS.length] } }), name.slice(9)),
      element("td", { class: "number" }, `${number(seconds[i])} s`), element("td", { class: "number" }, `${number(100 * seconds[i] / (step || 1))} %`)));
    const phase = info.age === null ? "" : `, now in phase ${info.phase} for ${age(info.age)}`;
    return element("div", { class: "group" }, element("p", {}, `${info.name}: ${number(step)} s per step, mean of the last steps${phase}`), bar,
      element("table", { style: { width: "auto" } }, ...legend));
  });
  document.getElementById("view").replaceChildren(element("h2", {}, "Phases of a step"), ...blocks);
}

async function drawConfig() {
  clearCharts();
  const runs = state.selected.slice(0, 2);
  const reply = await get(`/config?${query(runs)}`);
  const pairs = (rows) => element("table", { style: { width: "auto" } }, ...rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell)))));
  const parts = [];
  if (runs.length > 1) {
    const rows = Object.entries(reply.differences).map(([key, values]) => [key, ...values]);
    parts.push(element("h2", {}, `Differences of ${reply.names.join(" and ")}`), rows.length ? pairs(rows) : "The configs are equal.");
  }
  const shown = (key, value) => /^(started|ended)$/.test(key) && value ? new Date(value * 1000).toLocaleString()
    : value === null ? "" : typeof value === "object" ? JSON.stringify(value) : value;
  const info = Object.entries(reply.info).map(([key, value]) => [key, shown(key, value)]);
  parts.push(element("h2", {}, `Run ${reply.names[0]}`), pairs(info), element("h2", {}, "Config"), pairs(Object.entries(reply.config)));
  document.getElementById("view").replaceChildren(...parts);
}

// -- updates --------------------------------------------------------------------------------------

const DRAW = { Curves: drawCurves, Responses: drawResponses, Time: drawTime, Config: drawConfig };

async function update(force = false) {
  const connection = document.getElementById("connection");
  try {
    const reply = await get("/runs");
    [state.runs, state.now] = [reply.runs, reply.now];
    if (state.selected === null) state.selected = state.runs.map((_, index) => index).slice(0, 4);
    drawRuns();
    const view = document.getElementById("view");
    if (!state.selected.length) {
      view.replaceChildren("Select a run.");
      return;
    }
    // Redraw only if something that this view shows has changed, so that a zoom or a scroll position remains.
    const steps = state.selected.map((index) => state.runs[index].step);
    const signature = JSON.stringify([state.tab, state.selected, state.tab === "Config" ? 0 : state.tab === "Responses" ? state.step : steps]);
    if (force || (signature !== state.signature && state.tab !== "Responses" && !state.charts.some(isZoomed))) {
      state.signature = signature;
      await DRAW[state.tab]();
    }
    connection.textContent = "";
  } catch (error) {
    connection.textContent = error instanceof TypeError && stored === null ? "The server does not answer; is camshaft view still running?" : error.message;
  }
}

async function poll() {
  await update();
  if (stored === null) setTimeout(poll, POLL);
}

if (location.search.includes("token=")) history.replaceState(null, "", location.pathname);
addShades();
drawTabs();
poll();
