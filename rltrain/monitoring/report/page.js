"use strict";

// Elements. Text always becomes a text node, so that nothing that a model wrote is read as HTML.

const $ = (selector, root = document) => root.querySelector(selector);

function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function table(head, rows, numbers = []) {
  const cell = (tag, value, place) => el(tag, { class: numbers.includes(place) ? "number" : null }, value);
  return el("div", { class: "wide" }, el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((value, place) => cell("th", value, place)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((value, place) => cell("td", value, place)))))));
}

// Numbers

function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  if (size >= 1e6) return `${trimmed((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return `${trimmed((value / 1e3).toPrecision(3))}k`;
  if (Number.isInteger(value)) return String(value);
  return trimmed(size >= 1000 ? value.toFixed(0) : value.toPrecision(3));
}

const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);
const whole = (value) => value.toLocaleString("en");
const percent = (value) => `${trimmed((100 * value).toPrecision(3))}%`;

function several(count, one, more = `${one}s`) {
  return `${whole(count)} ${count === 1 ? one : more}`;
}

// Data: blocks of base64 text that hold gzip

async function unpacked(id) {
  const text = atob(document.getElementById(id).textContent);
  const bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

class Chunk {
  constructor(buffer, vocabulary) {
    const size = new DataView(buffer).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
    Object.assign(this, header);
    this.vocabulary = vocabulary;
    this.special = vocabulary.specials;
    this.columns = {};
    let start = 4 + size;
    for (const [name, count, width] of header.layout) {
      this.columns[name] = integers(new Uint8Array(buffer, start, count * width), count, width);
      start += count * width;
    }
    this.starts = sums(this.lengths);
    this.promptStarts = sums(this.prompts.map((prompt) => prompt.length));
  }

  number(name, place) {
    const code = this.columns[name][place];
    return code === -32768 ? NaN : this.scale[0] * Math.sinh(code / this.scale[1]);
  }

  text(row) {
    if (this.responses[row] !== null) return this.responses[row];
    let text = "";
    const { texts } = this.vocabulary, { tokens } = this.columns;
    for (let place = this.starts[row]; place < this.starts[row + 1]; place++) {
      if (!this.special.has(tokens[place])) text += texts[tokens[place]];
    }
    return text;
  }

  prompt_text(row) {
    return this.prompts[this.prompt[row]].text;
  }
}

function integers(planes, count, width) {
  if (width === 1) return planes;
  const found = width === 2 ? new Int16Array(count) : new Int32Array(count);
  for (let place = 0; place < count; place++) {
    let value = planes[place] | (planes[count + place] << 8);
    if (width === 3) value |= planes[2 * count + place] << 16;
    found[place] = value;
  }
  return found;
}

function sums(lengths) {
  const found = [0];
  for (const length of lengths) found.push(found.at(-1) + length);
  return found;
}

const chunks = new Map();

function chunkOf(run, place) {
  const id = `chunk-${run}-${place}`;
  if (!chunks.has(id)) {
    chunks.set(id, unpacked(id).then((buffer) => new Chunk(buffer, data.runs[run].samples.vocabulary)));
  }
  return chunks.get(id);
}

// Curves

const color = (place) => `var(--c${place % 9})`; // c9 is grey
const DASHES = [null, "5 3", "1.5 2.5", "8 3 2 3"];
const hiddenRuns = new Set();
let data;
let redraws = [];
let crossings = [];
let crossStep = null;

function seriesOf(metrics) {
  const found = [];
  const many = data.runs.length > 1;
  data.runs.forEach((run, number) => metrics.forEach((metric, place) => {
    for (const rows of [run.steps, run.evaluations]) {
      if (!rows[metric] || hiddenRuns.has(number)) continue;
      const points = rows.step.map((step, row) => [step, rows[metric][row]]).filter(([, value]) => value !== null);
      if (!points.length) continue;
      points.sort((one, two) => one[0] - two[0]);
      found.push({
        run: number, metric, points, color: color(many ? number : place), dash: many ? DASHES[place % 4] : null,
        name: new Set(metrics.map(shortName)).size === metrics.length ? shortName(metric) : metric,
      });
    }
  }));
  return found;
}

const shortName = (metric) => metric.split("/").slice(-1)[0];

function stepRange() {
  const steps = data.runs.flatMap((run) => [...(run.steps.step ?? []), ...(run.evaluations.step ?? [])]);
  let low = Infinity, high = -Infinity;
  for (const step of steps) { low = Math.min(low, step); high = Math.max(high, step); }
  return low <= high ? [low, Math.max(high, low + 1)] : [0, 1];
}

function chart({ title, metrics }) {
  const picture = shape("svg", { tabindex: 0, role: "img", "aria-label": `${title} over the steps; arrow keys move` });
  const values = el("div", { class: "values" });
  const about = el("div", { class: "about", hidden: true }, ...metrics.map(explanation));
  const ask = el("button", {
    type: "button", "aria-expanded": "false", "aria-label": `What is ${title}?`, title: metrics.map(hint).join("\n\n"),
    onclick: () => { about.hidden = !about.hidden; ask.setAttribute("aria-expanded", String(!about.hidden)); },
  }, "?");
  const unit = data.descriptions[metrics[0]]?.unit;
  const box = el("div", { class: "chart" },
    el("h3", {}, title, el("small", { class: "faint" }, unit && unit !== "number" ? unit : ""), ask),
    about, values, picture);
  const draw = () => drawCurves(picture, values, seriesOf(metrics));
  redraws.push(draw);
  listen(picture);
  return box;
}

function hint(metric) {
  const found = data.descriptions[metric];
  return found ? `${metric}: ${found.meaning}. Unit: ${found.unit}.${found.healthy ? ` Healthy: ${found.healthy}.` : ""}` : metric;
}

function explanation(metric) {
  const found = data.descriptions[metric];
  const rest = found ? [`: ${plain(found.meaning)}. Unit: ${found.unit}.`, found.healthy ? el("b", {}, ` Healthy: ${plain(found.healthy)}.`) : null] : [];
  return el("p", {}, el("code", {}, metric), ...rest);
}

const plain = (text) => text.replaceAll("`", "");

const LEFT = 44, RIGHT = 8, TOP = 6, BOTTOM = 16;

function frame(picture, low, high, room = 0) {
  const width = picture.clientWidth || 300, height = picture.clientHeight || 130;
  const first = stepRange()[0] - room, last = stepRange()[1] + room;
  const x = (step) => LEFT + ((step - first) / (last - first)) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - ((value - low) / (high - low)) * (height - TOP - BOTTOM);
  picture.replaceChildren();
  for (const value of ticks(low, high, 3)) {
    picture.append(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      shape("text", { x: LEFT - 5, y: y(value) + 3.5, "text-anchor": "end" }, short(value)));
  }
  for (const step of ticks(...stepRange(), 4).filter(Number.isInteger)) {
    const anchor = x(step) > width - 25 ? "end" : "middle";
    picture.append(shape("text", { x: x(step), y: height - 3, "text-anchor": anchor }, short(step)));
  }
  const steps = (offset) => first + ((offset - LEFT) / (width - LEFT - RIGHT)) * (last - first);
  return { x, y, width, height, steps };
}

function ticks(low, high, count) {
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) {
    found.push(Number((place * step).toPrecision(12)));
  }
  return found;
}

function bounds(series) {
  let low = Infinity, high = -Infinity;
  for (const { points } of series) for (const [, value] of points) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  if (low >= 0 && low < 0.4 * high) low = 0;
  const room = (high - low || Math.abs(high) || 1) * (high === low ? 0.5 : 0.04);
  return [low === 0 ? 0 : low - room, high + room];
}

function drawCurves(picture, values, series) {
  const { x, y, width, height, steps } = frame(picture, ...bounds(series));
  for (const run of data.runs) {
    for (const { step } of run.alarms) picture.append(shape("line", { class: "alarm", x1: x(step), x2: x(step), y1: TOP, y2: height - BOTTOM }));
  }
  for (const one of series) {
    const path = thinned(one.points, x, width).map(([step, value], place) => `${place ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`);
    picture.append(shape("path", { class: "curve", d: path.join(""), style: `stroke:${one.color}`, "stroke-dasharray": one.dash }));
    if (one.points.length <= 40) {
      for (const [step, value] of one.points) picture.append(shape("circle", { cx: x(step), cy: y(value), r: 2, style: `fill:${one.color}` }));
    }
  }
  const cross = shape("line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  picture.append(cross);
  picture.stepAt = steps;
  picture.crossAt = (step) => {
    cross.setAttribute("visibility", step === null ? "hidden" : "visible");
    if (step !== null) { cross.setAttribute("x1", x(step)); cross.setAttribute("x2", x(step)); }
    values.replaceChildren(...readings(series, step));
  };
  crossings.push(picture.crossAt);
  picture.crossAt(crossStep);
}

// If there are more points than pixels, keep only the lowest and the highest point of each pixel.
function thinned(points, x, width) {
  if (points.length <= 2 * width) return points;
  const found = [];
  for (let start = 0; start < points.length;) {
    const column = Math.floor(x(points[start][0]));
    let end = start, low = points[start], high = points[start];
    for (; end < points.length && Math.floor(x(points[end][0])) === column; end++) {
      if (points[end][1] < low[1]) low = points[end];
      if (points[end][1] > high[1]) high = points[end];
    }
    found.push(...(low[0] <= high[0] ? [low, high] : [high, low]));
    start = end;
  }
  return found;
}

// The value of each metric in every run, such as "name 0.5 0.6". If the page shows one run, each metric has a colour;
// if the page shows several runs, each run has a colour.
function readings(series, step) {
  const metrics = [...new Set(series.map((one) => one.metric))], many = data.runs.length > 1;
  return metrics.map((metric) => {
    const own = series.filter((one) => one.metric === metric);
    const first = many && metrics.length > 1 ? mark({ color: "var(--faint)", dash: own[0].dash }) : null;
    return el("span", {}, first, many ? `${own[0].name} ` : null, ...own.map((one) => {
      const point = step === null ? one.points.at(-1) : nearest(one.points, step);
      const when = step !== null && point[0] !== step ? ` (step ${point[0]}) ` : " ";
      return el("span", {}, mark({ color: one.color, dash: many ? null : one.dash }), many ? null : `${one.name} `, el("b", {}, short(point[1])), when);
    }));
  });
}

function mark({ color, dash }) {
  return shape("svg", { width: 18, height: 8, style: "display:inline-block;width:18px;height:8px", "aria-hidden": "true" },
    shape("line", { x1: 0, x2: 15, y1: 4, y2: 4, style: `stroke:${color};stroke-width:2.5`, "stroke-dasharray": dash }));
}

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= step) low = middle; else high = middle;
  }
  return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
}

function cross(step) {
  const [first, last] = stepRange();
  crossStep = step === null ? null : Math.min(last, Math.max(first, Math.round(step)));
  for (const one of crossings) one(crossStep);
}

function listen(picture) {
  const at = (event) => cross(picture.stepAt(event.clientX - picture.getBoundingClientRect().left));
  picture.addEventListener("pointermove", at);
  picture.addEventListener("pointerdown", at);
  picture.addEventListener("pointerleave", () => cross(null));
  picture.addEventListener("blur", () => cross(null));
  picture.addEventListener("keydown", (event) => {
    const [first, last] = stepRange();
    const to = { ArrowLeft: (crossStep ?? last + 1) - 1, ArrowRight: (crossStep ?? first - 1) + 1, Home: first, End: last, Escape: null };
    if (!(event.key in to)) return;
    event.preventDefault();
    cross(to[event.key]);
  });
}

function redraw() {
  crossings = [];
  for (const draw of redraws) draw();
}

function showLegend() {
  if (data.runs.length < 2) return;
  $("#legend").append(...data.runs.map((run, number) => el("label", {},
    el("input", { type: "checkbox", checked: true, onchange: (event) => {
      if (event.target.checked) hiddenRuns.delete(number); else hiddenRuns.add(number);
      redraw();
    } }), mark({ color: color(number), dash: null }), run.name)));
}

function showCurves() {
  showLegend();
  if (!data.charts.length) $("#charts").append(el("p", { class: "faint" }, "There are no metrics yet."));
  $("#charts").append(...data.charts.filter((one) => one.main).map(chart));
  const others = data.charts.filter((one) => !one.main);
  $("#more").hidden = !others.length;
  $("#more summary").textContent = `All other metrics (${others.length})`;
  $("#more").addEventListener("toggle", () => {
    const place = $("#more .charts");
    if (!place.childElementCount) place.append(...others.map(chart));
    redraw();
  });
}

// Time

function phasesOf(run) {
  const names = Object.keys(run.steps).filter((name) => name.startsWith("timing/") && name !== "timing/step");
  const rows = (run.steps.step ?? []).map((step, row) => {
    const parts = names.map((name) => run.steps[name][row] ?? 0);
    const total = run.steps["timing/step"]?.[row] ?? parts.reduce((sum, one) => sum + one, 0);
    return { step, parts: [...parts, Math.max(0, total - parts.reduce((sum, one) => sum + one, 0))], total };
  });
  return { names: [...names.map((name) => name.slice(7)), "rest"], rows };
}

function showTime() {
  const place = $("#time div");
  for (const run of data.runs) {
    const { names, rows } = phasesOf(run);
    if (!rows.length || names.length < 2) continue;
    const total = rows.reduce((sum, row) => sum + row.total, 0);
    const sumOf = (phase) => rows.reduce((sum, row) => sum + row.parts[phase], 0);
    const colors = names.map(phaseColor);
    const picture = shape("svg", { tabindex: 0, role: "img", "aria-label": `Seconds of each phase of the steps of ${run.name}; arrow keys move` });
    const values = el("div", { class: "values" });
    redraws.push(() => drawTime(picture, values, names, rows, colors));
    listen(picture);
    place.append(el("div", { class: "phases" }, el("div", { class: "chart" },
      el("h3", {}, data.runs.length > 1 ? run.name : "Seconds per step, by phase"), values, picture),
    table(["phase", "mean seconds", "share"], names.map((name, phase) => [
      el("span", {}, mark({ color: colors[phase] }), name), short(sumOf(phase) / rows.length), `${(100 * sumOf(phase) / total).toFixed(1)}%`,
    ]), [1, 2])));
  }
  if (!place.childElementCount) place.append(el("p", { class: "faint" }, "There are no timings yet."));
}

// A phase has the same colour in every run.
const phaseNames = [];

function phaseColor(name) {
  if (name === "rest") return "var(--c9)";
  if (!phaseNames.includes(name)) phaseNames.push(name);
  return color(phaseNames.indexOf(name));
}

function drawTime(picture, values, names, rows, colors) {
  const bars = bucketed(rows, (picture.clientWidth || 600) / 3);
  const { x, y, height, steps } = frame(picture, 0, Math.max(...bars.map((bar) => bar.total)) * 1.04 || 1, 0.5);
  const wide = Math.max(1, (x(1) - x(0)) * Math.ceil(rows.length / bars.length) - 1);
  for (const bar of bars) {
    let base = 0;
    bar.parts.forEach((part, phase) => {
      if (part <= 0) return;
      picture.append(shape("rect", { x: x(bar.step) - wide / 2, width: wide, y: y(base + part), height: y(base) - y(base + part), style: `fill:${colors[phase]}` }));
      base += part;
    });
  }
  const cross = shape("line", { class: "cross", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  picture.append(cross);
  picture.stepAt = steps;
  picture.crossAt = (step) => {
    const row = step === null ? rows.at(-1) : nearest(rows.map((one) => [one.step, one]), step)[1];
    cross.setAttribute("visibility", step === null ? "hidden" : "visible");
    cross.setAttribute("x1", x(row.step)); cross.setAttribute("x2", x(row.step));
    values.replaceChildren(el("span", {}, `step ${row.step}: `, el("b", {}, `${short(row.total)} s`)),
      ...names.map((name, phase) => el("span", {}, mark({ color: colors[phase] }), `${name} `, el("b", {}, short(row.parts[phase])))));
  };
  crossings.push(picture.crossAt);
  picture.crossAt(crossStep);
}

function bucketed(rows, most) {
  const size = Math.ceil(rows.length / most);
  if (size <= 1) return rows;
  const found = [];
  for (let start = 0; start < rows.length; start += size) {
    const part = rows.slice(start, start + size), mean = (get) => part.reduce((sum, row) => sum + get(row), 0) / part.length;
    found.push({ step: part[part.length >> 1].step, total: mean((row) => row.total), parts: part[0].parts.map((_, phase) => mean((row) => row.parts[phase])) });
  }
  return found;
}

// Overview, notes, alarms, config

function showOverview() {
  const rows = data.runs.map((run, number) => {
    const metric = (name) => run.steps[name]?.at(-1) ?? null;
    const evaluated = (kind) => {
      const ends = (found, text) => `${text(found[0])} → ${text(found.at(-1))}`;
      const accuracy = run.evaluations[`eval/${kind}_accuracy`] ?? [], reward = run.evaluations[`eval/${kind}_reward`] ?? [];
      return accuracy.length ? ends(accuracy, percent) : reward.length ? `reward ${ends(reward, short)}` : "–";
    };
    return [el("span", {}, data.runs.length > 1 ? mark({ color: color(number) }) : "", run.name),
      whole(run.steps.step?.at(-1) ?? 0), short(metric("reward/mean")), evaluated("sampled"), evaluated("greedy"),
      short(metric("rollout/length_mean")), whole(run.alarms.length)];
  });
  $("#overview").append(
    table(["run", "steps", "reward", "evaluation, sampled", "evaluation, greedy", "answer length", "alarms"], rows),
    el("p", { class: "faint" }, `Written ${data.written}. Evaluation: the accuracy (or the reward, if the accuracy is unknown) of the first and the last evaluation.`));
}

function showNotes() {
  const many = data.runs.length > 1;
  for (const run of data.runs) for (const note of run.notes) {
    $("#notes").append(el("p", { class: "note" }, `${many ? `${run.name}: ` : ""}${note}`));
  }
}

function showAlarms() {
  const rows = data.runs.flatMap((run) => run.alarms.map((alarm) => [...(data.runs.length > 1 ? [run.name] : []), String(alarm.step), alarm.alarm]));
  const head = [...(data.runs.length > 1 ? ["run"] : []), "step", "alarm"];
  $("#alarms div").append(rows.length ? table(head, rows) : el("p", { class: "faint" }, "No alarm was raised."));
}

function showConfig() {
  const place = $("#config div"), code = (text) => el("code", {}, text ?? "(absent)");
  if (data.between.length) {
    place.append(el("h3", {}, "What differs between the runs"),
      table(["key", ...data.runs.map((run) => run.name)], data.between.map(([key, values]) => [code(key), ...values.map(code)])));
  }
  for (const run of data.runs) {
    const what = `${data.runs.length > 1 ? `${run.name}: what` : "What"} differs from`;
    place.append(el("h3", {}, `${what} ${run.presets || "the defaults"}`));
    if (run.command !== null) place.append(el("p", {}, "Command: ", el("code", {}, `python -m rltrain.main ${run.command}`)));
    else place.append(el("p", { class: "note" }, "The run did not record its command, so its presets are unknown."));
    if (!run.differences) place.append(el("p", { class: "faint" }, "The config of the presets is not known."));
    else if (run.differences.length) place.append(table(["key", "preset", "this run"], run.differences.map((row) => row.map(code))));
    else place.append(el("p", { class: "faint" }, "Nothing."));
    place.append(el("details", {}, el("summary", {}, "The whole config"), el("pre", {}, run.config || "It could not be read.")));
  }
}

// Samples

const COLORS = {
  advantage: { name: "advantage", about: "how much better the answer is than the baseline", kind: "signed" },
  log_ratio: { name: "ratio, old / rollout", about: "exp(old_log_probs - rollout_log_probs): the token's probability under the actor before the update, divided by its probability under the engine", kind: "signed", show: Math.exp, middle: "1" },
  entropy: { name: "entropy", about: "entropy of the actor's distribution, nats", kind: "plain" },
  kl: { name: "KL, old − ref", about: "old_log_probs - ref_log_probs, nats", kind: "signed" },
  surprise: { name: "−log-prob", about: "minus the log-prob of the token under the engine when it was sampled, nats", kind: "plain" },
};
const PAGE = 10; // groups that are shown at once
const LONG = 600; // tokens of an answer that are shown at once
let rows = [];
let shownGroups = PAGE;
let filterCount = 0;

function rowsOf() {
  const found = [];
  data.runs.forEach((run, number) => run.samples.chunks.forEach((chunk, place) => chunk.uid.forEach((uid, row) => {
    found.push({ run: number, place, row, uid, step: chunk.step, score: chunk.score[row], finish: chunk.finish[row],
      length: chunk.length[row], bad: row in chunk.errors, group: `${number}/${place}/${uid}` });
  })));
  return found;
}

function option(value, text = value) {
  return el("option", { value }, String(text));
}

function labelled(text, control) {
  return el("label", {}, text, control);
}

function showSamples() {
  rows = rowsOf();
  const place = $("#samples div");
  if (!rows.length) {
    place.append(el("p", { class: "faint" }, "There are no samples."));
    return;
  }
  place.append(...data.runs.filter((run) => run.samples.shown < run.samples.total).map((run) => el("p", { class: "note" },
    `${run.name}: to save space, the page has only ${whole(run.samples.shown)} of ${whole(run.samples.total)} samples: ` +
    `the first groups of ${several(run.samples.chunks.length, "step")}. All samples are in the folder rollouts.`)));
  const rounding = Math.max(...data.runs.map((run) => run.samples.rounding));
  place.append(el("p", { class: "faint" }, "Click or hover over a token to see its values. In a focused answer, the arrow keys move from token to token. " +
    `The page rounds values of tokens to ${Number((100 * rounding).toPrecision(1))}%; the exact values are in the folder rollouts.`));
  place.append(filters(), el("div", { class: "status" },
    el("span", { id: "count", role: "status" }), el("span", { id: "scale", class: "scale" })), el("div", { id: "groups" }),
  el("button", { id: "next", type: "button", hidden: true, onclick: () => { shownGroups += PAGE; apply(false); } }, "Show more groups"));
  const form = $("#filters");
  let timer;
  form.addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => apply(true), event.target.matches("[type=search], [type=number]") ? 250 : 0);
  });
  form.addEventListener("reset", () => setTimeout(() => apply(true)));
  form.addEventListener("submit", (event) => event.preventDefault());
  place.addEventListener("pointerover", (event) => hover(event.target.closest(".tokens span")));
  place.addEventListener("pointerdown", (event) => hover(event.target.closest(".tokens span")));
  place.addEventListener("pointerleave", () => hover(null));
  document.addEventListener("scroll", () => hover(null), { passive: true });
  apply(true);
}

// The last step that all runs have in common, so that runs are compared at the same step.
function commonStep(steps) {
  const own = data.runs.map((run) => new Set(run.samples.chunks.map((chunk) => chunk.step))).filter((found) => found.size);
  return steps.findLast((step) => own.every((found) => found.has(step))) ?? steps.at(-1);
}

function filters() {
  const steps = [...new Set(rows.map((row) => row.step))].sort((one, two) => one - two);
  const finishes = [...new Set(rows.map((row) => row.finish))].sort();
  const step = el("select", { name: "step" }, option("", "all"), ...steps.map((one) => option(one)));
  step.value = commonStep(steps);
  [...step.options].forEach((one) => { one.defaultSelected = one.selected; });
  const chosen = Object.entries(COLORS).filter(([name]) => hasColumn(name));
  return el("form", { id: "filters", class: "filters", "aria-label": "Filter the samples" },
    data.runs.length > 1 ? labelled("run", el("select", { name: "run" }, option("", "all"), ...data.runs.map((run, number) => option(number, run.name)))) : null,
    labelled("step", step),
    labelled("text in prompt or answer", el("input", { type: "search", name: "text", autocomplete: "off" })),
    labelled("reward from", el("input", { type: "number", name: "least", step: "any" })),
    labelled("to", el("input", { type: "number", name: "most", step: "any" })),
    labelled("ended by", el("select", { name: "finish" }, option("", "all"), ...finishes.map((one) => option(one)))),
    el("label", { class: "box" }, el("input", { type: "checkbox", name: "failed" }), "only failed rewards"),
    labelled("order", el("select", { name: "order" }, option("", "as trained"), option("low", "lowest reward first"), option("high", "highest reward first"), option("long", "longest first"), option("mixed", "largest spread first"))),
    labelled("colour of tokens", el("select", { name: "color" }, ...chosen.map(([name, one]) => option(name, one.name)), option("none", "none"))),
    el("button", { type: "reset" }, "Reset"));
}

// The columns of a run are known after the first chunk of the run is decompressed, so `firstChunks` is filled before the
// filters are created.
const firstChunks = [];
const hasColumn = (name) => firstChunks.some((chunk) => chunk && (name === "surprise" ? "log_prob" : name) in chunk.columns);

async function apply(anew) {
  const mine = ++filterCount;
  if (anew) shownGroups = PAGE;
  const form = $("#filters"), get = (name) => form.elements[name]?.value ?? "";
  const bound = (name, otherwise) => (get(name) === "" || Number.isNaN(Number(get(name))) ? otherwise : Number(get(name)));
  const least = bound("least", -Infinity), most = bound("most", Infinity), bounded = least > -Infinity || most < Infinity;
  const failed = form.elements.failed.checked, text = get("text").toLowerCase();
  let found = rows.filter((row) => (get("run") === "" || row.run === Number(get("run")))
    && (get("step") === "" || row.step === Number(get("step")))
    && (get("finish") === "" || row.finish === get("finish")) && (!failed || row.bad)
    && (!bounded || (row.score !== null && !row.bad && row.score >= least && row.score <= most)));
  if (text) found = await matching(found, text, mine);
  if (mine !== filterCount) return;
  const groups = ordered([...grouped(found)], get("order"));
  $("#count").textContent = `${several(found.length, "sample")} of ${whole(rows.length)}, in ${several(groups.length, "group")}`;
  showScale(get("color"));
  const shown = await Promise.all(groups.slice(0, shownGroups).map(async ([, members]) => groupOf(members, await chunkOf(members[0].run, members[0].place), get("color"))));
  if (mine !== filterCount) return;
  hover(null);
  $("#groups").replaceChildren(...shown);
  $("#next").hidden = groups.length <= shownGroups;
}

async function matching(candidates, text, mine) {
  const found = [];
  for (const row of candidates) {
    const loaded = chunks.get(`chunk-${row.run}-${row.place}`)?.ready ?? await ready(row);
    if (mine !== filterCount) return found;
    if (loaded.text(row.row).toLowerCase().includes(text) || loaded.prompt_text(row.row).toLowerCase().includes(text)) found.push(row);
  }
  return found;
}

async function ready(row) {
  const promise = chunkOf(row.run, row.place);
  promise.ready = await promise;
  return promise.ready;
}

function grouped(found) {
  const groups = new Map();
  for (const row of found) {
    if (!groups.has(row.group)) groups.set(row.group, []);
    groups.get(row.group).push(row);
  }
  return groups;
}

function ordered(groups, order) {
  const score = (row) => row.score ?? 0, of = (get, best) => ([, members]) => best(...members.map(get));
  const keys = { low: of(score, Math.min), high: (group) => -of(score, Math.max)(group), long: (group) => -of((row) => row.length, Math.max)(group),
    mixed: (group) => of(score, Math.min)(group) - of(score, Math.max)(group) };
  if (!keys[order]) return groups;
  const inside = { low: (one, two) => score(one) - score(two), high: (one, two) => score(two) - score(one), long: (one, two) => two.length - one.length };
  if (inside[order]) for (const [, members] of groups) members.sort(inside[order]);
  return groups.map((group) => [keys[order](group), group]).sort((one, two) => one[0] - two[0]).map(([, group]) => group);
}

function groupOf(members, chunk, colored) {
  const [{ run, place, uid, step }] = members, summary = data.runs[run].samples.chunks[place];
  const all = rows.filter((row) => row.group === members[0].group);
  const scores = all.filter((row) => !row.bad && row.score !== null).map((row) => row.score);
  const mean = scores.reduce((sum, one) => sum + one, 0) / scores.length;
  const range = scores.length ? `mean reward ${short(mean)} (${short(Math.min(...scores))} to ${short(Math.max(...scores))})` : "no reward";
  const title = [data.runs.length > 1 ? data.runs[run].name : null, `step ${step}${summary.failed ? " (not trained on)" : ""}`, `prompt group ${uid}`, several(all.length, "sample"), range];
  const cards = el("div", { class: "cards" }, ...members.map((row) => card(row, chunk, summary, colored)));
  const left = all.length - members.length;
  const others = left ? el("button", { type: "button", onclick: () => {
    cards.replaceChildren(...all.map((row) => card(row, chunk, summary, colored)));
    others.remove();
  } }, `Show the whole group (${several(left, "other sample")})`) : null;
  return el("article", { class: "group" }, el("h3", {}, title.filter(Boolean).join(" · ")), promptOf(members[0], chunk), cards, others);
}

function promptOf(row, chunk) {
  const number = chunk.prompt[row.row], start = chunk.promptStarts[number], { length, text, images = [] } = chunk.prompts[number];
  const pictures = images.map((src, place) => el("img", { src, alt: `image ${place + 1} of the prompt` }));
  const body = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "prompt" });
  if (!length) body.append(text);
  for (let place = start; place < start + length; place++) {
    body.append(tokenSpan(chunk, chunk.columns.prompt_tokens[place], "") );
  }
  return el("div", { class: "prompt" }, ...pictures, body);
}

function card(row, chunk, summary, colored) {
  const facts = [["reward", row.bad ? "failed" : short(row.score)]];
  const parts = Object.entries(summary.components);
  if (parts.length > 1 || parts.some(([, scores]) => scores[row.row] !== row.score)) for (const [name, scores] of parts) facts.push([name, short(scores[row.row])]);
  const start = chunk.starts[row.row];
  if (chunk.columns.advantage && row.length) facts.push(["advantage", meanAdvantage(chunk, row)]);
  facts.push(["ended by", row.finish], ["", several(row.length, "token")]);
  const { turns, contexts, tool_calls: calls } = summary.conversation;
  if (turns) facts.push(["", several(turns[row.row], "turn")]);
  if (calls && calls[row.row]) facts.push(["", several(calls[row.row], "tool call")]);
  if (contexts && contexts[row.row] > 1) facts.push(["", several(contexts[row.row], "context")]);
  if (!summary.valid[row.row] && !row.bad) facts.push(["", "excluded from statistics"]);
  const body = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "answer; arrow keys move over its tokens" });
  body.chunk = chunk;
  const isHidden = summary.hidden.includes(row.row);
  if (isHidden) body.append(chunk.text(row.row));
  else fill(body, chunk, start, start + Math.min(row.length, LONG), colored);
  body.addEventListener("keydown", (event) => moveToken(event, body));
  body.addEventListener("blur", () => hover(null));
  const rest = !isHidden && row.length > LONG ? el("button", { type: "button", onclick: () => { fill(body, chunk, start + LONG, start + row.length, colored); rest.remove(); } }, `Show all ${whole(row.length)} tokens`) : null;
  return el("div", { class: "card" },
    el("div", { class: "facts" }, ...facts.map(([name, value]) => el("span", {}, name ? `${name} ` : "", el("b", {}, value)))),
    row.bad ? el("div", { class: "error" }, summary.errors[row.row]) : null,
    isHidden ? el("div", { class: "faint" }, "The text contains a secret, so the secret and all tokens of the text are hidden.") : null, body, rest);
}

function meanAdvantage(chunk, row) {
  let sum = 0, count = 0;
  for (let place = chunk.starts[row.row]; place < chunk.starts[row.row + 1]; place++) {
    const value = chunk.number("advantage", place);
    if (chunk.columns.state[place] === 2 && !Number.isNaN(value)) { sum += value; count++; }
  }
  return count ? short(sum / count) : "–";
}

const MARKS = { "\n": "↵\n", "\t": "⇥\t" };

function tokenSpan(chunk, token, classes) {
  const text = chunk.vocabulary.texts[token], special = chunk.special.has(token);
  const span = el("span", { class: [special ? "special" : "", classes].filter(Boolean).join(" ") || null });
  if (special || !/[\x00-\x1f\x7f]/.test(text)) span.append(text);
  else for (const one of text) span.append(one in MARKS ? el("i", { class: "mark" }, MARKS[one]) : control(one));
  return span;
}

function control(character) {
  const code = character.codePointAt(0);
  return code < 32 || code === 127 ? String.fromCodePoint(code === 127 ? 0x2421 : 0x2400 + code) : character;
}

function fill(body, chunk, start, end, colored) {
  const { tokens, state } = chunk.columns, scale = colored === "none" ? null : limitOf(colored);
  for (let place = start; place < end; place++) {
    const span = tokenSpan(chunk, tokens[place], ["observed", "untrained", ""][state[place]]);
    span.place = place;
    span.body = body;
    if (scale && state[place] !== 0) span.style.background = background(colored, valueOf(chunk, colored, place), scale) ?? "";
    body.append(span);
  }
}

function valueOf(chunk, name, place) {
  if (name === "surprise") return chunk.columns.log_prob ? -chunk.number("log_prob", place) : NaN;
  return chunk.columns[name] ? chunk.number(name, place) : NaN;
}

function background(name, value, limit) {
  if (Number.isNaN(value) || value === 0) return null;
  const kind = COLORS[name].kind === "plain" ? "plain" : value < 0 ? "low" : "high";
  return `rgba(var(--${kind}), ${(0.6 * Math.min(1, Math.abs(value) / limit) ** 0.7).toFixed(3)})`;
}

// The colour of a token is strongest at the 98th percentile of the values in the first and the last chunk of each run.
// If the 98th percentile is below the limit in LEAST, the colour is strongest at the limit, so that rounding errors
// stay almost colourless.
const limits = new Map();
const LEAST = { advantage: 0.1, log_ratio: 0.01, entropy: 0.1, kl: 0.01, surprise: 0.1 };

function limitOf(name) {
  if (!limits.has(name)) {
    const found = [];
    for (const chunk of firstChunks) {
      const step = Math.max(1, Math.floor(chunk.columns.tokens.length / 5000));
      for (let place = 0; place < chunk.columns.tokens.length; place += step) {
        const value = Math.abs(valueOf(chunk, name, place));
        if (chunk.columns.state[place] !== 0 && !Number.isNaN(value)) found.push(value);
      }
    }
    found.sort((one, two) => one - two);
    limits.set(name, Math.max(LEAST[name], found[Math.floor(0.98 * (found.length - 1))] ?? 0));
  }
  return limits.get(name);
}

function showScale(name) {
  const place = $("#scale");
  if (name === "none") { place.replaceChildren(); return; }
  const { kind, show = (value) => value, middle = "0", about } = COLORS[name], limit = limitOf(name);
  const low = kind === "plain" ? [] : [short(show(-limit))];
  const stops = kind === "plain" ? "rgba(var(--plain), 0), rgba(var(--plain), .6)" : "rgba(var(--low), .6), transparent, rgba(var(--high), .6)";
  place.replaceChildren(...(kind === "plain" ? ["0"] : low), el("i", { style: `background:linear-gradient(90deg, ${stops})`, title: `middle: ${middle}` }), short(show(limit)),
    el("span", {}, about));
}

// The values of one token

function hover(span) {
  const tip = $("#tip");
  for (const one of document.querySelectorAll(".tokens .now")) one.classList.remove("now");
  if (!span || span.place === undefined) { tip.hidden = true; return; }
  span.classList.add("now");
  tip.replaceChildren(...details(span.body.chunk, span.place));
  tip.hidden = false;
  const box = span.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const below = box.bottom + 6 + size.height < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(innerWidth - size.width - 4, box.left))}px`;
  tip.style.top = `${below ? box.bottom + 6 : Math.max(4, box.top - size.height - 6)}px`;
}

const STATES = ["observation: not sampled, not trained on", "sampled, not trained on", "sampled and trained on"];

function details(chunk, place) {
  const { columns, vocabulary } = chunk, token = columns.tokens[place], has = (name) => name in columns;
  const value = (name) => chunk.number(name, place);
  const rowsOfTip = [["id", String(vocabulary.ids[token])]];
  if (columns.state[place] !== 0) {
    if (has("advantage")) rowsOfTip.push(["advantage", short(value("advantage"))]);
    if (has("log_prob")) rowsOfTip.push(["rollout log-prob", `${short(value("log_prob"))} (${percent(Math.exp(value("log_prob")))})`]);
    if (has("log_ratio")) {
      rowsOfTip.push(["old log-prob", short(value("log_prob") + value("log_ratio"))]);
      rowsOfTip.push(["ratio old / rollout", nearOne(Math.exp(value("log_ratio")))]);
    }
    if (has("kl")) rowsOfTip.push(["ref log-prob", short(value("log_prob") + (has("log_ratio") ? value("log_ratio") : 0) - value("kl"))], ["KL, old − ref", short(value("kl"))]);
    if (has("entropy")) rowsOfTip.push(["entropy", short(value("entropy"))]);
    if (has("version")) rowsOfTip.push(["weight version", String(columns.version[place] - 1)]);
  }
  const special = chunk.special.has(token) ? " (special token)" : "";
  return [el("div", { class: "what" }, JSON.stringify(vocabulary.texts[token]) + special), el("div", { class: "faint" }, STATES[columns.state[place]]),
    el("table", {}, ...rowsOfTip.map(([name, text]) => el("tr", {}, el("th", {}, name), el("td", {}, text))))];
}

const nearOne = (value) => (value > 0.5 && value < 2 ? trimmed(value.toFixed(4)) : short(value));

function moveToken(event, body) {
  const spans = [...body.children], now = spans.findIndex((span) => span.classList.contains("now"));
  const to = { ArrowRight: now + 1, ArrowLeft: Math.max(0, now - 1), Home: 0, End: spans.length - 1 }[event.key];
  if (event.key === "Escape") hover(null);
  if (to === undefined) return;
  event.preventDefault();
  const span = spans[Math.min(spans.length - 1, to)];
  span?.scrollIntoView({ block: "nearest" });
  hover(span);
}

// The page

async function main() {
  data = JSON.parse(new TextDecoder().decode(await unpacked("data")));
  for (const run of data.runs) run.samples.vocabulary.specials = new Set(run.samples.vocabulary.special);
  showNotes();
  showOverview();
  showCurves();
  showTime();
  showAlarms();
  showConfig();
  redraw();
  $("#loading").textContent = "Loading the samples …";
  for (const [number, run] of data.runs.entries()) {
    for (const place of new Set([0, run.samples.chunks.length - 1])) {
      if (place >= 0 && run.samples.chunks.length) firstChunks.push(await ready({ run: number, place }));
    }
  }
  showSamples();
  $("#loading").remove();
  document.body.dataset.ready = "yes";
  new ResizeObserver(redraw).observe(document.body);
}

main().catch((error) => {
  $("#loading").textContent = typeof DecompressionStream === "undefined"
    ? "This browser is too old for the page: it needs DecompressionStream (Chrome 80, Firefox 113, Safari 16.4)."
    : `The page cannot be shown: ${error}`;
});
