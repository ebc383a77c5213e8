// The ablation: four switches choose a combination of DAPO's changes. Its curves are drawn with their confidence band
// over the thin grey curves of all other combinations. A design may not contain every combination: then the page says
// so and lists the missing one as such.

const DATA = JSON.parse(document.getElementById("data").textContent);
const MEASURE = Object.fromEntries(DATA.measures.map((measure) => [measure.id, measure]));
const PERCENT = Math.round(DATA.confidence * 100);

const page = {
  hidden: new Set(), step: null, steps: [0, 1], smoothing: 0, panels: [], on: new Set(), chosen: null,

  hover(step, active) {
    Object.assign(this, { step, active });
    for (const panel of this.panels) if (panel.svg) panel.showCursor(step, panel === active);
  },

  redraw() {
    for (const panel of this.panels) if (panel.node.isConnected && panel.node.clientWidth) panel.draw();
  },

  stackTop: () => 0,
};

function allSteps() {
  const steps = DATA.combinations.flatMap((row) => Object.values(row.bands).flatMap((band) => band.x));
  return steps.length ? [Math.min(...steps), Math.max(...steps)] : [0, 1];
}

// A panel whose axis covers all combinations, so that it stays the same when a switch is pressed.
class AblationPanel extends Panel {
  others() {
    return DATA.combinations.filter((row) => row !== page.chosen && row.bands[this.figure.id]).map((row) => row.bands[this.figure.id]);
  }

  // Of the means alone: with few seeds, the intervals are so wide that they would hide the curves.
  extent() {
    const found = DATA.combinations.flatMap((row) => (row.bands[this.figure.id] ? row.bands[this.figure.id].y : []));
    return found.length ? found : [0, 1];
  }

  drawLines() {
    const clip = svg("clipPath", { id: `plot-${this.figure.id}` }, this.svg);
    svg("rect", { x: MARGIN.left, y: MARGIN.top, width: this.width - MARGIN.left - MARGIN.right, height: HEIGHT - MARGIN.top - MARGIN.bottom }, clip);
    const body = svg("g", { class: "others" }, this.svg);
    for (const band of this.others()) svg("path", { d: linePath(band.x, band.y, this.sx, this.sy) }, body);
    super.drawLines();
    for (const band of this.svg.querySelectorAll(".band")) band.setAttribute("clip-path", `url(#plot-${this.figure.id})`);
  }
}

function lineOf(id) {
  const band = page.chosen && page.chosen.bands[id];
  if (!band) return [];
  const known = band.low.every((value) => value !== null);
  return [{ run: 0, name: page.chosen.name, colour: colour(0), dash: "", width: 2.4, x: band.x, y: band.y, low: known ? band.low : undefined, high: known ? band.high : undefined }];
}

function figureCard(id) {
  const measure = MEASURE[id];
  const figure = { id, title: measure.label, format: measure.format, log: false, stacked: false, zero: false };
  const panel = new AblationPanel(figure, lineOf(id), page, "");
  page.panels.push(panel);
  return html("figure", { class: "card", id: `figure-${id}` },
    html("figcaption", {}, html("div", {}, html("h3", { text: measure.label }), html("p", { text: measure.note }))),
    html("div", { class: "panels" }, panel.node));
}

// Switches ----------------------------------------------------------------------------------------------------------

function partsOn() {
  return DATA.switches.filter((item) => page.on.has(item.id)).flatMap((item) => item.changes).sort();
}

function choose(on) {
  page.on = new Set(on);
  const wanted = partsOn().join();
  show(DATA.combinations.find((row) => row.changes.join() === wanted) || null);
}

// A combination with only one half of the overlong handling (the paper's order) leaves its switch off.
function chooseRow(row) {
  page.on = new Set(DATA.switches.filter((item) => item.changes.every((change) => row.changes.includes(change))).map((item) => item.id));
  show(row);
}

function show(row) {
  page.chosen = row;
  for (const button of document.querySelectorAll(".switch")) button.setAttribute("aria-pressed", String(page.on.has(button.dataset.switch)));
  for (const line of document.querySelectorAll("#combinations tbody tr")) line.setAttribute("aria-current", String(row !== null && line.dataset.folder === row.folder));
  document.getElementById("chosen").replaceChildren(...chosenText(row));
  for (const panel of page.panels) panel.lines = lineOf(panel.figure.id);
  page.redraw();
}

function chosenText(row) {
  if (row === null) return ["This combination is not part of the design ", html("b", { text: DATA.design }), "."];
  if (!row.seeds.length) return [html("b", { text: row.name }), ": no run has finished yet."];
  const score = row.values.held_out, seeds = `${row.seeds.length} seed${row.seeds.length > 1 ? "s" : ""}`;
  return [html("b", { text: row.name }), ` · ${seeds}`, ...(score ? [" · held-out score ", html("b", { text: withInterval(score, "percent") })] : [])];
}

function withInterval(found, kind) {
  const range = found.low === null ? "" : ` [${format(found.low, kind)}, ${format(found.high, kind)}]`;
  return format(found.mean, kind) + range;
}

function switchButton(item) {
  return html("button", {
    class: "switch", "data-switch": item.id, "aria-pressed": "false", text: item.label,
    onclick: () => {
      const on = new Set(page.on);
      if (!on.delete(item.id)) on.add(item.id);
      choose(on);
    },
  });
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

// Tables ------------------------------------------------------------------------------------------------------------

function block(id, title, note, table) {
  return html("section", { id, class: "block" }, html("h2", { text: title }), html("p", { class: "muted", text: note }), html("div", { class: "scroll card" }, table));
}

function signed(value, kind) {
  return (value > 0 ? "+" : "") + format(value, kind);
}

function effectCell(found, kind) {
  if (!found) return html("td", { class: "none", text: "–" });
  const seen = found.verdict === "higher" || found.verdict === "lower";
  const range = found.low === null ? "" : `[${signed(found.low, kind)}, ${signed(found.high, kind)}]`;
  return html("td", { class: seen ? "seen" : "none" }, html("b", { text: signed(found.mean, kind) }), ` ${range}`, seen ? null : html("small", { text: found.verdict }));
}

const PAIRS = {
  grid: "with minus without, averaged over all combinations of the other three",
  "leave-one-out": "all changes minus all but this one",
  order: "this step minus the one before it",
};

function effects() {
  const head = html("tr", {}, html("th", { text: "measure" }), ...DATA.effects.map((effect) => html("th", { text: effect.label })));
  const rows = DATA.measures.map((measure) => html("tr", {},
    html("th", { scope: "row" }, measure.label, html("small", { text: measure.at })),
    ...DATA.effects.map((effect) => effectCell(effect.measures[measure.id], measure.format))));
  const note = `Difference ${PAIRS[DATA.design]}; ${PERCENT} % confidence interval over seeds. “No visible effect”: the interval includes 0. `
    + `With ${DATA.measures.length * DATA.effects.length} intervals, about ${Math.round(DATA.measures.length * DATA.effects.length * (1 - DATA.confidence))} exclude 0 by chance.`;
  return block("effects", "Effect of each change", note, html("table", { class: "data" }, html("thead", {}, head), html("tbody", {}, ...rows)));
}

function combinations() {
  const shown = DATA.panels.map((id) => MEASURE[id]);
  const head = html("tr", {}, html("th", { text: "combination" }), html("th", { text: "seeds" }), ...shown.map((measure) => html("th", { text: measure.label })));
  const rows = DATA.combinations.map((row) => html("tr", { "data-folder": row.folder, onclick: () => chooseRow(row) },
    html("th", { scope: "row" }, html("button", { text: row.name, title: "show this combination" })), html("td", { text: String(row.seeds.length) }),
    ...shown.map((measure) => html("td", { text: row.values[measure.id] ? withInterval(row.values[measure.id], measure.format) : "–" }))));
  return block("combinations", "All combinations", `Mean over seeds and ${PERCENT} % confidence interval.`, html("table", { class: "data" }, html("thead", {}, head), html("tbody", {}, ...rows)));
}

function start() {
  page.steps = allSteps();
  document.getElementById("top").append(html("div", { class: "bar" },
    html("div", { class: "name" }, html("span", { class: "product", text: "megatron-dapo ablate" }), html("h1", { text: DATA.title })),
    html("div", { id: "switches", role: "group", "aria-label": "changes of DAPO" }, ...DATA.switches.map(switchButton)),
    html("div", { class: "controls" }, html("button", { class: "quiet", id: "theme", title: "light or dark", "aria-label": "switch between light and dark", text: "◐", onclick: switchTheme }))));
  const finished = `${DATA.finished} of ${DATA.planned} runs finished, ${formatDuration(DATA.seconds)} of training.`;
  document.getElementById("main").replaceChildren(
    html("p", { id: "chosen", role: "status" }),
    html("p", { class: "muted", text: `Blue: the mean over seeds with its ${PERCENT} % band. Grey: the other combinations. ${finished}` }),
    html("section", { class: "block" }, html("h2", { text: "Curves" }), html("div", { class: "figures" }, ...DATA.panels.map(figureCard))),
    effects(),
    ...(DATA.more.length ? [html("section", { class: "block" }, html("h2", { text: "More curves" }), html("div", { class: "figures" }, ...DATA.more.map(figureCard)))] : []),
    combinations(),
    html("footer", { text: `megatron-dapo ${DATA.version}` }));
  const full = DATA.combinations.reduce((best, row) => (row.changes.length > best.changes.length ? row : best));
  chooseRow(full);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; page.redraw(); } });
  addEventListener("beforeprint", () => page.redraw());
}

start();
