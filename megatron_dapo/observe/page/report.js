// The page: header with runs and controls, about the runs, summary, findings, figures, timeline, samples (samples.js),
// configuration. Everything from a run is inserted as text, never as markup. `show` may be called again with newer
// data (watch.js): a part is rebuilt only if its data changed, and what the reader chose stays.

let DATA = JSON.parse(document.getElementById("data").textContent);
const MANY = DATA.runs.length > 1;

const page = {
  hidden: new Set(), step: null, steps: [0, 1], parts: {}, cards: new Map(), // cards: by figure, with key and panels
  unit: "step", range: null, // of all x axes; null: everything
  smoothing: 0, hasData: false,

  get panels() {
    return [...this.cards.values()].flatMap((card) => card.panels);
  },

  hover(step, active) {
    Object.assign(this, { step, active });
    for (const panel of this.panels) if (panel.svg) panel.showCursor(step, panel === active);
  },

  redraw() {
    for (const panel of this.panels) if (panel.node.isConnected && panel.node.clientWidth) panel.draw();
  },

  // A step on the x axis: in steps, or in tokens or hours since the beginning.
  at(run, step) {
    if (this.unit === "step") return step;
    const axes = DATA.runs[run].axes, known = axes.steps, values = axes[this.unit];
    if (!known.length || step < known[0]) return 0;
    let i = nearest(known, step);
    if (known[i] > step) i -= 1;
    if (i + 1 >= known.length) return values[i];
    return values[i] + ((step - known[i]) / (known[i + 1] - known[i])) * (values[i + 1] - values[i]);
  },

  restarts: (run) => DATA.runs[run].restarts.map((step) => [step, page.at(run, step)]),

  zoom(range) {
    this.range = range && range[1] > range[0] ? range : null;
    this.showRange();
    this.redraw();
  },

  setUnit(unit) {
    Object.assign(this, { unit, range: null, steps: null });
    this.steps = allSteps();
    for (const panel of this.panels) panel.setData(panel.figure, linesOf);
    this.zoom(null);
  },

  // All panels of a stacked figure have the same axis, so that runs can be compared.
  stackTop(figure) {
    let top = 0;
    figure.runs.forEach((series, run) => {
      if (series.length && !this.hidden.has(run)) series[0].x.forEach((step, i) => {
        const x = this.at(run, step);
        if (this.range && (x < this.range[0] || x > this.range[1])) return;
        top = Math.max(top, series.reduce((sum, s) => sum + Math.max(0, s.y[i] || 0), 0));
      });
    });
    return top;
  },
};

function allSteps() {
  let [first, last] = [Infinity, -Infinity];
  for (const section of DATA.sections) for (const figure of section.figures) figure.runs.forEach((all, run) => {
    for (const { x } of all) if (x.length) [first, last] = [Math.min(first, page.at(run, x[0])), Math.max(last, page.at(run, x[x.length - 1]))];
  });
  return Number.isFinite(first) ? [first, last] : [0, 1];
}

// Text that a model wrote: invisible characters and changes of direction are shown as their code points.
function escapeInvisible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu,
    (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
}

// Header ------------------------------------------------------------------------------------------------------------

function header() {
  const slider = html("input", {
    type: "range", min: 0, max: 0.95, step: 0.05, value: page.smoothing, "aria-label": "smoothing", id: "smoothing",
    oninput: (event) => { page.setSmoothing(Number(event.target.value)); page.redraw(); },
  });
  const shown = html("output", { text: page.smoothing.toFixed(2) });
  page.setSmoothing = (weight) => { page.smoothing = weight; slider.value = weight; shown.textContent = weight.toFixed(2); };
  const theme = html("button", { class: "quiet", id: "theme", title: "light or dark", "aria-label": "switch between light and dark", text: "◐", onclick: switchTheme });
  document.getElementById("top").append(
    html("div", { class: "bar" },
      html("div", { class: "name" }, html("span", { class: "product", text: "megatron-dapo" }), html("h1", { text: MANY ? `${DATA.runs.length} runs compared` : DATA.title })),
      html("div", { id: "live", role: "status", "aria-live": "off", hidden: true }),
      MANY ? html("div", { class: "chips", role: "group", "aria-label": "runs" }, ...DATA.runs.map(chip)) : null,
      html("div", { class: "controls" }, ...rangeControls(), html("label", {}, "smoothing", slider, shown), theme)));
}

// What all x axes show.
function rangeControls() {
  const unit = html("select", { id: "unit", "aria-label": "x axis", onchange: (event) => page.setUnit(event.target.value) },
    ...["step", "tokens", "hours"].map((text) => html("option", { value: text, text: text === "step" ? "steps" : text })));
  const bound = (name) => html("input", { type: "number", step: "any", id: name, "aria-label": `x axis ${name}`, onchange: () => page.zoom(bounds()) });
  const [from, to] = [bound("from"), bound("to")];
  const bounds = () => [from.value === "" ? page.steps[0] : Number(from.value), to.value === "" ? page.steps[1] : Number(to.value)];
  const all = html("button", { class: "quiet", id: "all", text: "all", title: "show the whole x axis", hidden: true, onclick: () => page.zoom(null) });
  page.showRange = () => {
    all.hidden = page.range === null;
    [from, to].forEach((input, i) => { if (document.activeElement !== input) input.value = page.range ? Number(page.range[i].toPrecision(6)) : ""; input.placeholder = formatNumber(page.steps[i]); });
  };
  return [html("label", {}, "x", unit, from, "–", to), all];
}

function chip(run, index) {
  const mark = stroke(colour(index), dashOf(index), 2.5);
  return html("button", {
    class: "chip", "aria-pressed": "true", title: "show or hide this run",
    onclick: (event) => {
      const button = event.currentTarget;
      if (page.hidden.has(index)) page.hidden.delete(index); else page.hidden.add(index);
      button.setAttribute("aria-pressed", String(!page.hidden.has(index)));
      document.querySelectorAll(`[data-run="${index}"]`).forEach((node) => { node.hidden = page.hidden.has(index); });
      page.redraw();
    },
  }, mark, run.name);
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

// About the runs: model, data, versions, hardware, dates -----------------------------------------------------------------

function about() {
  const labels = [...new Set(DATA.runs.flatMap((run) => run.about.map(([label]) => label)))];
  if (!labels.length) return null;
  const head = MANY ? [html("thead", {}, html("tr", {}, html("td", {}), ...DATA.runs.map((run) => html("th", { text: run.name }))))] : [];
  const rows = labels.map((label) => html("tr", {}, html("th", { scope: "row", text: label }),
    ...DATA.runs.map((run) => html("td", { text: escapeInvisible((run.about.find(([name]) => name === label) || ["", "–"])[1]) }))));
  return html("section", { id: "about", class: "scroll card", "aria-label": "about" }, html("table", { class: "data" }, ...head, html("tbody", {}, ...rows)));
}

// Summary and findings ----------------------------------------------------------------------------------------------

const short = (value, kind) => (kind === "number" ? formatNumber(value, 3) : format(value, kind));

// "38 % at step 0", "0.61 in steps 1–5".
function startText(item) {
  const [first, last] = item.start_steps;
  return `${short(item.start, item.format)} ${first === last ? `at step ${first}` : `in steps ${first}–${last}`}`;
}

function summary() {
  if (MANY) return comparison();
  const run = DATA.runs[0];
  const tiles = run.summary.map((item) => html("div", { class: "tile" },
    html("div", { class: "tile-label", text: item.label }),
    html("div", { class: "tile-value", text: short(item.end, item.format) }),
    html("div", { class: "tile-from", text: startText(item) })));
  tiles.unshift(html("div", { class: "tile" }, html("div", { class: "tile-label", text: "Steps" }), html("div", { class: "tile-value", text: String(run.last_step) }),
    html("div", { class: "tile-from", text: run.seconds ? `in ${formatDuration(run.seconds)}` : "" })));
  return html("section", { class: "tiles", id: "summary", "aria-label": "summary" }, ...tiles);
}

// A row per value and a column per run: it fits, whatever the number of values.
function comparison() {
  const labels = [...new Set(DATA.runs.flatMap((run) => run.summary.map((item) => item.label)))];
  const cells = (make) => DATA.runs.map((run, index) => html("td", { "data-run": index }, ...make(run)));
  const head = html("tr", {}, html("th", { text: "" }), ...DATA.runs.map((run, index) => html("th", { "data-run": index, scope: "col" }, stroke(colour(index), dashOf(index), 2.5), run.name)));
  const rows = [["steps", (run) => [String(run.last_step)]], ["time", (run) => [run.seconds ? formatDuration(run.seconds) : "–"]], ...labels.map((label) => [label, (run) => {
    const item = run.summary.find((entry) => entry.label === label);
    return item ? [html("b", { text: short(item.end, item.format) }), html("small", { text: startText(item) })] : ["–"];
  }])].map(([label, make]) => html("tr", {}, html("th", { scope: "row", text: label }), ...cells(make)));
  return block("summary", "Comparison", html("div", { class: "scroll card" }, html("table", { class: "data" }, html("thead", {}, head), html("tbody", {}, ...rows))));
}

// Several findings of one rule become one entry: the latest finding, with all steps.
function repeated(findings) {
  const rules = [...new Set(findings.map((finding) => finding.rule))];
  return rules.map((rule) => {
    const all = findings.filter((finding) => finding.rule === rule), steps = all.map((finding) => finding.step);
    return { ...all[all.length - 1], when: steps.length > 4 ? `${steps.length} times from step ${steps[0]}` : `step ${steps.join(", ")}` };
  });
}

function findings() {
  const found = DATA.runs.flatMap((run, index) => repeated(run.findings).map((finding) => ({ ...finding, run, index })));
  const said = DATA.runs.flatMap((run) => run.warnings.map((text) => (MANY ? `${run.name}: ${text}` : text)));
  if (!found.length && !said.length) return null;
  const items = found.map((finding) => html("li", { "data-run": finding.index },
    html("span", { class: "when", text: finding.when }),
    html("div", {}, html("b", { text: (MANY ? `${finding.run.name}: ` : "") + finding.seen + "." }), ` Likely: ${finding.causes}. `, html("code", { text: `docs/diagnosis.md#${finding.rule}` }))));
  const log = said.length ? html("details", {}, html("summary", { text: `Warnings of the run (${said.length})` }), html("pre", { class: "text", text: escapeInvisible(said.join("\n")) })) : null;
  return block("findings", `Findings (${found.length})`, html("div", { class: "card findings" }, html("ul", {}, ...items), log));
}

// Figures -----------------------------------------------------------------------------------------------------------

function block(id, title, ...children) {
  return html("section", { id, class: "block" }, html("h2", { text: title }), ...children);
}

// With several runs, colour and dash pattern distinguish the runs, so that they are distinct without colour; the width
// of the line distinguishes the series. A single run uses both for its series.
function linesOf(figure, run) {
  const labels = [...new Set(figure.runs.flat().map((series) => series.label))];
  return figure.runs[run].map((series) => {
    const index = labels.indexOf(series.label);
    const single = !MANY || figure.stacked;
    const both = labels.length > 1 ? `${DATA.runs[run].name} · ${series.label}` : DATA.runs[run].name;
    return {
      run, name: single ? series.label : both, colour: colour(single ? index : run), dash: figure.stacked ? "" : dashOf(single ? index : run), width: single ? 1.9 : WIDTHS[index % WIDTHS.length],
      x: series.x.map((step) => page.at(run, step)), steps: series.x, y: series.y, low: series.low || undefined, high: series.high || undefined,
    };
  });
}

function legend(figure) {
  const labels = [...new Set(figure.runs.flat().map((series) => series.label))];
  if (labels.length < 2) return null;
  return html("div", { class: "legend" }, ...labels.map((label, index) => {
    const byWidth = MANY && !figure.stacked;
    const mark = figure.stacked ? square(index) : stroke(byWidth ? "currentColor" : colour(index), byWidth ? "" : dashOf(index), byWidth ? WIDTHS[index % WIDTHS.length] : 1.9);
    return html("span", {}, mark, label);
  }));
}

function square(index) {
  const mark = html("i", { class: "square" });
  mark.style.setProperty("--mark", colour(index));
  return mark;
}

// The card of a figure; the same node as before if only its numbers changed, so that its state stays.
function figureCard(figure) {
  const key = JSON.stringify(structure(figure)), known = page.cards.get(figure.id);
  if (known && known.key === key) return known.node;
  const panels = figure.stacked
    ? figure.runs.map((series, run) => series.length ? new Panel(figure, linesOf(figure, run), page, MANY ? DATA.runs[run].name : "") : null).filter(Boolean)
    : [new Panel(figure, figure.runs.flatMap((_, run) => linesOf(figure, run)), page, "")];
  if (figure.stacked && MANY) panels.forEach((panel) => { panel.node.dataset.run = panel.lines[0].run; });
  const values = figure.runs.flat().flatMap((series) => series.y).filter((v) => v !== null);
  const log = !figure.log && values.some((v) => v <= 0) ? null : html("button", {
    class: "quiet", "aria-pressed": String(figure.log), title: "logarithmic axis", text: "log",
    onclick: (event) => {
      for (const panel of panels) { panel.log = !panel.log; panel.draw(); }
      event.currentTarget.setAttribute("aria-pressed", String(panels[0].log));
    },
  });
  const node = html("figure", { class: "card", id: `figure-${figure.id}` },
    html("figcaption", {}, html("div", {}, html("h3", { text: figure.title }), html("p", { text: figure.note })), figure.stacked ? null : log),
    html("div", { class: "panels" }, ...panels.map((panel) => panel.node)), legend(figure));
  page.cards.set(figure.id, { key, node, panels });
  return node;
}

function figures() {
  return DATA.sections.map((section, index) => {
    const cards = section.figures.map(figureCard);
    const several = (card) => card.querySelectorAll(".panel").length > 1;
    const narrow = cards.filter((card) => !several(card));
    const last = narrow.length % 2 ? narrow[narrow.length - 1] : null; // no gap in the grid
    for (const card of cards) card.classList.toggle("wide", several(card) || card === last);
    const grid = html("div", { class: "figures" }, ...cards);
    if (index < DATA.sections.length - 1 || section.title !== "All other metrics") return block(`section-${index}`, section.title, grid);
    return html("details", { class: "block", id: "others", open: page.othersOpen, ontoggle: (event) => { page.othersOpen = event.target.open; page.redraw(); } }, html("summary", {}, html("h2", { text: `${section.title} (${section.figures.length})` })), grid);
  });
}

// Timeline of a step: a bar per phase, and a curve of running requests per engine ------------------------------------------

const LANE = 34;

function timelines() {
  const cards = DATA.runs.map((run) => (run.timeline ? timelineCard(run) : null)).filter(Boolean);
  return cards.length ? block("timeline", "Timeline of a step", ...cards) : null;
}

function timelineCard(run) {
  const { step, seconds, phases, engines } = run.timeline, width = 1000;
  const names = [...new Set(phases.map(([name]) => name))];
  const lanes = [...names.map((name) => ({ name })), ...engines], height = lanes.length * LANE + 22;
  const x = (s) => 230 + (s / Math.max(seconds, 1e-9)) * (width - 245);
  const totals = names.map((name) => `${name} ${formatDuration(phases.filter(([n]) => n === name).reduce((sum, [, a, b]) => sum + b - a, 0))}`);
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": `step ${step}: ${totals.join(", ")}` });
  lanes.forEach((lane, i) => {
    const top = i * LANE + 4, bottom = top + LANE - 8;
    svg("text", { x: 0, y: bottom - 8, class: "lane" }, node).textContent = lane.name.slice(0, 27);
    if (lane.x) {
      const most = Math.max(1, ...lane.y), y = (v) => (bottom - (v / most) * (bottom - top)).toFixed(1);
      const path = lane.x.map((s, k) => `H${x(s).toFixed(1)}V${y(lane.y[k])}`).join("");
      svg("path", { d: `M${x(lane.x[0]).toFixed(1)} ${bottom}${path}V${bottom}Z`, class: "area" }, node).style.fill = colour(6);
      svg("text", { x: 224, y: top + 9, "text-anchor": "end", class: "lane" }, node).textContent = `≤ ${most}`;
      return;
    }
    for (const [name, from, to] of phases.filter(([n]) => n === lane.name)) {
      const bar = svg("rect", { x: x(from), y: top, width: Math.max(1, x(to) - x(from)), height: bottom - top, rx: 2 }, node);
      bar.style.fill = colour(i);
      svg("title", {}, bar).textContent = `${name}: ${formatDuration(to - from)}, from ${formatDuration(from)}`;
    }
  });
  for (const tick of linearTicks(0, seconds || 1, 6)) {
    svg("text", { x: x(tick), y: height - 4, "text-anchor": "middle", class: "lane" }, node).textContent = formatDuration(tick).replace(/^0 .*/, "0");
  }
  const title = `${MANY ? `${run.name}, ` : ""}step ${step}: ${formatDuration(seconds)}`;
  return html("div", { class: "card timeline" }, html("h3", { text: title }),
    html("small", { text: `phases of rank 0 and running requests per engine; open traces/step_${step}.json in ui.perfetto.dev for every request` }), html("div", { class: "scroll" }, node));
}

// Configuration -----------------------------------------------------------------------------------------------------

function configuration() {
  const parts = [];
  if (MANY && DATA.differences.length) {
    const head = html("tr", {}, html("th", { text: "setting" }), ...DATA.runs.map((run) => html("th", { text: run.name })));
    const rows = DATA.differences.map((row) => html("tr", {}, html("th", { scope: "row" }, html("code", { text: row.key })), ...row.values.map((text) => html("td", {}, html("code", { text: escapeInvisible(text) })))));
    parts.push(html("div", { class: "scroll card", id: "differences" }, html("h3", { text: "What differs" }), html("table", { class: "data" }, html("thead", {}, head), html("tbody", {}, ...rows))));
  } else if (MANY && DATA.runs.some((run) => run.config.length)) {
    parts.push(html("p", { class: "empty", text: "The runs have the same configuration." }));
  }
  for (const run of DATA.runs) {
    if (!run.config.length) continue;
    const rows = run.config.map(([key, value]) => html("tr", {}, html("th", { scope: "row" }, html("code", { text: key })), html("td", {}, html("code", { text: escapeInvisible(value) }))));
    parts.push(html("details", { class: "card config" }, html("summary", { text: MANY ? `config.yaml of ${run.name}` : `config.yaml (${rows.length} settings)` }), html("table", { class: "data" }, html("tbody", {}, ...rows))));
  }
  return parts.length ? block("configuration", "Configuration", ...parts) : null;
}

// The parts of the page, in order: name, the data it depends on, its nodes.
const PARTS = [
  ["about", () => DATA.runs.map((run) => run.about), about],
  ["summary", () => DATA.runs.map((run) => [run.summary, run.last_step, run.seconds]), summary],
  ["findings", () => DATA.runs.map((run) => [run.findings, run.warnings]), findings],
  ["figures", () => DATA.sections.map((section) => [section.title, section.figures.map(structure)]), figures],
  ["timeline", () => DATA.runs.map((run) => run.timeline), timelines],
  ["samples", () => DATA.runs.map((run) => run.sample_steps.length > 0), samples],
  ["configuration", () => DATA.runs.map((run) => run.config), configuration],
];

// What a figure's panels depend on, apart from the numbers.
function structure(figure) {
  return [figure.id, figure.runs.map((run) => run.map((series) => series.label))];
}

// A function that gives the focus back to the same control after its part of the page was rebuilt.
function keepFocus(part) {
  const focused = document.activeElement;
  if (!part.contains(focused)) return () => {};
  const controls = (node) => [...node.querySelectorAll("button, select, summary, svg[role=img]")];
  const figure = focused.closest("figure"), label = focused.getAttribute("aria-label");
  const index = figure ? controls(figure).indexOf(focused) : -1;
  return () => {
    const found = figure ? controls(document.getElementById(figure.id) || figure)[index] : label && part.querySelector(`[aria-label="${CSS.escape(label)}"]`);
    if (found) found.focus({ preventScroll: true });
  };
}

function show(data) {
  DATA = data;
  page.steps = allSteps();
  page.showRange();
  const longest = Math.max(...DATA.runs.map((run) => run.steps));
  if (longest && !page.hasData) { page.hasData = true; page.setSmoothing(longest >= 30 ? 0.6 : 0); }
  for (const [name, input, build] of PARTS) {
    const key = JSON.stringify(input()), part = page.parts[name];
    if (part.key === key) continue;
    part.key = key;
    const restore = keepFocus(part.node), top = scrollY;
    part.node.replaceChildren(...[build()].flat().filter(Boolean));
    restore();
    scrollTo(0, top);
  }
  const figures = DATA.sections.flatMap((section) => section.figures), shown = new Set(figures.map((figure) => figure.id));
  for (const id of [...page.cards.keys()]) if (!shown.has(id)) page.cards.delete(id);
  for (const figure of figures) for (const panel of page.cards.get(figure.id).panels) panel.setData(figure, linesOf);
  document.querySelectorAll("[data-run]").forEach((node) => { node.hidden = page.hidden.has(Number(node.dataset.run)); });
  page.redraw();
  refreshSamples();
  if (page.step !== null) page.hover(page.step, page.active);
}

function start() {
  header();
  for (const [name] of PARTS) page.parts[name] = { key: null, node: html("div", { id: `part-${name}` }) };
  document.getElementById("main").replaceChildren(...PARTS.map(([name]) => page.parts[name].node), html("footer", { text: `megatron-dapo ${DATA.version}` }));
  show(DATA);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; page.redraw(); } });
  addEventListener("beforeprint", () => page.redraw());
}

start();
