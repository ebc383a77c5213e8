// The sample explorer: the samples of a recorded step as a table with filters, one of them in full with its tokens
// coloured by what the update read of them, and the history of its prompt. The live page asks the server for one step,
// sample or history at a time; a report has a bounded number inside. Texts are inserted as text, never as markup.

const ROWS = 1000;
const COLOURINGS = {
  "log-prob gap": { from: -0.5, to: 0.5, note: "trainer − engine before the update, in nats" },
  ratio: { from: Math.log(0.7), to: -Math.log(0.7), of: Math.log, note: "π/π_old; colour by its logarithm, ±0.36" },
  advantage: { from: -2, to: 2, note: "advantage of the token" },
  "log-prob": { from: -8, to: 8, note: "of the token under the updated policy, in nats" },
  entropy: { from: -4, to: 4, note: "of the policy at the token, in nats" },
};

const picked = { run: 0, step: null, place: null, verdict: "", source: "", sign: "", min: "", max: "", search: "", colouring: "log-prob gap" };

// Where samples come from.
const SamplesInside = {
  steps: (run) => [...new Set(DATA.runs[run].samples.map((item) => item.step))],
  index: async (run, step, search) => DATA.runs[run].samples.filter((item) => item.step === step && (!search || `${item.prompt_id}\n${item.prompt}\n${item.text}`.toLowerCase().includes(search.toLowerCase()))),
  sample: async (run, step, place) => DATA.runs[run].samples.find((item) => item.step === step && item.place === place),
  history: async (run, prompt) => DATA.runs[run].histories[prompt] || [],
};
const sampleSource = () => (DATA.runs[0].samples ? SamplesInside : samplesOfServer());

let refreshSamples = () => {};

function samples() {
  const withSamples = DATA.runs.map((_, i) => i).filter((i) => sampleSource().steps(i).length);
  if (!withSamples.length) return null;
  if (!withSamples.includes(picked.run)) picked.run = withSamples[0];
  const change = (name, reload) => (event) => { picked[name] = event.target.value; if (reload) picked.place = null; list(); };
  const select = (name, label, options, reload) => html("select", { "aria-label": label, onchange: change(name, reload) },
    ...options.map(([value, text]) => html("option", { value, text, selected: value === String(picked[name]) })));
  const runs = html("select", { "aria-label": "run", onchange: (event) => { Object.assign(picked, { run: Number(event.target.value), step: null, place: null }); list(); } },
    ...withSamples.map((i) => html("option", { value: i, text: DATA.runs[i].name, selected: i === picked.run })));
  const go = (step) => { Object.assign(picked, { step, place: null }); list(); };
  const beside = (by) => () => { const known = sampleSource().steps(picked.run); go(known[Math.max(0, Math.min(known.length - 1, nearest(known, shownStep()) + by))]); };
  const number = html("input", { type: "number", class: "step", "aria-label": "step", onchange: (event) => { const known = sampleSource().steps(picked.run); go(known[nearest(known, Number(event.target.value))]); } });
  const slider = html("input", { type: "range", min: 0, "aria-label": "recorded step", oninput: (event) => go(sampleSource().steps(picked.run)[Number(event.target.value)]) });
  const bound = (name, text) => html("input", { type: "number", min: 0, "aria-label": text, placeholder: text, value: picked[name], onchange: change(name) });
  const search = html("input", { type: "search", "aria-label": "search", placeholder: "search prompts and responses", value: picked.search, onchange: change("search", true) });
  const sources = html("select", { "aria-label": "source", hidden: true, onchange: change("source") });
  const note = html("small", { role: "status" }), table = html("div", { class: "scroll rows" }), detail = html("div", { class: "detail" });

  function shownStep() {
    const known = sampleSource().steps(picked.run);
    return known.includes(picked.step) ? picked.step : known[known.length - 1];
  }

  function steps() {
    const known = sampleSource().steps(picked.run), all = DATA.runs[picked.run].sample_steps.length;
    [number.value, slider.max, slider.value] = [shownStep(), known.length - 1, known.indexOf(shownStep())];
    return all > known.length ? ` · ${all - known.length} more recorded steps are in samples/` : "";
  }

  let latest = 0;
  async function list() {
    const turn = ++latest, step = shownStep(), more = steps();
    let found;
    try { found = await sampleSource().index(picked.run, step, picked.search); } catch (error) { note.textContent = `no samples: ${error.message}`; return; }
    if (turn !== latest) return;
    const names = ["", ...new Set(found.map((item) => item.source).filter(Boolean))];
    sources.hidden = names.length < 3;
    sources.replaceChildren(...names.map((name) => html("option", { value: name, text: name || "all sources", selected: name === picked.source })));
    const items = found.filter(passes);
    note.textContent = `${items.length} of ${found.length} samples of step ${step}${more}`;
    table.replaceChildren(rowsOf(items));
    if (!items.some((item) => item.place === picked.place)) picked.place = items.length ? items[0].place : null;
    if (picked.place === null) detail.replaceChildren(html("p", { class: "empty", text: "No such response in this step." }));
    else await show(step, picked.place);
    note.dataset.turn = turn;
  }

  function rowsOf(items) {
    const head = ["#", "prompt", "verdict", "tokens", "advantage", "score", "source"];
    return html("table", { class: "data" }, html("thead", {}, html("tr", {}, ...head.map((text) => html("th", { text })))), html("tbody", {}, ...items.slice(0, ROWS).map((item) =>
      html("tr", { "data-place": item.place, onclick: () => { picked.place = item.place; show(item.step, item.place); } },
        html("td", {}, html("button", { class: "quiet", text: String(item.place), "aria-label": `sample ${item.place}` })), html("td", { text: escapeInvisible(item.prompt_id) }),
        html("td", {}, html("span", { class: `badge ${item.verdict}`, text: item.verdict })), html("td", { text: `${item.tokens}${item.finish_reason === "length" ? " (cut)" : ""}` }),
        html("td", { text: item.advantage === null ? "–" : formatNumber(item.advantage, 3) }), html("td", { text: item.score === null ? "–" : formatNumber(item.score, 3) }), html("td", { text: escapeInvisible(item.source) })))));
  }

  async function show(step, place) {
    const turn = latest, run = picked.run;
    let item;
    try { item = await sampleSource().sample(run, step, place); } catch (error) { note.textContent = `no sample: ${error.message}`; return; }
    if (turn !== latest || place !== picked.place || !item) return;
    for (const row of table.querySelectorAll("tr[data-place]")) row.setAttribute("aria-current", String(Number(row.dataset.place) === place));
    detail.replaceChildren(sampleCard(run, item, go));
  }

  refreshSamples = () => { if (picked.step === null && Number(number.value) !== shownStep()) list(); else steps(); };
  list();
  return block("samples", "Samples",
    html("div", { class: "picker" }, withSamples.length > 1 ? runs : null, html("button", { text: "‹", "aria-label": "previous recorded step", onclick: beside(-1) }), html("label", {}, "step ", number),
      html("button", { text: "›", "aria-label": "next recorded step", onclick: beside(1) }), slider, search,
      select("verdict", "verdict", [["", "all verdicts"], ["right", "right"], ["wrong", "wrong"], ["ungraded", "ungraded"]]),
      select("sign", "advantage", [["", "any advantage"], ["1", "advantage > 0"], ["-1", "advantage < 0"], ["0", "advantage 0"]]),
      sources, bound("min", "min tokens"), bound("max", "max tokens"), note),
    html("div", { class: "explorer" }, html("div", { class: "card" }, table), detail));
}

function passes(item) {
  return (!picked.verdict || item.verdict === picked.verdict) && (!picked.source || item.source === picked.source)
    && (picked.sign === "" || Math.sign(item.advantage || 0) === Number(picked.sign))
    && (picked.min === "" || item.tokens >= Number(picked.min)) && (picked.max === "" || item.tokens <= Number(picked.max));
}

function sampleCard(run, item, go) {
  const text = html("pre", { class: "text", text: escapeInvisible(item.text) || "(empty)" }), legend = html("small", {});
  const colouring = html("select", { "aria-label": "colour of tokens", onchange: (event) => { picked.colouring = event.target.value; paint(); } },
    ...["none", ...Object.keys(COLOURINGS)].map((name) => html("option", { value: name, text: name === "none" ? "no colours" : `colour: ${name}`, selected: name === picked.colouring })));
  const paint = () => { if (item.values) legend.textContent = paintTokens(text, item.values, picked.colouring); };
  paint();
  const past = html("div", { class: "scroll" });
  const history = html("details", { class: "response", ontoggle: async (event) => {
    if (event.target.open && !past.firstChild) past.replaceChildren(historyTable(await sampleSource().history(run, item.prompt_id), item.step, go));
  } }, html("summary", { text: "history of this prompt" }), past);
  return html("article", { class: "card prompt" },
    html("header", {}, html("b", { text: `prompt ${escapeInvisible(item.prompt_id)}` }), html("span", { text: item.group }), html("span", {}, "reference ", html("code", { text: escapeInvisible(item.reference) }))),
    html("pre", { class: "text question", text: escapeInvisible(item.prompt) }),
    html("div", { class: "response" },
      html("p", { class: "muted" }, html("span", { class: `badge ${item.verdict}`, text: item.verdict }), ` sample ${item.place} · response ${item.index}${item.part ? `, part ${item.part + 1}` : ""} · ${item.tokens} tokens · ${item.finish_reason} · ${escapeInvisible(item.reason)}`,
        item.extracted === null ? null : html("span", {}, " · extracted ", html("code", { text: escapeInvisible(item.extracted) }))),
      item.values ? html("div", { class: "picker" }, colouring, legend) : null, text),
    history);
}

// A span per token; returns what the colours mean.
function paintTokens(node, values, name) {
  const colouring = COLOURINGS[name], names = Object.keys(COLOURINGS).filter((key) => values[key]);
  node.replaceChildren(...values.text.map((text, i) => {
    const told = names.map((key) => `${key} ${format(values[key][i], "number")}`).join(" · ");
    const span = html("span", { class: values.mask[i] ? "token" : "token masked", title: `token ${i} · ${told}${values.mask[i] ? "" : " · masked: not in the loss"}`, text: escapeInvisible(text) });
    const value = colouring && values[name][i];
    if (colouring && value !== null) {
      const share = Math.max(-1, Math.min(1, (colouring.of ? colouring.of(value) : value) / colouring.to));
      span.style.background = `color-mix(in srgb, var(${share < 0 ? "--c1" : "--c0"}) ${Math.round(Math.abs(share) * 70)}%, transparent)`;
    }
    return span;
  }));
  if (!colouring) return "";
  return `${colouring.note}: orange below ${name === "ratio" ? 1 : 0}, blue above; dotted: masked`;
}

function historyTable(rows, here, go) {
  if (!rows.length) return html("p", { class: "empty", text: "This prompt is in no other recorded step." });
  return html("table", { class: "data" }, html("thead", {}, html("tr", {}, ...["step", "right", "rollouts", "mean tokens"].map((text) => html("th", { text })))),
    html("tbody", {}, ...rows.map(([step, right, graded, rollouts, tokens]) => html("tr", { "aria-current": String(step === here) },
      html("td", {}, html("button", { class: "quiet", text: `step ${step}`, onclick: () => go(step) })), html("td", { text: graded ? `${right} of ${graded}` : "ungraded" }), html("td", { text: String(rollouts) }), html("td", { text: formatNumber(tokens) })))));
}
