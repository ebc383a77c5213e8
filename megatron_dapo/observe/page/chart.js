"use strict";
// Charts in SVG, without a library: lines with gaps, confidence bands, stacks, axes with round numbers. All charts of
// the page share one cursor, moved by the pointer or the arrow keys, and one range: dragging or + zooms in, − zooms out, a
// double click or 0 shows everything. Colours are CSS variables: changing the theme needs no redrawing.

const SVG = "http://www.w3.org/2000/svg";
const MARGIN = { top: 10, right: 12, bottom: 26, left: 50 };
const HEIGHT = 232;
const DASHES = ["", "6 4", "1.5 4", "10 3 2 3", "14 5", "3 2 3 6"];
const WIDTHS = [1.9, 1, 3.2];
const COLOURS = 8;

function svg(name, attributes, parent) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (parent) parent.appendChild(node);
  return node;
}

function html(name, options = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "text") node.textContent = value;
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const colour = (index) => `var(--c${index % COLOURS})`;
const dashOf = (index) => DASHES[index % DASHES.length];

// A line as it is drawn in a chart, for legends.
function stroke(paint, dash, width) {
  const mark = svg("svg", { class: "stroke", viewBox: "0 0 26 8", width: 26, height: 8, "aria-hidden": "true" });
  svg("line", { x1: 1, x2: 25, y1: 4, y2: 4, "stroke-width": width, "stroke-dasharray": dash }, mark).style.stroke = paint;
  return mark;
}

// Numbers -----------------------------------------------------------------------------------------------------------

function trim(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

function formatNumber(value, digits = 4) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return trim((value / 1e9).toFixed(2)) + "G";
  if (size >= 1e6) return trim((value / 1e6).toFixed(2)) + "M";
  if (size >= 1e4) return trim((value / 1e3).toFixed(1)) + "k";
  if (size < 1e-3) return trim(value.toExponential(Math.max(0, digits - 2)).replace(/\.?0+e/, "e")).replace("-", "−").replace("e-", "e−");
  return trim(value.toPrecision(Math.max(digits, Math.floor(Math.log10(size)) + 1))).replace("-", "−");
}

function formatDuration(seconds) {
  if (seconds < 0.0995) return `${formatNumber(seconds * 1000, 3)} ms`;
  if (seconds < 100) return `${formatNumber(seconds, 3)} s`;
  if (seconds < 6000) return `${formatNumber(seconds / 60, 3)} min`;
  return seconds < 172800 ? `${formatNumber(seconds / 3600, 3)} h` : `${formatNumber(seconds / 86400, 3)} d`;
}

const FORMATS = {
  number: (v) => formatNumber(v),
  count: (v) => formatNumber(v),
  percent: (v) => `${formatNumber(v * 100, 3)} %`,
  seconds: formatDuration,
  rate: (v) => `${formatNumber(v)}/s`,
};

function format(value, kind) {
  return value === null || value === undefined || !Number.isFinite(value) ? "–" : FORMATS[kind](value);
}

// Ticks of a linear axis: multiples of 1, 2 or 5 times a power of ten.
function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.8);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high) {
  const [from, to] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.max(1, Math.ceil((to - from) / 5));
  const inside = (v) => v >= low * 0.999 && v <= high * 1.001;
  const ticks = [];
  for (let e = from; e <= to; e += every) ticks.push(10 ** e);
  if (ticks.filter(inside).length >= 3) return ticks.filter(inside);
  const finer = [];
  for (let e = from - 1; e <= to; e++) for (const m of [1, 2, 5]) finer.push(m * 10 ** e);
  return finer.filter(inside);
}

// Exponential moving average with bias correction; gaps are kept.
function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle; else high = middle;
  }
  return Math.abs(sorted[low] - wanted) <= Math.abs(sorted[high] - wanted) ? low : high;
}

// Paths -------------------------------------------------------------------------------------------------------------

const at = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;

function linePath(x, y, sx, sy) {
  let path = "", open = false;
  for (let i = 0; i < x.length; i++) {
    const py = y[i] === null ? null : sy(y[i]);
    if (py === null) { open = false; continue; }
    const alone = !open && (i + 1 >= x.length || y[i + 1] === null || sy(y[i + 1]) === null);
    path += (open ? "L" : "M") + at(sx(x[i]), py) + (alone ? "h0.01" : "");
    open = true;
  }
  return path;
}

function bandPath(x, low, high, sx, sy) {
  const known = x.map((_, i) => i).filter((i) => low[i] !== null && high[i] !== null && sy(low[i]) !== null);
  if (known.length < 2) return known.map((i) => `M${at(sx(x[i]), sy(low[i]))}L${at(sx(x[i]), sy(high[i]))}`).join("");
  const up = known.map((i) => at(sx(x[i]), sy(high[i])));
  const down = known.reverse().map((i) => at(sx(x[i]), sy(low[i])));
  return `M${up.join("L")}L${down.join("L")}Z`;
}

// Bars if each is wide enough to be seen, areas otherwise.
function stackPath(x, bottom, top, sx, sy, bar) {
  if (bar) {
    return x.map((s, i) => top[i] > bottom[i]
      ? `M${at(sx(s) - bar / 2, sy(bottom[i]))}V${sy(top[i]).toFixed(1)}h${bar.toFixed(1)}V${sy(bottom[i]).toFixed(1)}Z` : "").join("");
  }
  const up = x.map((s, i) => at(sx(s), sy(top[i])));
  const down = x.map((s, i) => at(sx(s), sy(bottom[i]))).reverse();
  return `M${up.join("L")}L${down.join("L")}Z`;
}

// One panel: a set of axes with lines or one stack ------------------------------------------------------------------

class Panel {
  // `lines`: [{run, label, colour, dash, x, y, low, high}]; `page` holds smoothing, hover and the range of steps.
  constructor(figure, lines, page, title) {
    Object.assign(this, { figure, lines, page, title, log: figure.log });
    this.node = html("div", { class: "panel" });
    this.tip = html("div", { class: "tip", hidden: true });
  }

  // New numbers of the same series; `linesOf` makes the lines of one run.
  setData(figure, linesOf) {
    const runs = [...new Set(this.lines.map((line) => line.run))];
    this.figure = figure;
    this.lines = runs.flatMap((run) => linesOf(figure, run));
  }

  visible() {
    return this.lines.filter((line) => !this.page.hidden.has(line.run));
  }

  draw() {
    const focused = this.svg !== undefined && document.activeElement === this.svg;
    this.width = Math.max(220, this.node.clientWidth);
    this.svg = svg("svg", {
      viewBox: `0 0 ${this.width} ${HEIGHT}`, width: this.width, height: HEIGHT, role: "img", tabindex: 0,
      "aria-label": this.describe(),
    });
    this.scales();
    this.axes();
    if (this.figure.stacked) this.drawStack(); else this.drawLines();
    this.cursor = svg("g", { class: "cursor" }, this.svg);
    this.selection = svg("rect", { class: "selection", y: MARGIN.top, height: HEIGHT - MARGIN.top - MARGIN.bottom, width: 0 }, this.svg);
    this.svg.addEventListener("pointerdown", (event) => { if (event.button === 0) this.dragged = this.px(event); });
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerup", (event) => this.drop(event));
    this.svg.addEventListener("dblclick", () => this.zoom(null));
    this.svg.addEventListener("pointerleave", () => { this.drag(null); this.page.hover(null, null); });
    this.svg.addEventListener("keydown", (event) => this.key(event));
    this.svg.addEventListener("blur", () => this.page.hover(null, null));
    this.node.replaceChildren(...(this.title ? [html("div", { class: "panel-title", text: this.title })] : []), this.svg, this.tip);
    if (focused) this.svg.focus({ preventScroll: true });
  }

  describe() {
    const parts = this.visible().slice(0, 6).map((line) => {
      const known = line.y.filter((v) => v !== null);
      const values = [known[0], known[known.length - 1]].map((v) => format(v, this.figure.format));
      return `${line.name} from ${values[0]} to ${values[1]}`;
    });
    return `${this.figure.title}: ${parts.join("; ")}`;
  }

  scales() {
    const values = this.extent();
    const positive = values.filter((v) => v > 0);
    this.isLog = this.log && positive.length > 0;
    let [low, high] = this.isLog ? [Math.min(...positive), Math.max(...positive)] : [Math.min(...values), Math.max(...values)];
    if (this.isLog) {
      if (high / low < 10) [low, high] = [low / 2, high * 2];
      else [low, high] = [low / 1.15, high * 1.15];
    } else {
      if (this.figure.zero || this.figure.stacked) [low, high] = [Math.min(0, low), Math.max(0, high)];
      if (high === low) [low, high] = low === 0 ? [0, this.figure.format === "percent" ? 0.01 : 1] : [low - Math.abs(low) * 0.5, high + Math.abs(high) * 0.5];
      const pad = (high - low) * 0.06;
      const share = this.figure.format === "percent";
      low = (this.figure.zero && low >= 0) || (share && low >= 0 && low - pad < 0) ? Math.max(0, low >= 0 ? 0 : low) : low - pad;
      high = share && high <= 1 && high + pad > 1 ? 1 : high + pad;
    }
    const [left, right] = [MARGIN.left, this.width - MARGIN.right];
    const [bottom, top] = [HEIGHT - MARGIN.bottom, MARGIN.top];
    const [first, last] = this.range();
    const room = this.figure.stacked ? this.bars(right - left) / 2 : 4;
    const span = last - first || 1;
    this.sx = (s) => last === first ? (left + right) / 2 : left + room + ((s - first) / span) * (right - left - 2 * room);
    this.inverse = (px) => last === first ? first : first + ((px - left - room) / (right - left - 2 * room)) * span;
    const map = this.isLog ? (v) => (v > 0 ? Math.log(v / low) / Math.log(high / low) : null) : (v) => (v - low) / (high - low);
    this.sy = (v) => { const share = map(v); return share === null ? null : bottom - share * (bottom - top); };
    Object.assign(this, { low, high });
  }

  // The shown part of the x axis.
  range() {
    return this.page.range || this.page.steps;
  }

  inRange(x) {
    const [first, last] = this.range();
    return x >= first && x <= last;
  }

  // Width of a bar; 0 if areas are drawn.
  bars(room) {
    const [first, last] = this.range(), lines = this.visible();
    const count = this.bySteps() || !lines.length ? last - first + 1 : lines[0].x.filter((x) => this.inRange(x)).length + 1;
    return count <= 60 ? Math.max(2, Math.min(34, (room / count) * 0.78)) : 0;
  }

  extent() {
    const found = [];
    if (this.figure.stacked) {
      found.push(this.page.stackTop(this.figure));
    } else {
      for (const line of this.visible()) for (const list of [line.y, line.low, line.high]) (list || []).forEach((v, i) => { if (v !== null && this.inRange(line.x[i])) found.push(v); });
    }
    return found.length ? found : [0, 1];
  }

  axes() {
    const grid = svg("g", { class: "grid" }, this.svg);
    const [left, right, bottom] = [MARGIN.left, this.width - MARGIN.right, HEIGHT - MARGIN.bottom];
    const ticks = this.isLog ? logTicks(this.low, this.high) : linearTicks(this.low, this.high, 6);
    for (const tick of ticks) {
      const y = this.sy(tick);
      svg("line", { x1: left, x2: right, y1: y, y2: y, class: tick === 0 ? "zero" : "" }, grid);
      svg("text", { x: left - 8, y: y + 3.5, "text-anchor": "end" }, grid).textContent = this.tickText(tick);
    }
    const [first, last] = this.range();
    const steps = last === first ? [first] : linearTicks(first, last, Math.max(2, Math.floor(this.width / 90))).filter((tick) => !this.bySteps() || Number.isInteger(tick));
    for (const tick of steps) {
      svg("line", { x1: this.sx(tick), x2: this.sx(tick), y1: bottom, y2: bottom + 4, class: "tick" }, grid);
      svg("text", { x: this.sx(tick), y: bottom + 17, "text-anchor": "middle" }, grid).textContent = formatNumber(tick);
    }
    svg("text", { x: left - 8, y: bottom + 17, "text-anchor": "end", class: "unit" }, grid).textContent = this.page.unit || "step";
    for (const run of this.page.restarts ? new Set(this.visible().map((line) => line.run)) : []) {
      for (const [step, x] of this.page.restarts(run)) {
        if (!this.inRange(x)) continue;
        const mark = svg("line", { x1: this.sx(x), x2: this.sx(x), y1: MARGIN.top, y2: bottom, class: "restart" }, grid);
        svg("title", {}, mark).textContent = `started again before step ${step}`;
      }
    }
    svg("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" }, grid);
  }

  bySteps() {
    return !this.page.unit || this.page.unit === "step";
  }

  // A group that shows nothing outside of the axes.
  body(name) {
    const width = this.width - MARGIN.left - MARGIN.right;
    return svg("svg", { class: name, x: MARGIN.left, y: 0, width, height: HEIGHT, viewBox: `${MARGIN.left} 0 ${width} ${HEIGHT}` }, this.svg);
  }

  tickText(tick) {
    if (this.figure.format === "percent") return `${trim((tick * 100).toPrecision(4)).replace("-", "−")}%`;
    if (this.figure.format === "seconds") return formatDuration(tick).replace(/^0 .*/, "0");
    return formatNumber(tick);
  }

  drawLines() {
    const body = this.body("lines");
    for (const line of this.visible()) {
      const sparse = this.figure.id === "evaluation" || this.figure.smooth === false || line.x.length <= 12;
      const weight = sparse ? 0 : this.page.smoothing;
      line.shown = smooth(line.y, weight);
      if (line.low && line.high) {
        const band = svg("path", { d: bandPath(line.x, line.low, line.high, this.sx, this.sy), class: "band" }, body);
        band.style.fill = band.style.stroke = line.colour;
      }
      if (weight) {
        const raw = svg("path", { d: linePath(line.x, line.y, this.sx, this.sy), class: "raw" }, body);
        raw.style.stroke = line.colour;
      }
      const path = svg("path", { d: linePath(line.x, line.shown, this.sx, this.sy), class: "line", "stroke-dasharray": line.dash, "stroke-width": line.width }, body);
      path.style.stroke = line.colour;
      if (line.x.length <= 24) this.dots(body, line);
    }
  }

  dots(body, line) {
    line.x.forEach((step, i) => {
      const y = line.shown[i] === null ? null : this.sy(line.shown[i]);
      if (y !== null) svg("circle", { cx: this.sx(step), cy: y, r: 2.6, class: "dot" }, body).style.fill = line.colour;
    });
  }

  drawStack() {
    const body = this.body("stack");
    const bar = this.bars(this.width - MARGIN.left - MARGIN.right);
    let bottom = null;
    for (const line of this.visible()) {
      bottom = bottom || line.x.map(() => 0);
      const top = line.y.map((v, i) => bottom[i] + Math.max(0, v || 0));
      svg("path", { d: stackPath(line.x, bottom, top, this.sx, this.sy, bar), class: "area" }, body).style.fill = line.colour;
      bottom = top;
    }
  }

  // Read-out ----------------------------------------------------------------------------------------------------

  px(event) {
    const box = this.svg.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * this.width;
  }

  point(event) {
    if (this.dragged !== undefined && this.dragged !== null) this.drag(this.px(event));
    this.page.hover(this.inverse(this.px(event)), this);
  }

  // Shows what is selected so far; null: nothing any more.
  drag(px) {
    if (px === null) this.dragged = null;
    const from = px === null ? 0 : Math.min(px, this.dragged);
    this.selection.setAttribute("x", from);
    this.selection.setAttribute("width", px === null ? 0 : Math.abs(px - this.dragged));
  }

  drop(event) {
    const from = this.dragged, to = this.px(event);
    this.drag(null);
    if (from !== null && from !== undefined && Math.abs(to - from) > 8) this.zoom([from, to].sort((a, b) => a - b).map(this.inverse));
  }

  // `range`: of the x axis; null: all of it.
  zoom(range) {
    if (!this.page.zoom) return;
    const [first, last] = this.page.steps;
    this.page.zoom(range && [Math.max(first, range[0]), Math.min(last, range[1])]);
  }

  key(event) {
    const factor = { "+": 0.25, "-": 1, 0: Infinity }[event.key];
    if (factor) {
      const [first, last] = this.range(), middle = this.page.step === null ? (first + last) / 2 : this.page.step;
      const half = (last - first) * factor, all = half >= (this.page.steps[1] - this.page.steps[0]) / 2;
      this.zoom(all ? null : [middle - half, middle + half]);
      return;
    }
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const steps = [...new Set(this.visible().flatMap((line) => line.x))].sort((a, b) => a - b);
    if (!steps.length) return;
    const here = this.page.step === null ? (move > 0 ? -1 : steps.length) : nearest(steps, this.page.step);
    this.page.hover(steps[Math.max(0, Math.min(steps.length - 1, here + move))], this);
  }

  showCursor(wanted, active) {
    this.cursor.replaceChildren();
    this.tip.hidden = true;
    const lines = this.visible().filter((line) => line.x.some((x) => this.inRange(x)));
    if (wanted === null || !lines.length) return;
    const all = lines.map((line) => line.x[nearest(line.x, wanted)]);
    const step = all.reduce((best, s) => (Math.abs(s - wanted) < Math.abs(best - wanted) ? s : best));
    if (!this.inRange(step)) return;
    const x = this.sx(step), of = lines.find((line) => line.x.includes(step));
    svg("line", { x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }, this.cursor);
    const rows = [];
    for (const line of lines) {
      const i = nearest(line.x, step);
      if (line.x[i] !== step) continue;
      const value = (line.shown || line.y)[i];
      rows.push([line, line.y[i], value, line.low && line.high ? [line.low[i], line.high[i]] : null]);
      const y = value === null || this.figure.stacked ? null : this.sy(value);
      if (y !== null) svg("circle", { cx: x, cy: y, r: 3.5 }, this.cursor).style.fill = line.colour;
    }
    const name = this.bySteps() ? `step ${step}` : `${formatNumber(step)} ${this.page.unit} · step ${of.steps[of.x.indexOf(step)]}`;
    if (active) this.showTip(name, x, this.figure.stacked ? rows.reverse() : rows);
  }

  showTip(name, x, rows) {
    const kind = this.figure.format;
    const table = html("table", {});
    for (const [line, raw, shown, band] of rows) {
      const swatch = this.figure.stacked ? html("i", { class: "square" }) : stroke(line.colour, line.dash, line.width);
      swatch.style.setProperty("--mark", line.colour);
      const smoothed = shown !== raw && shown !== null ? ` (${format(shown, kind)})` : "";
      const range = band && band[0] !== null ? ` [${format(band[0], kind)}, ${format(band[1], kind)}]` : "";
      table.append(html("tr", {}, html("td", {}, swatch, line.name), html("td", { text: format(raw, kind) + smoothed + range })));
    }
    if (this.figure.stacked && rows.length > 1) {
      const total = rows.reduce((sum, [, raw]) => sum + (raw || 0), 0);
      table.append(html("tr", { class: "total" }, html("td", { text: "total" }), html("td", { text: format(total, kind) })));
    }
    this.tip.replaceChildren(html("div", { class: "tip-step", text: name }), table);
    this.tip.hidden = false;
    const place = (x / this.width) * this.node.clientWidth;
    const left = place + 14 + this.tip.offsetWidth > this.node.clientWidth ? place - 14 - this.tip.offsetWidth : place + 14;
    this.tip.style.left = `${Math.max(0, left)}px`;
  }
}
