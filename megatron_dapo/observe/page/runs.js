// The list of all runs in a folder: state, step, time left, accuracy, last warning, and the settings that differ. A click
// on a heading sorts. It is asked for again every five seconds.

let DATA = JSON.parse(document.getElementById("data").textContent);
const PERIOD = 5000;
const order = { key: "updated", up: false };
const text = (value) => String(value === null || value === undefined ? "" : value).replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu, "·");

function columns() {
  const keys = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.settings)))];
  return [
    ["run", (run) => run.name, (run) => html("a", { href: run.page, text: text(run.name) })],
    ["state", (run) => run.state, (run) => html("span", { class: run.state === "running" ? "badge right" : run.state === "finished" ? "" : "badge ungraded", text: text(run.state) })],
    ["step", (run) => run.step, (run) => `${run.step}${run.total ? ` / ${run.total}` : ""}`],
    ["time left", (run) => run.remaining, (run) => (run.remaining ? formatDuration(run.remaining) : "–")],
    ["accuracy", (run) => run.accuracy, (run) => format(run.accuracy, "percent")],
    ["last change", (run) => run.updated, (run) => (run.updated ? `${formatDuration(Math.max(0, DATA.now - run.updated))} ago` : "–"), "updated"],
    ["last warning", (run) => run.warning, (run) => html("span", { class: "warning", title: text(run.warning), text: text(run.warning) })],
    ...keys.map((key) => [key, (run) => run.settings[key], (run) => html("code", { text: text(run.settings[key]) }), key]),
  ];
}

function draw() {
  const all = columns(), sorted = all.find(([title, , , key]) => (key || title) === order.key) || all[0];
  const rows = [...DATA.runs].sort((a, b) => {
    const [x, y] = [sorted[1](a), sorted[1](b)].map((value) => (value === undefined || value === null ? "" : value));
    const less = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true });
    return order.up ? less : -less;
  });
  const head = all.map(([title, , , key]) => html("th", { "aria-sort": (key || title) === order.key ? (order.up ? "ascending" : "descending") : "none" },
    html("button", { class: "quiet", text: title, onclick: () => { order.up = order.key === (key || title) ? !order.up : title === "run"; order.key = key || title; draw(); } })));
  const focused = document.activeElement && document.activeElement.textContent;
  document.getElementById("main").replaceChildren(html("div", { class: "scroll card", id: "runs" }, html("table", { class: "data" }, html("thead", {}, html("tr", {}, ...head)),
    html("tbody", {}, ...rows.map((run) => html("tr", {}, ...all.map(([, , cell]) => html("td", {}, cell(run)))))))));
  const again = focused && [...document.querySelectorAll("#runs button, #runs a")].find((node) => node.textContent === focused);
  if (again) again.focus({ preventScroll: true });
}

async function poll() {
  try {
    DATA = await (await fetch("data", { cache: "no-store" })).json();
    draw();
    document.getElementById("live").hidden = true;
  } catch (error) {
    Object.assign(document.getElementById("live"), { hidden: false, className: "lost", textContent: "no data; is megatron-dapo watch still running?" });
  }
  setTimeout(poll, PERIOD);
}

document.getElementById("top").append(html("div", { class: "bar" },
  html("div", { class: "name" }, html("span", { class: "product", text: "megatron-dapo" }), html("h1", { text: `${DATA.runs.length} runs in ${DATA.title}` })),
  html("div", { id: "live", role: "status", hidden: true })));
draw();
setTimeout(poll, PERIOD);
