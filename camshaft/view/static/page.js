"use strict";
// The page of camshaft runs. Texts of runs are inserted as text nodes only, never as HTML.

// Colors of runs, metrics and phases, which are distinguishable on the background of each theme.
const COLORS = {
  light: ["#2563eb", "#d9480f", "#2f9e44", "#9c36b5", "#c2255c", "#0c8599", "#5f3dc4", "#846358"],
  dark: ["#74a4ff", "#ff9a5c", "#63d17f", "#d68cf0", "#ff7fa8", "#4cc9dc", "#a996ff", "#c9a594"],
};
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const BAND = ["critic/score/p10", "critic/score/p90"];
const MEDIAN = "critic/score/p50";
const MAX_SHOWN = 8;
const MAX_BANDS = 3;
const POLL = 2000;
const TABS = ["Curves", "Responses", "Time", "Config"];
const CHANNELS = {
  advantages: "advantage", old_log_probs: "log-prob", gap: "gap of trainer and generator", entropy: "entropy",
  kl: "log-prob minus reference", values: "value", returns: "return",
};
const embedded = document.getElementById("data");
const ORDERS = { worst: "worst", best: "best", gap: "largest gap", long: "longest" };
const stored = embedded === null ? null : JSON.parse(embedded.textContent);
const state = {
  tab: "Curves", runs: [], keys: {}, now: 0, selected: null, x: "step", run: 0, step: null, order: "", zoom: null, channel: "advantages",
  source: "", text: "", bin: null, problems: false, shown: 20, signature: "", charts: [],
};

// -- elements and data ----------------------------------------------------------------------------

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node[name] = value;
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
  if (url.pathname === "/phases") return runs.map((run) => stored.phases[run]);
  if (url.pathname === "/lanes") return runs.map((run) => stored.lanes[run]);
  const rows = stored.responses[`${runs[0]}/${url.searchParams.get("step")}`];
  if (rows === undefined) throw new Error("the file does not contain the responses of this step");
  return rows;
}

function storedConfig(runs) {
  const configs = runs.map((run) => stored.configs[run]), first = configs[0];
  const keys = Object.keys(first.config).filter((key) => configs.every(({ config }) => key in config));
  const ignored = first.ignored.filter((prefix) => configs.every((one) => one.ignored.includes(prefix)));
  const isCompared = (key) => !ignored.some((prefix) => key.startsWith(prefix));
  const differing = keys.filter((key) => isCompared(key) && configs.some(({ config }) => config[key] !== first.config[key]));
  return {
    ...first, names: configs.map((config) => config.names[0]),
    differences: Object.fromEntries(differing.map((key) => [key, configs.map(({ config }) => config[key])])),
  };
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

function age(seconds) {
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (seconds >= length) return `${Math.floor(seconds / length)} ${unit}`;
  }
  return `${Math.floor(seconds)} s`;
}

const query = (runs) => runs.map((run) => `run=${run}`).join("&");
const color = (index) => COLORS[theme()][index % COLORS.light.length];

// -- theme ----------------------------------------------------------------------------------------

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  return document.documentElement.dataset.theme;
}

// The theme that the reader has chosen, or null to follow the system. A page may not be allowed to store it.
function chosenTheme(value) {
  try {
    if (value !== undefined) localStorage.setItem("theme", value);
    return localStorage.getItem("theme");
  } catch {
    return value ?? null;
  }
}

function setTheme(value) {
  document.documentElement.dataset.theme = value;
  const other = value === "dark" ? "light" : "dark";
  const control = button(other === "dark" ? "☾" : "☀", false, () => { chosenTheme(other); setTheme(other); });
  control.setAttribute("aria-label", `switch to ${other} mode`);
  control.removeAttribute("aria-pressed");
  document.getElementById("theme").replaceChildren(control);
  if (state.selected === null) return;
  drawRuns();
  show();
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// -- runs and advice ------------------------------------------------------------------------------

const RUN_CELLS = {
  state: (run) => run.state,
  step: (run) => run.total ? `${run.step}/${run.total}` : run.step,
  phase: (run) => run.phase,
  for: (run) => run.age === null ? "" : age(run.age),
  reward: (run) => number(run.reward),
  validation: (run) => number(run.validation),
  problem: (run) => run.advice.map((advice) => advice.title).join(", "),
};

const swatch = (paint) => element("span", { class: "swatch", style: { background: paint } });

// The table of runs, which is the legend of all charts. Keys in which the runs differ follow the name.
function drawRuns() {
  const keys = Object.entries(state.keys).map(([name, values]) => [name, (_, index) => values[index] ?? ""]);
  const columns = [...keys, ...Object.entries(RUN_CELLS)].filter(([, text]) => state.runs.some((run, index) => text(run, index) !== ""));
  const head = element("tr", {}, ...["", "run", ...columns.map(([name]) => name)].map((text) => element("th", {}, text)));
  const rows = state.runs.map((run, index) => {
    const box = element("input", { type: "checkbox", "aria-label": `show ${run.name}`, onchange: () => toggle(index) });
    box.checked = state.selected.includes(index);
    const name = element("td", { class: "name" }, swatch(color(index)), run.name);
    name.title = run.path;
    const cells = columns.map(([column, text]) => element(
      "td", { class: column === "state" ? `state-${run.state}` : column, "data-label": column === "state" ? null : column }, text(run, index),
    ));
    return element("tr", {}, element("td", {}, box), name, ...cells);
  });
  document.getElementById("runs").replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
  document.getElementById("legend").replaceChildren(...state.selected.map((index) => element("span", {}, swatch(color(index)), state.runs[index].name)));
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

// The unit of the time axis: its name, its length and the shortest run that uses it, in seconds.
const UNITS = [["h", 3600, 7200], ["min", 60, 300], ["s", 1, 0]];

function timeUnit(reply) {
  const longest = Math.max(0, ...reply.runs.map((run) => run["timing/at"]?.values.at(-1) ?? 0));
  return UNITS.find(([, , shortest]) => longest >= shortest);
}

function positions(run, steps, length) {
  if (state.x === "step") return steps;
  const at = run["timing/at"];
  if (!at || !at.steps.length) return steps.map(() => null);
  // Without a later step, the index -1 selects the last value.
  return steps.map((step) => at.values.at(at.steps.findIndex((other) => other >= step)) / length);
}

function axisNumber(values) {
  const span = Math.max(...values.map(Math.abs));
  return values.map((value) => value === 0 ? "0" : span < 1e-3 || span >= 1e5 ? value.toExponential(1) : String(Number(value.toPrecision(5))));
}

// Length of the folders that all names share, as in critic/score/mean and critic/score/p10.
function commonPrefix(names) {
  const folder = names[0].slice(0, names[0].lastIndexOf("/") + 1);
  return names.every((name) => name.startsWith(folder)) ? folder.length : 0;
}

// The curves of a panel. Runs differ in color; metrics of several runs differ in their dashes. The band has no lines.
function curvesOf(panel, reply, length) {
  const several = reply.runs.length > 1, prefix = commonPrefix(panel.names);
  const names = panel.names.filter((name) => !(several && name === MEDIAN));
  const lines = names.filter((name) => !BAND.includes(name));
  return reply.runs.flatMap((run, order) => names.map((name) => {
    if (!run[name]) return null;
    const points = positions(run, run[name].steps, length).map((x, i) => [x, run[name].values[i]]).filter((point) => point[0] !== null);
    if (!points.length) return null;
    const line = lines.indexOf(name), index = state.selected[order];
    return {
      run: index, name, isEdge: line < 0, label: name.slice(prefix), paint: color(several ? index : Math.max(0, line)),
      dash: several ? DASHES[Math.max(0, line) % DASHES.length] : [], table: [points.map((point) => point[0]), points.map((point) => point[1])],
    };
  })).filter((curve) => curve !== null);
}

// Bands between the lower and the upper quantile of each run. Bands of many runs would hide each other.
function bandsOf(curves) {
  const index = (run, name) => curves.findIndex((curve) => curve.run === run && curve.name === name) + 1;
  const runs = [...new Set(curves.filter((curve) => curve.isEdge).map((curve) => curve.run))];
  return (runs.length > MAX_BANDS ? [] : runs).flatMap((run) => {
    const [low, high] = BAND.map((name) => index(run, name));
    return low && high ? [{ series: [high, low], fill: `${curves[high - 1].paint}${theme() === "dark" ? "38" : "26"}` }] : [];
  });
}

// One line under the title of a chart: the metrics of several, and the last values where there is room.
function valuesOf(curves) {
  const lines = curves.filter((curve) => !curve.isEdge);
  const band = bandsOf(curves).length ? [element("span", {}, "shaded: p10 to p90")] : [];
  const last = (curve) => element("b", {}, number(curve.table[1].findLast((value) => value !== null), 3));
  const runs = new Set(lines.map((curve) => curve.run)), names = new Set(lines.map((curve) => curve.label));
  const key = (curve, paint) => element("span", { class: "stroke", style: { borderTopStyle: curve.dash.length ? "dashed" : "solid", borderColor: paint } });
  if (runs.size > 1 && names.size > 1) {
    const first = [...names].map((name) => lines.find((curve) => curve.label === name));
    return element("div", { class: "values" }, ...first.map((curve) => element("span", {}, key(curve, style("--muted")), curve.label)), ...band);
  }
  const parts = lines.map((curve) => element("span", { title: state.runs[curve.run].name }, runs.size > 1 ? swatch(curve.paint) : key(curve, curve.paint), names.size > 1 ? curve.label : "", last(curve)));
  return element("div", { class: "values" }, ...parts, ...band);
}

function chart(panel, reply, [, length]) {
  const curves = curvesOf(panel, reply, length);
  if (!curves.length) return null;
  const box = element("div", { class: "chart" }, element("h3", {}, panel.title, element("span", {}, panel.unit)), valuesOf(curves));
  box.firstChild.title = panel.names.map((name) => `${name}: ${reply.descriptions[name] || ""}`).join("\n");
  const series = curves.map((curve) => ({
    label: curve.label, stroke: curve.isEdge ? "transparent" : curve.paint, width: curve.isEdge ? 0 : 1.5, dash: curve.dash, spanGaps: true,
    points: { show: !curve.isEdge && curve.table[0].length < 40, size: 4 },
  }));
  const zoom = state.x === "step" ? state.zoom : null, axis = { stroke: style("--muted"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line"), width: 1 } };
  const options = {
    width: 380, height: 185, series: [{}, ...series], bands: bandsOf(curves), legend: { show: false },
    scales: { x: { time: false, range: zoom === null ? undefined : () => zoom }, y: { range: yRange } },
    axes: [{ ...axis, size: 32 }, { ...axis, size: 62, values: (_, values) => axisNumber(values) }],
    cursor: { focus: { prox: 20 }, drag: { setScale: state.x !== "step" } },
    hooks: { setCursor: [(plot) => showTip(plot, curves)], setSelect: [zoomIn] },
  };
  const isZero = curves.every((curve) => curve.table[1].every((value) => value === 0));
  return { box, isZero, title: panel.title, draw: () => {
    options.width = box.clientWidth - 14;
    const plot = new uPlot(options, uPlot.join(curves.map((curve) => curve.table)), box);
    plot.over.addEventListener("click", () => {
      if (plot.cursor.idx === null || state.x !== "step") return;
      openStep(plot.data[0][plot.cursor.idx], curves[nearest(plot)].run);
    });
    plot.over.addEventListener("mouseleave", hideTip);
    state.charts.push(plot);
  } };
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

// The values of all curves at the cursor.
function showTip(plot, curves) {
  const { idx, left, top } = plot.cursor, tip = document.getElementById("tip");
  if (idx === null || idx === undefined || left < 0) return hideTip();
  const several = new Set(curves.map((curve) => curve.run)).size > 1, names = new Set(curves.filter((curve) => !curve.isEdge).map((curve) => curve.name)).size > 1;
  const range = (run) => BAND.map((name) => plot.data[curves.findIndex((curve) => curve.run === run && curve.name === name) + 1]?.[idx]);
  const rows = curves.flatMap((curve, i) => {
    const value = plot.data[i + 1][idx];
    if (curve.isEdge || value === null || value === undefined) return [];
    const hasBand = curve.label === "mean" && curves.some((other) => other.isEdge && other.run === curve.run);
    const spread = hasBand ? ` (${range(curve.run).map((edge) => number(edge)).join(" to ")})` : "";
    const label = [several ? state.runs[curve.run].name : "", names || !several ? curve.label : ""].filter(Boolean).join(", ");
    return [element("tr", {}, element("td", {}, swatch(curve.paint), label), element("td", { class: "number" }, number(value), spread))];
  });
  if (!rows.length) return hideTip();
  const at = state.x === "step" ? `step ${plot.data[0][idx]}` : number(plot.data[0][idx]);
  tip.replaceChildren(element("div", {}, at), element("table", {}, ...rows));
  tip.hidden = false;
  const over = plot.over.getBoundingClientRect(), width = tip.offsetWidth, height = tip.offsetHeight;
  const beside = over.left + left + 14;
  tip.style.left = `${Math.max(4, beside + width > innerWidth - 4 ? over.left + left - width - 14 : beside)}px`;
  tip.style.top = `${Math.max(4, Math.min(over.top + top + 14, innerHeight - height - 4))}px`;
}

// Index of the curve that is nearest to the cursor.
function nearest(plot) {
  const distance = (values, index) => {
    const value = plot.series[index + 1].width ? values[plot.cursor.idx] : null; // the edges of a band have no line
    return value === null || value === undefined ? Infinity : Math.abs(plot.valToPos(value, "y") - plot.cursor.top);
  };
  const distances = plot.data.slice(1).map(distance);
  return distances.indexOf(Math.min(...distances));
}

function zoomIn(plot) {
  if (state.x !== "step" || plot.select.width < 3) return;
  const [first, last] = [plot.select.left, plot.select.left + plot.select.width].map((x) => plot.posToVal(x, "x"));
  setZoom([Math.max(0, Math.floor(first)), Math.ceil(last)]);
}

function setZoom(zoom) {
  state.zoom = zoom;
  show();
}

function clearCharts() {
  state.charts.forEach((plot) => plot.destroy());
  state.charts = [];
  hideTip();
}

function yRange(_, low, high) {
  if (low === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const margin = (high - low) * 0.05;
  return [low - margin, high + margin];
}

async function drawCurves() {
  const range = state.x === "step" && state.zoom !== null ? `&first=${state.zoom[0]}&last=${state.zoom[1]}` : "";
  const reply = await get(`/curves?${query(state.selected)}${range}`);
  const unit = timeUnit(reply);
  const controls = element(
    "div", { class: "controls" }, "x axis:", ...["step", "time"].map((x) => button(x, state.x === x, () => { state.x = x; show(); })),
    element("span", { class: "unit" }, state.x === "step" ? "" : `time, ${unit[0]}`),
    range ? button(`steps ${state.zoom.join(" to ")} ×`, true, () => setZoom(null)) : null,
    element("span", { class: "hint" }, state.x === "step" ? "A click on a point opens the responses of its step. Drag to zoom." : "Drag to zoom; double-click resets."),
  );
  clearCharts();
  const drawn = [];
  const rows = reply.layout.flatMap((row) => {
    const charts = row.panels.map((panel) => chart(panel, reply, unit)).filter((each) => each !== null);
    const shown = charts.filter((each) => row.title !== "Failures" || !each.isZero);
    drawn.push(...shown);
    const zero = charts.filter((each) => !shown.includes(each)).map((each) => each.title);
    const none = zero.length ? element("p", { class: "hint" }, `None in the steps shown: ${zero.join(", ").toLowerCase()}.`) : null;
    return charts.length ? [element("h2", {}, row.title), element("div", { class: "charts" }, ...shown.map((each) => each.box)), ...(none ? [none] : [])] : [];
  });
  document.getElementById("view").replaceChildren(controls, ...(rows.length ? rows : ["No metrics yet."]));
  drawn.forEach((each) => each.draw());
}

function isZoomed(plot) {
  if (state.x === "step") return false; // the range of steps remains when the charts are drawn again
  const positions = plot.data[0];
  return plot.scales.x.min > positions[0] || plot.scales.x.max < positions[positions.length - 1];
}

function openStep(step, run) {
  if (!state.runs[run].samples.length) return;
  const steps = state.runs[run].samples;
  [state.run, state.order] = [run, ""];
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
  const reply = await get(state.order ? `/ranked?run=${state.run}&order=${state.order}` : `/responses?run=${state.run}&step=${state.step}`);
  const rows = reply.rows;
  const choose = (options, value, onchange, label) => {
    const select = element("select", { "aria-label": label, onchange: () => onchange(select.value) },
      ...options.map(([key, text]) => element("option", { value: key }, text)));
    select.value = value;
    return select;
  };
  const at = steps.indexOf(state.step);
  const goTo = (step) => { [state.step, state.order, state.bin] = [step, "", null]; show(); };
  const go = (offset) => goTo(steps[Math.min(steps.length - 1, Math.max(0, at + offset))]);
  const rank = (order) => { [state.order, state.bin] = [order, null]; show(); };
  const channels = Object.entries(CHANNELS).filter(([name]) => rows.some((row) => tokenValues(row, name)));
  if (channels.length && !channels.some(([name]) => name === state.channel)) state.channel = channels[0][0];
  const sources = [...new Set(rows.map((row) => row.data_source))];
  const text = element("input", { type: "search", placeholder: "text", "aria-label": "filter by text", onchange: () => { state.text = text.value; show(); } });
  text.value = state.text;
  const controls = element(
    "div", { class: "controls" },
    choose(candidates.map((index) => [index, state.runs[index].name]), state.run, (value) => { [state.run, state.step, state.order] = [Number(value), null, ""]; show(); }, "run"),
    button("‹", false, () => go(-1)),
    choose(steps.map((step) => [step, `step ${step}`]), state.step, (value) => goTo(Number(value)), "step"),
    button("›", false, () => go(1)),
    ...(stored === null ? ["all steps:", ...Object.entries(ORDERS).map(([order, label]) => button(label, state.order === order, () => rank(state.order === order ? "" : order)))] : []),
    sources.length > 1 ? choose([["", "all sources"], ...sources.map((source) => [source, source])], sources.includes(state.source) ? state.source : "", (value) => { state.source = value; show(); }, "source") : null,
    text, button("failed or cut", state.problems, () => { state.problems = !state.problems; show(); }),
    channels.length ? "color tokens by" : null,
    channels.length ? choose(channels, state.channel, (value) => { state.channel = value; show(); }, "color") : null,
    channels.length ? scale(rows) : null,
  );
  const bins = histogram(rows);
  const kept = rows.filter((row) => (!sources.includes(state.source) || row.data_source === state.source)
    && (!state.text || `${row.prompt}\n${row.response}`.includes(state.text))
    && (!state.problems || row.failure !== null || !row.finished)
    && (state.bin === null || bins.of(row.score) === state.bin));
  const groups = new Map();
  const key = (row) => `${row.step || ""} ${row.uid}`;
  rows.forEach((row) => groups.set(key(row), [...(groups.get(key(row)) || []), row]));
  const shown = [...new Set(kept.map(key))];
  const spread = (name) => Math.max(...groups.get(name).map((row) => row.score)) - Math.min(...groups.get(name).map((row) => row.score));
  const hasTokens = (name) => groups.get(name).some((row) => row.token_ends) ? 1 : 0;
  if (!state.order) shown.sort((a, b) => hasTokens(b) - hasTokens(a) || spread(b) - spread(a));
  const limits = channelLimits(rows);
  const more = shown.length > state.shown ? button(`show ${shown.length - state.shown} more groups`, false, () => { state.shown += 50; show(); }) : null;
  const filtered = kept.length < rows.length ? `${kept.length} of the ` : "";
  const about = state.order ? `${filtered}${rows.length} responses with the ${ORDERS[state.order] === "largest gap" ? "largest gap of trainer and generator" : `${ORDERS[state.order]} ${state.order === "long" ? "texts" : "scores"}`} of ${steps.length} steps`
    : `${kept.length} of ${rows.length} responses in ${shown.length} groups`;
  view.replaceChildren(
    controls, ...(state.order ? [] : [bins.node]), element("p", {}, about),
    ...shown.slice(0, state.shown).map((name) => group(groups.get(name), new Set(kept), limits, goTo)), ...(more ? [more] : []),
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

function group(rows, kept, limits, goTo) {
  const scores = rows.map((row) => row.score);
  const equal = !state.order && rows.length > 1 && Math.min(...scores) === Math.max(...scores);
  const mean = scores.reduce((sum, score) => sum + score, 0) / scores.length;
  const step = rows[0].step;
  const facts = [
    `prompt ${rows[0].uid}`, rows[0].data_source === "unknown" ? "" : rows[0].data_source,
    state.order ? "" : `${rows.length} responses, mean score ${number(mean)}`,
    [null, "null"].includes(rows[0].ground_truth) ? "" : `truth: ${rows[0].ground_truth}`,
  ].filter(Boolean).join(", ");
  const head = element("p", {}, state.order ? button(`step ${step}`, false, () => goTo(step)) : null, ` ${facts}`,
    equal ? element("strong", {}, " All scores are equal: no signal.") : null);
  const heading = element("tr", {}, ...["score", "advantage", "tokens", "response"].map((text, i) => element("th", { class: i < 3 ? "number" : false }, text)));
  const cell = (label, text) => element("td", { class: "number", "data-label": label }, text);
  const lines = [...rows].sort((a, b) => b.score - a.score).map((row) => {
    const end = row.stop_reason || (row.finished ? "done" : "cut");
    const notes = [row.failure, end === "done" ? null : end].filter((note) => note !== null).map((note) => element("span", { class: "note" }, note));
    const parts = Object.keys(row).filter((name) => name.startsWith("score/") && row[name] !== null).map((name) => `${name.slice(6)} ${number(row[name])}`);
    const score = cell("score", number(row.score));
    score.title = parts.join("\n");
    const node = element("tr", {}, score, cell("advantage", number(row.advantage)), cell("tokens", row.response_tokens),
      element("td", {}, ...notes, row.messages ? conversation(row.messages) : null,
        row.messages && !(row.token_ends && tokenValues(row, state.channel)) ? null : response(row, limits)));
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
const TOKENS = 1000;

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

// The messages of an episode from the first answer on, with the rewards of answers.
function conversation(messages) {
  const first = messages.findIndex((message) => message.role === "assistant");
  const lines = messages.slice(first < 0 ? messages.length : first).map((message) => element("div", { class: message.role === "assistant" ? "answer" : "told" },
    message.row ? element("span", { class: "note" }, `row ${message.row} `) : null, element("strong", {}, `${message.role} `), message.content, message.reward ? element("span", { class: "note" }, ` ${number(message.reward)}`) : null));
  return element("div", { class: "conversation" }, ...lines);
}

function response(row, limit) {
  const box = element("div", { class: "response" });
  const values = tokenValues(row, state.channel);
  if (!row.token_ends || !values) {
    box.append(row.response || element("span", { class: "hint" }, "(no text)"));
    return box;
  }
  const characters = Array.from(row.response), ends = row.token_ends, rest = document.createTextNode("");
  const text = (first, last) => characters.slice(first ? ends[first - 1] : 0, ends[last]).join("");
  const level = (token) => Math.round(Math.max(-1, Math.min(1, (values[token] || 0) / limit)) * SHADES);
  const isTold = (token) => Boolean(row.sampled) && !row.sampled[token];
  let next = 0;
  // Tokens below the visible part of a long response get their color when they are scrolled into view.
  const paint = (count) => {
    const stop = Math.min(ends.length, next + count), parts = document.createDocumentFragment();
    for (let first = next; next < stop; next += 1) {
      if (next + 1 < stop && level(next + 1) === level(next) && isTold(next + 1) === isTold(next) && next - first < 10) continue;
      const span = document.createElement("span"), tokens = [first, next];
      span.className = `heat${level(next) + SHADES}${isTold(next) ? " told" : ""}`;
      span.textContent = text(first, next);
      span.onmouseenter = () => { span.title = describe(tokens, values, text); };
      parts.append(span);
      first = next + 1;
    }
    rest.before(parts);
    rest.data = characters.slice(stop ? ends[stop - 1] : 0).join("");
  };
  const fill = () => {
    const isVisible = () => rest.previousSibling === null || rest.previousSibling.offsetTop < box.scrollTop + 2 * box.clientHeight;
    while (next < ends.length && box.isConnected && isVisible()) paint(TOKENS);
  };
  box.append(rest);
  paint(TOKENS);
  box.onscroll = fill;
  if (next < ends.length) requestAnimationFrame(fill);
  return box;
}

function describe([first, last], values, text) {
  const line = (value, i) => `${JSON.stringify(text(first + i, first + i))} ${number(value)}`;
  return values.slice(first, last + 1).map(line).join("\n");
}

// -- time and config ------------------------------------------------------------------------------

async function drawTime() {
  clearCharts();
  const [reply, lanes] = await Promise.all(["phases", "lanes"].map((view) => get(`/${view}?${query(state.selected)}`)));
  const pictures = lanes.map((picture, order) => picture && drawLanes(picture, state.runs[state.selected[order]].name)).filter(Boolean);
  const blocks = reply.map((means, order) => {
    const info = state.runs[state.selected[order]];
    const phases = Object.entries(means).filter(([name]) => name !== "step");
    const sum = phases.reduce((total, [, seconds]) => total + seconds, 0), step = Math.max(means.step || 0, sum);
    if (!step) return element("div", { class: "group" }, element("p", {}, `${info.name}: no times yet`));
    if (step > 1.005 * sum) phases.push(["other", step - sum]);
    const phaseColor = (i) => phases[i][0] === "other" ? style("--other") : color(i);
    const bar = element("div", { class: "phases" }, ...phases.map(([name, seconds], i) => element("span", {
      style: { width: `${100 * seconds / step}%`, background: phaseColor(i) }, title: `${name}: ${number(seconds)} s`,
    })));
    const legend = phases.map(([name, seconds], i) => element("tr", {}, element("td", {}, swatch(phaseColor(i)), name),
      element("td", { class: "number" }, `${number(seconds)} s`), element("td", { class: "number" }, `${(100 * seconds / step).toFixed(1)} %`)));
    const phase = info.age === null ? "" : `, now in phase ${info.phase} for ${age(info.age)}`;
    return element("div", { class: "group" }, element("p", {}, `${info.name}: ${number(step)} s per step, mean of the last ${Math.min(50, info.step)} steps${phase}`), bar,
      element("table", { class: "narrow times" }, ...legend));
  });
  if (pictures.length) pictures.unshift(element("h2", {}, "Lanes of trainer and generator"));
  document.getElementById("view").replaceChildren(element("h2", {}, "Phases of a step"), ...blocks, ...pictures);
}

const KINDS = { learn: "learns", generate: "generates (batch: version of the weights)", publish: "publishes weights", wait: "waits, or loads weights" };

function drawLanes(picture, name) {
  const percent = (seconds) => `${100 * seconds / picture.seconds}%`;
  const rows = picture.lanes.map((lane) => {
    const spans = lane.spans.map(({ start, end, kind, step, label, text }) => element("span", {
      class: `${kind} ${step % 2 ? "odd" : "even"}`, title: text, style: { left: percent(start), width: percent(end - start) },
    }, label));
    const waited = lane.spans.filter(({ kind }) => kind === "wait").reduce((total, { start, end }) => total + end - start, 0);
    return element("tr", {}, element("td", {}, lane.name), element("td", {}, element("div", { class: "lane" }, ...spans)),
      element("td", { class: "number" }, `waits ${(100 * waited / picture.seconds).toFixed(0)} %`));
  });
  const legend = Object.entries(KINDS).map(([kind, text]) => element("span", {}, element("span", { class: `swatch ${kind}` }), text));
  return element("div", { class: "group" }, element("p", {}, `${name}: steps ${picture.first} to ${picture.last}, ${number(picture.seconds)} s`),
    element("table", { class: "lanes" }, ...rows), element("p", { class: "keys" }, ...legend));
}

async function drawConfig() {
  clearCharts();
  const reply = await get(`/config?${query(state.selected)}`);
  const pairs = (rows, head = []) => element("table", { class: "narrow" },
    head.length ? element("thead", {}, element("tr", {}, ...head.map((cell) => element("th", {}, cell)))) : null,
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((cell, i) => element("td", { "data-label": i ? head[i] ?? null : null }, cell))))));
  const parts = [];
  if (reply.names.length > 1) {
    const rows = Object.entries(reply.differences).map(([key, values]) => [key, ...values]);
    parts.push(element("h2", {}, "Differences"), rows.length ? pairs(rows, ["key", ...reply.names]) : "The configs are equal.");
  }
  const shown = (key, value) => /^(started|ended)$/.test(key) && value ? new Date(value * 1000).toLocaleString()
    : value === null ? "" : Array.isArray(value) ? value.join(" ")
      : typeof value === "object" ? Object.entries(value).map((pair) => pair.join(" ")).join(", ") : value;
  const info = Object.entries(reply.info).map(([key, value]) => [key, shown(key, value)]).filter(([, value]) => value !== "");
  parts.push(element("h2", {}, `Run ${reply.names[0]}`), pairs(info), element("h2", {}, `Config of ${reply.names[0]}`), pairs(Object.entries(reply.config)));
  document.getElementById("view").replaceChildren(...parts);
}

// -- updates --------------------------------------------------------------------------------------

const DRAW = { Curves: drawCurves, Responses: drawResponses, Time: drawTime, Config: drawConfig };

async function update(force = false) {
  const connection = document.getElementById("connection");
  try {
    const reply = await get("/runs");
    [state.runs, state.keys, state.now] = [reply.runs, reply.keys, reply.now];
    if (state.selected === null) state.selected = state.runs.map((_, index) => index).slice(0, MAX_SHOWN);
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
setTheme(chosenTheme() ?? (prefersDark.matches ? "dark" : "light"));
prefersDark.addEventListener("change", () => { if (chosenTheme() === null) setTheme(prefersDark.matches ? "dark" : "light"); });
new IntersectionObserver(([entry]) => {
  document.getElementById("legend").hidden = entry.isIntersecting || state.tab !== "Curves";
}).observe(document.getElementById("runs"));
drawTabs();
poll();
