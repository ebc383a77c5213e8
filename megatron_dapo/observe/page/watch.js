// The live page: asks for newer data every second and shows what the run is doing.

const PERIOD = 1000;

function liveText(status) {
  if (status.silent) return `no sign of life for ${formatDuration(status.silent)}`;
  if (status.state !== "running") return status.state;
  const phases = status.phases.map((phase) => `${phase.name} ${formatDuration(phase.seconds)}${phase.text ? ` (${phase.text})` : ""}`);
  const left = status.remaining ? ` · ${formatDuration(status.remaining)} left` : "";
  return `step ${status.step}/${status.total}${left}${phases.length ? ` · ${phases.join(" · ")}` : ""}`;
}

function showLive(lines, state) {
  const node = document.getElementById("live");
  node.hidden = false;
  node.className = state;
  node.textContent = lines.map(escapeInvisible).join(" | ");
}

function samplesOfServer() {
  return {
    steps: (run) => DATA.runs[run].sample_steps,
    index: (run, step, search) => ask("samples", { run, step, search }),
    sample: (run, step, place) => ask("sample", { run, step, place }),
    history: (run, prompt) => ask("history", { run, prompt }),
  };
}

async function ask(path, query) {
  const reply = await fetch(`${path}?${new URLSearchParams(query)}`, { cache: "no-store" });
  if (!reply.ok) throw new Error(await reply.text());
  return reply.json();
}

let version = "";

async function poll() {
  try {
    const reply = await fetch(`data?version=${encodeURIComponent(version)}`, { cache: "no-store" });
    if (!reply.ok) throw new Error(await reply.text());
    const found = await reply.json();
    if (found.data) { version = found.version; show(found.data); }
    const name = (i) => (MANY ? `${DATA.runs[i].name}: ` : "");
    const lines = found.status.map((status, i) => name(i) + liveText(status));
    const quiet = found.status.every((status) => status.state !== "running" || status.silent);
    showLive(found.error ? [found.error] : lines, found.error ? "lost" : quiet ? "ended" : "running");
  } catch (error) {
    showLive([`no data: ${error.message || error}; is megatron-dapo watch still running?`], "lost");
  }
  setTimeout(poll, PERIOD);
}

poll();
