// The page that shows a run. Every second, it requests the list of runs and the state of the shown
// runs from the server. It fetches curves, timelines, logs and stacks only while they are visible.
// All text is inserted as text and never as HTML, so the output of a run can't inject elements.

const $ = (id) => document.getElementById(id);
const KINDS = { compute: "compute", backward: "backward", data: "waiting for data", sync: "waiting for ranks", other: "other" };
const PALETTE = ["#4c86ea", "#e8833a", "#3aa76d", "#b05fd3", "#d6549a", "#2aa5b8", "#a08a1f", "#7c8aa0"];
const WINDOWS = [["1 min", 60], ["10 min", 600], ["1 h", 3600], ["All", null]];
const MOST_LINES = 3000;    // maximum number of log lines on the page
const MANY = 16;            // number of ranks that the table shows by default

let runs = [];
let chosen = null;          // name of the run that the page shows
let compared = [];          // names of the other runs whose curves are shown
let states = new Map();     // last known state of each run, by name
let asking = 0;             // number of calls of `connect`; only the last call continues
let seconds = 600;          // time range of the timelines
let timelines = null;           // timelines of all ranks
let allRanks = false;

// -- small tools ---------------------------------------------------------------------------------

function h(tag, props = {}, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children.filter((child) => child != null));
  return node;
}

async function ask(path, query, method = "GET") {
  const pairs = Array.isArray(query) ? query : Object.entries(query);
  const url = `${path}?${new URLSearchParams(pairs.filter(([, value]) => value != null))}`;
  const answer = await fetch(url, { method });
  if (answer.ok) return answer.json();
  throw Object.assign(new Error(await answer.text()), { status: answer.status });
}

// Run `work` once at a time. All calls during a run are merged into one additional run after it.
function oneAtATime(work, pause = 0) {
  let busy = false, again = false;
  return async function run() {
    if (busy) { again = true; return; }
    busy = true;
    try { await work(); } finally {
      if (pause) await new Promise((done) => setTimeout(done, pause));
      busy = false;
      if (again) { again = false; run(); }
    }
  };
}

function duration(value) {  // with non-breaking spaces
  if (value < 9.95) return `${value.toFixed(1)}\u00a0s`;
  if (value < 120) return `${Math.round(value)}\u00a0s`;
  if (value < 7200) return `${Math.floor(value / 60)}\u00a0min`;
  return value < 172800 ? `${Math.floor(value / 3600)}\u00a0h` : `${Math.floor(value / 86400)}\u00a0days`;
}
const bytes = (n) => (n < 1e9 ? `${Math.round(n / 1e6)} MB` : `${(n / 1e9).toFixed(1)} GB`);
const clock = (t) => new Date(t * 1000).toLocaleTimeString();
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };  // so that screen readers don't repeat it
// Return the text with each part in backquotes as a <code> element.
const withCode = (text) => text.split(/`([^`\n]+)`/).map((part, index) => (index % 2 ? h("code", { textContent: part }) : part));
function putWithCode(node, text) {
  if (node.dataset.text === text) return;
  node.dataset.text = text;
  node.replaceChildren(...withCode(text));
}
const state = () => states.get(chosen) ?? {};
const rankRow = (rank) => (state().ranks ?? []).find((row) => row.rank === rank);

function chip(rank) {
  const row = rankRow(rank);
  const button = h("button", { type: "button", className: `chip ${row?.severity ?? ""}`, textContent: rank,
    title: row ? `rank ${rank} ${row.doing}` : `rank ${rank}` });
  button.onclick = () => openRank(rank);
  return button;
}

// -- choice of runs --------------------------------------------------------------------------------

// Return the address of the page that shows these runs.
function address(run, others) {
  return `#${new URLSearchParams([["run", run], ...others.map((name) => ["with", name])])}`;
}

function followAddress() {
  const params = new URLSearchParams(location.hash.slice(1)), before = chosen;
  chosen = params.get("run") ?? chosen;
  compared = params.getAll("with").filter((name) => name !== chosen).slice(0, 7);
  if (chosen !== before) forgetPage();
  connect();
  drawRuns();
  drawCharts();
}

async function connect() {
  const current = ++asking, names = [chosen, ...compared].filter(Boolean);
  for (let seen = null; current === asking; await new Promise((done) => setTimeout(done, 1000))) {
    try {
      const news = await ask("api/news", [...names.map((name) => ["run", name]), ["seen", seen]]);
      if (current !== asking) return;
      seen = news.seen;
      queueMicrotask(() => takeNews(news));  // an error in takeNews isn't a lost connection
    } catch (error) {
      if (current !== asking) return;
      if (error.status) {  // the server responded, so retrying is useless
        connection("lost", error.status === 403 ? "server restarted: open the address that it printed" : "run not found");
        return;
      }
      if (!$("connection").classList.contains("lost")) connection("lost", `connection lost at ${new Date().toLocaleTimeString()}`);
    }
  }
}

function takeNews(news) {
  if (news.runs) {
    runs = news.runs;
    if (!chosen && runs.length) location.replace(address(runs[0].name, []));
    else if (!chosen) putWithCode($("sentence"), "This directory contains no runs yet. The first run appears here when it starts.");
    drawRuns();
  }
  for (const found of news.states) states.set(found.name, found);
  const ended = states.has(chosen) && !state().live && state().state !== "running";
  connection(ended ? "" : "live", ended ? "ended" : "live");
  if (news.states.some((found) => found.name === chosen)) drawState();
  if (news.states.length) drawCharts();
}

function connection(kind, text) {
  put($("connection"), text);
  $("connection").className = `connection ${kind}`;
}

function forgetPage() {
  timelines = null;
  allRanks = false;
  $("ranks").tBodies[0].replaceChildren();
  $("rank-map").replaceChildren();
  for (const panel of panels.values()) panel.remove();
  panels.clear();
  log = {};
  $("log-search").value = "";
  $("log").replaceChildren();
  drawState();
}

function drawRuns() {
  $("runs-count").textContent = runs.length;
  $("runs-filter").hidden = runs.length < 8;
  const wanted = $("runs-filter").value.toLowerCase();
  const focused = document.activeElement?.dataset?.key;
  $("runs").replaceChildren(...runs.filter((run) => run.name.toLowerCase().includes(wanted)).map((run) => {
    const trouble = run.state === "running" && ["stuck", "failed", "wrong"].includes(run.severity);
    const word = trouble ? run.severity : run.state;
    const others = compared.filter((name) => name !== run.name);
    const link = h("a", { href: address(run.name, others) }, run.name,
      h("small", {}, h("span", { className: `state ${word}`, textContent: word }),
        ` ${[run.world_size && `${run.world_size} rank${run.world_size > 1 ? "s" : ""}`, run.kind].filter(Boolean).join(" · ")}`));
    link.dataset.key = `a ${run.name}`;
    if (run.name === chosen) link.setAttribute("aria-current", "page");
    const box = h("input", { type: "checkbox", checked: run.name === chosen || compared.includes(run.name),
      disabled: run.name === chosen, ariaLabel: `compare ${run.name}` });
    box.dataset.key = `c ${run.name}`;
    box.onchange = () => location.replace(address(chosen, box.checked ? [...others, run.name].slice(-7) : others));
    return h("li", { className: run.name === chosen ? "chosen" : "" }, box, link);
  }));
  if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

// -- verdict, findings, waits --------------------------------------------------------------------

function drawState() {
  const now = state();
  $("run-name").textContent = chosen;
  const ranks = now.ranks ?? [];
  const unit = ranks.some(inEpochs) && !ranks.some((r) => r.step) ? "epoch" : "step";
  const low = Math.min(...ranks.map((r) => r[unit] ?? 0)), high = Math.max(...ranks.map((r) => r[unit] ?? 0));
  const steps = ranks.length ? `${unit} ${low === high ? low : `${low}–${high}`}` : "";
  $("run-facts").textContent = [now.state, now.world_size && `${now.world_size} ranks`, steps, now.facts].filter(Boolean).join(" · ");
  $("run-facts").title = $("run-facts").textContent;
  const word = now.error ? "failed" : now.state === "deleted" ? "none" : now.severity ?? "none";
  $("verdict").className = `verdict ${word}`;
  $("severity").textContent = word === "none" ? "" : word;
  const sentence = now.error ? `Can't read this run: ${now.error}`
    : now.state === "deleted" ? "This run was deleted. The page shows its last known state." : now.verdict ?? "";
  putWithCode($("sentence"), sentence);
  document.title = `${["stuck", "failed", "wrong"].includes(word) ? `${word.toUpperCase()} · ` : ""}${chosen} · miniray`;
  drawFindings(now);
  drawWaits(now);
  drawRanks(now);
  drawLogChoice(now);
  fetchTimelines();
  followLog();
}

function parts(finding) {
  return [
    finding.evidence.length ? h("ul", {}, ...finding.evidence.map((text) => h("li", {}, ...withCode(text)))) : null,
    finding.cause || finding.fix ? h("dl", {},
      ...[["Cause", finding.cause], ["Fix", finding.fix]].filter(([, text]) => text)
        .flatMap(([name, text]) => [h("dt", { textContent: name }), h("dd", {}, ...withCode(text))])) : null,
  ];
}

function folded(title, ...children) {
  return h("details", { className: "finding" }, h("summary", {}, ...withCode(title)), ...children);
}

// Redraw only the elements that have changed, so that an expanded finding remains expanded.
const seen = new Map();
function changed(key, value) {
  const text = JSON.stringify(value);
  if (seen.get(key) === text) return false;
  seen.set(key, text);
  return true;
}

function drawFindings(now) {
  const findings = now.findings ?? [];
  if (changed("findings", [now.name, findings])) {
    const [first, ...rest] = findings;
    $("finding").replaceChildren(
      ...(first ? [h("div", { className: "finding" },
        first.ranks.length && first.ranks.length < now.world_size ? h("p", {}, "Affected ranks: ", ...first.ranks.slice(0, 32).map(chip)) : null,
        ...parts(first))] : []),
      ...rest.map((finding) => folded(`${finding.severity.toUpperCase()}: ${finding.title}`, ...parts(finding))));
  }
  const more = [
    ...(now.notes ?? []).map((note) => folded(note.title, ...parts(note))),
    ...Object.entries(now.damaged ?? {}).map(([file, why]) => h("p", { textContent: `Can't read ${file}: ${why}` })),
    ...(now.gpus ?? []).map((line) => h("p", { textContent: line })),
  ];
  if (changed("more", [now.name, now.notes, now.damaged, now.gpus])) $("more").replaceChildren(...more);
  $("more-section").hidden = !more.length;
}

function drawWaits(now) {
  // Short waits are a normal part of training. Show only waits of at least one second.
  const lasting = (now.waits ?? []).filter((wait) => wait.seconds >= 1 && now.live);
  $("waits-section").hidden = !lasting.length;
  if (!changed("waits", [now.name, lasting])) return;
  const focused = $("waits").contains(document.activeElement) ? document.activeElement.textContent : null;
  $("waits").replaceChildren(...lasting.map((wait) => h("div", { className: "wait" },
    h("div", {}, h("p", {}, `${wait.waiting.length === 1 ? "Rank" : "Ranks"} `, ...wait.waiting.map(chip)),
      h("p", { className: "quiet" }, "in ", h("code", { textContent: wait.what }), `, ${duration(wait.seconds)}`)),
    h("div", { className: "arrow", textContent: "→" }),
    wait.missing.length
      ? h("ul", {}, ...wait.missing.map(({ doing, ranks }) => h("li", {}, ...ranks.map(chip), ` ${doing}`)))
      : h("p", { className: "quiet", textContent: "all ranks have entered the call, which is still in progress" }))));
  if (focused) [...$("waits").querySelectorAll("button")].find((node) => node.textContent === focused)?.focus();
}

// -- ranks and timelines ------------------------------------------------------------------------

// Workers without torch don't count steps. Return true if the row shows the trainer's epoch instead.
function inEpochs(row) { return !row.step && row.epoch >= 0; }

const CELLS = ["rank", "how", "step", "loss", "timeline", "doing", "memory", "cpu", "request"];
const NUMBERS = new Set(["step", "loss", "memory", "cpu"]);

function drawRanks(now) {
  const rows = [...(now.ranks ?? [])];
  $("ranks-section").hidden = !rows.length;
  const many = rows.length > MANY;
  const trouble = (row) => ["failed", "stuck", "wrong", "slow"].indexOf(row.severity || "x") >>> 0;
  rows.sort((a, b) => (many ? trouble(a) - trouble(b) : 0) || a.rank - b.rank);
  drawRankMap(now, many);
  $("all-ranks").hidden = !many;
  $("all-ranks").textContent = allRanks ? `Show only ${MANY} ranks` : `Show all ${rows.length} ranks`;
  if (many && !allRanks) rows.splice(MANY);
  const body = $("ranks").tBodies[0];
  const byRank = new Map([...body.rows].map((row) => [Number(row.dataset.rank), row]));
  rows.forEach((row, index) => {
    const line = byRank.get(row.rank) ?? newRow(row.rank);
    byRank.delete(row.rank);
    fillRow(line, row);
    if (body.rows[index] !== line) body.insertBefore(line, body.rows[index] ?? null);
  });
  for (const line of byRank.values()) line.remove();
}

function newRow(rank) {
  const line = h("tr", {}, ...CELLS.map((name) => h("td", { className: `${name} ${NUMBERS.has(name) ? "number" : ""}` })));
  line.dataset.rank = rank;
  line.cells[0].textContent = rank;
  line.cells[1].append(h("span"));
  const canvas = h("canvas");
  canvas.setAttribute("role", "img");
  canvas.onmousemove = (event) => showTip(event, rank);
  canvas.onmouseleave = () => { $("tip").hidden = true; };
  line.cells[4].append(canvas);
  const button = h("button", { type: "button", textContent: "Stack", ariaLabel: `Stack of rank ${rank}` });
  button.onclick = () => openRank(rank);
  line.cells[8].append(button);
  return line;
}

function fillRow(line, row) {
  line.className = row.severity ?? "";
  const word = line.cells[1].firstChild;
  const how = row.severity === "stuck" && row.state !== "waiting" ? "stuck" : row.state;  // the word "running" would be misleading
  word.className = `state ${how}`;
  put(word, how);
  line.cells[2].classList.toggle("epochs", inEpochs(row));
  put(line.cells[2], inEpochs(row) ? `epoch ${row.epoch}` : row.step == null ? "" : String(row.step));
  const broken = typeof row.loss === "string";
  put(line.cells[3], row.loss == null ? "" : broken ? row.loss : row.loss.toPrecision(4));
  line.cells[3].classList.toggle("nan", broken);
  put(line.cells[5], row.alive ? `${row.phase}, ${duration(row.since)}` : row.doing);
  line.cells[5].title = row.doing;
  put(line.cells[6], row.rss ? bytes(row.rss) : "");
  put(line.cells[7], row.cpu == null ? "" : `${Math.round(row.cpu * 100)} %`);
  line.cells[8].firstChild.hidden = row.state === "missing";  // there is no process
}

function drawRankMap(now, many) {
  $("rank-map").hidden = !many;
  if (many && changed("map", [now.name, now.ranks.map((row) => [row.rank, row.severity, row.state])])) {
    $("rank-map").replaceChildren(...now.ranks.map((row) => chip(row.rank)));
  }
}

const fetchTimelines = oneAtATime(async () => {
  const canvas = document.querySelector("#ranks canvas");
  if (!canvas || !chosen) return;
  const run = chosen;
  const buckets = Math.max(20, Math.min(1000, Math.floor(canvas.clientWidth / 3)));
  try {
    const found = await ask("api/timelines", { run, seconds, buckets });
    if (run === chosen) { timelines = found; drawTimelines(); }
  } catch (error) { if (error.status !== 404) throw error; }  // 404: the run was deleted
}, 400);

function drawTimelines() {
  if (!timelines) return;
  const kinds = timelines.kinds, colors = kinds.map(color);
  const length = timelines.end - timelines.begin;
  $("timeline-begin").textContent = clock(timelines.begin);
  $("timeline-end").textContent = state().live ? `now (${duration(length)})` : clock(timelines.end);
  for (const line of $("ranks").tBodies[0].rows) {
    const shares = timelines.timelines[line.dataset.rank];
    const canvas = line.cells[4].firstChild;
    if (!shares) continue;
    const scale = window.devicePixelRatio || 1;
    const width = canvas.width = Math.round(canvas.clientWidth * scale);
    const height = canvas.height = Math.round(canvas.clientHeight * scale);
    const brush = canvas.getContext("2d"), count = shares.length / kinds.length;
    for (let bucket = 0; bucket < count; bucket++) {
      const left = Math.floor(bucket * width / count), right = Math.floor((bucket + 1) * width / count);
      let top = height;
      for (let kind = 0; kind < kinds.length; kind++) {
        const share = parseInt(shares[bucket * kinds.length + kind], 36) / 35 * height;
        brush.fillStyle = colors[kind];
        brush.fillRect(left, top - share, right - left, share);
        top -= share;
      }
    }
    canvas.ariaLabel = `rank ${line.dataset.rank}: ${summary(shares, kinds)}`;
  }
}

function summary(shares, kinds) {
  const sums = kinds.map((_, kind) => { let sum = 0; for (let i = kind; i < shares.length; i += kinds.length) sum += parseInt(shares[i], 36); return sum; });
  const whole = sums.reduce((a, b) => a + b, 0) || 1;
  return kinds.map((kind, i) => [KINDS[kind], sums[i] / whole]).filter(([, share]) => share >= 0.01)
    .map(([name, share]) => `${name} ${Math.round(share * 100)} %`).join(", ");
}

function showTip(event, rank) {
  const shares = timelines?.timelines[rank];
  if (!shares) return;
  const size = timelines.kinds.length, count = shares.length / size;
  const bucket = Math.min(count - 1, Math.floor(event.offsetX / event.target.clientWidth * count));
  const here = shares.slice(bucket * size, (bucket + 1) * size);
  const tip = $("tip");
  tip.textContent = `rank ${rank} at ${clock(timelines.begin + (bucket + 0.5) / count * (timelines.end - timelines.begin))}\n${summary(here, timelines.kinds).replaceAll(", ", "\n") || "not running"}`;
  tip.hidden = false;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${event.clientY + 14}px`;
}

// -- the stack of a rank -------------------------------------------------------------------------

let asked = null;

async function openRank(rank) {
  const row = rankRow(rank);
  asked = rank;
  $("dialog-title").textContent = `Rank ${rank}`;
  $("dialog-facts").textContent = row ? [row.state, row.doing, row.pid && `pid ${row.pid} on ${row.host}`,
    row.batch_size && `batch size ${row.batch_size}`, row.samples && `${row.samples} samples`].filter(Boolean).join(" · ") : "";
  $("stack").replaceChildren(h("p", { className: "quiet", textContent: "Requesting the stack…" }));
  if (!$("rank-dialog").open) $("rank-dialog").showModal();
  let shown;
  try {
    const found = await ask("api/stack", { run: chosen, rank }, "POST");
    shown = [h("p", { className: "quiet" }, ...withCode(found.note || "Innermost call first")),
      ...found.threads.map((thread) => {
        const list = h("ol", {}, ...thread.frames.map((frame) => h("li", { className: frame.is_user_code ? "user-code" : "", title: frame.file,
          textContent: `${frame.short}:${frame.line}  ${frame.function}` })));
        return thread.main ? list : h("details", {}, h("summary", { className: "quiet", textContent: `Thread ${thread.name}` }), list);
      })];
  } catch (error) {
    shown = [h("p", {}, ...withCode(error.message))];
  }
  if (asked === rank) $("stack").replaceChildren(...shown);
}

// -- curves --------------------------------------------------------------------------------------

const panels = new Map();

class Panel {
  constructor(chart) {
    this.chart = chart;
    this.range = null;
    this.points = "";
    this.visible = false;
    this.plot = h("div", { className: "plot" });
    this.log = h("button", { type: "button", textContent: "Log", title: "Logarithmic scale" });
    this.log.setAttribute("aria-pressed", "false");
    this.log.onclick = () => {
      this.log.setAttribute("aria-pressed", String(!this.isLog()));
      this.draw();
    };
    this.bad = h("span", { className: "nan" });
    this.key = h("span", { className: "legend" });
    const about = chart.by_rank ? "by rank" : "";
    this.node = h("figure", { className: "chart" },
      h("figcaption", {}, h("b", { textContent: chart.name }), h("span", { className: "quiet", textContent: about }), this.bad, this.log, this.key), this.plot);
    this.node.dataset.chart = `${chart.name}${chart.by_rank ? " by rank" : ""}`;
    this.observer = new IntersectionObserver(([entry]) => { this.visible = entry.isIntersecting; this.refresh(); }, { rootMargin: "300px" });
    this.observer.observe(this.node);
    this.fetch = oneAtATime(() => this.load(), 700);
  }

  isLog() { return this.log.getAttribute("aria-pressed") === "true"; }

  // Fetch the points if the chart is visible and has new points.
  refresh() {
    const key = { name: this.chart.name, by_rank: this.chart.by_rank };
    const same = (chart) => chart.name === key.name && chart.by_rank === key.by_rank;
    this.runs = [chosen, ...compared].filter((run) => (states.get(run)?.charts ?? []).some(same));
    const counts = this.runs.map((run) => states.get(run).charts.find(same));
    const bad = counts.reduce((sum, chart) => sum + chart.bad, 0);
    this.bad.textContent = bad ? `${bad} non-finite ${bad === 1 ? "value" : "values"}` : "";
    const points = JSON.stringify([this.runs, compared, counts.map((chart) => chart.points), this.range]);
    if (this.visible && points !== this.points) { this.points = points; this.fetch(); }
  }

  async load() {
    const { name, by_rank } = this.chart;
    const [from, to] = this.range ?? [null, null];
    const found = await Promise.all(this.runs.map((run) =>
      ask("api/chart", { run, name, by_rank: by_rank ? 1 : 0, from, to }).catch((error) => {
        if (error.status === 404) return { run, curves: [] };  // the run was deleted
        throw error;
      })));
    this.found = found;
    this.draw();
  }

  draw() {
    if (!this.found || !window.Plotly) return;
    const several = compared.length > 0;
    const severities = new Map((state().ranks ?? []).map((row) => [row.rank, row.severity]));
    const metrics = [...new Set(this.found.flatMap(({ curves }) => curves.map((curve) => curve.metric)))];
    const traces = [], keys = [];
    for (const { run, curves } of this.found) {
      const many = curves.length > 8;
      curves.forEach((curve, index) => {
        const affected = this.chart.by_rank && !several && ["stuck", "failed", "wrong", "slow"].includes(severities.get(curve.rank));
        const line = several ? runColor(run) : affected && many ? color("bad") : many ? color("compute") : PALETTE[index % PALETTE.length];
        const rank = curve.rank == null ? null : `rank ${curve.rank}${curve.attempt ? `, attempt ${curve.attempt}` : ""}`;
        const metric = metrics.length > 1 ? curve.metric : null;
        const label = [several || !(rank || metric) ? run : null, metric, rank].filter(Boolean).join(", ");
        if (several && index === 0) keys.push(h("span", {}, Object.assign(h("i"), { style: `background:${line}` }), run));
        if (!several && !many && (rank || metric)) keys.push(h("span", {}, Object.assign(h("i"), { style: `background:${line}` }), rank ?? metric));
        // In a comparison, colors tell runs apart. Evaluations of the same metric are dashed.
        const dash = several && metrics.indexOf(curve.metric) > 0 ? "dash" : "solid";
        traces.push({ x: curve.x, y: curve.y, name: label, type: "scatter", mode: curve.x.length < 30 ? "lines+markers" : "lines",
          marker: { size: 4 }, line: { color: line, dash, width: affected ? 2.5 : many ? 1 : 1.8 }, opacity: many && !affected ? 0.45 : 1,
          showlegend: false, hovertemplate: `%{y:.5g}<extra>${plain(label)}</extra>` });
        if (curve.marks.length) {
          traces.push({ x: curve.marks.map((m) => m[0]), y: curve.marks.map((m) => m[1] ?? 0), name: `${label} non-finite`, type: "scatter", mode: "markers",
            marker: { symbol: "x", size: 9, color: color("bad"), line: { width: 1, color: color("card") } }, showlegend: false,
            text: curve.marks.map((m) => m[2]), hovertemplate: `%{text} at %{x}<extra>${plain(label)}</extra>` });
        }
      });
    }
    if (several && metrics.length > 1) keys.push(h("span", { textContent: metrics.map((name, index) => `${name} ${index ? "dashed" : "solid"}`).join(", ") }));
    this.key.replaceChildren(...keys);
    const ends = traces.flatMap(({ x }) => [x[0], x.at(-1)]);
    const few = Math.max(...ends) - Math.min(...ends) < 8;  // avoids a tick at epoch 1.5
    const heights = traces.flatMap(({ y }) => y);
    const low = heights.reduce((a, b) => Math.min(a, b), Infinity), high = heights.reduce((a, b) => Math.max(a, b), -Infinity);
    // By default, plotly adds a margin of 1 around a constant, so a learning rate of 0.001 would look like 0.
    const margin = Math.abs(low) / 10 || 0.5, level = low === high && !this.isLog();
    const axis = { gridcolor: color("line"), zeroline: false, color: color("quiet"), tickfont: { size: 11 },
      exponentformat: high < 1 ? "e" : "SI" };  // 5e-4 instead of 500μ
    const title = (text) => ({ text: plain(text.length > 30 ? `${text.slice(0, 29)}…` : text), standoff: 8, font: { size: 11 } });
    const layout = { margin: { l: 30, r: 8, t: 6, b: 42 }, paper_bgcolor: "transparent", plot_bgcolor: "transparent",
      font: { color: color("text"), family: "system-ui, sans-serif", size: 11 }, separators: ".", hovermode: traces.length > 8 ? "closest" : "x", uirevision: chosen,
      xaxis: { ...axis, title: title(this.chart.axis), ...(few && { dtick: 1 }), ...(this.range && { range: this.range }) }, yaxis: { ...axis, title: title(this.chart.name), type: this.isLog() ? "log" : "linear", automargin: true, ...(level && { range: [low - margin, low + margin] }) } };
    window.Plotly.react(this.plot, traces, layout, { displayModeBar: false, responsive: true, doubleClick: "reset+autosize" });
    if (!this.listens) {
      this.listens = true;
      this.plot.on("plotly_relayout", () => this.zoom());
    }
    this.node.dataset.points = traces.reduce((sum, trace) => sum + trace.x.length, 0);
    this.node.dataset.marks = traces.filter((trace) => trace.mode === "markers").reduce((sum, trace) => sum + trace.x.length, 0);
    this.node.dataset.runs = this.found.filter((run) => run.curves.length).length;
    this.node.dataset.total = this.found.reduce((sum, run) => sum + run.curves.reduce((part, curve) => part + curve.points, 0), 0);
  }

  // If only a part of the axis is visible, the server sends more points for that part.
  zoom() {
    const { autorange, range } = this.plot.layout.xaxis;
    this.range = autorange ? null : range.map(Number);
    this.refresh();
  }

  remove() {
    this.observer.disconnect();
    if (this.listens) window.Plotly.purge(this.plot);
    this.node.remove();
  }
}

// Escape a label. plotly interprets some HTML elements in labels, and the name of a run may contain them.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll("%{", "% {");
const runColor = (run) => PALETTE[[chosen, ...compared].indexOf(run) % PALETTE.length];

function drawCharts() {
  const wanted = new Map();
  const constants = new Map();  // a metric whose value never changed is shown as text
  for (const run of [chosen, ...compared]) {
    for (const chart of states.get(run)?.charts ?? []) {
      const key = JSON.stringify([chart.name, chart.by_rank]);
      if (chart.constant) constants.set(key, [...(constants.get(key) ?? []), [run, chart]]);
      else if (!wanted.has(key)) wanted.set(key, chart);
    }
  }
  for (const [key, found] of constants) if (wanted.has(key)) constants.delete(key);
  drawConstants([...constants.values()]);
  $("charts-section").hidden = !wanted.size && !constants.size;
  for (const [key, panel] of panels) if (!wanted.has(key)) { panel.remove(); panels.delete(key); }
  let place = 0;
  for (const [key, chart] of wanted) {
    if (!panels.has(key)) panels.set(key, new Panel(chart));
    const panel = panels.get(key);
    if ($("charts").children[place] !== panel.node) $("charts").insertBefore(panel.node, $("charts").children[place] ?? null);
    place++;
    panel.refresh();
  }
  const loading = state().loading;
  $("loading").textContent = loading == null ? "" : `reading metrics: ${Math.floor(loading * 100)} %`;
}

function drawConstants(found) {
  const number = (value) => String(Number(value.toPrecision(4)));
  const describe = (chart) => Object.entries(chart.constant).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const texts = found.flatMap((same) => {
    const values = [...new Set(same.map(([, chart]) => describe(chart)))];
    const everywhere = values.length === 1 && same.length === 1 + compared.length;
    return everywhere ? values : same.map(([run, chart]) => `${describe(chart)} (${run})`);
  });
  put($("constants"), texts.length ? `Constant: ${texts.join(", ")}` : "");
}

// -- logs ----------------------------------------------------------------------------------------

// The log that the page shows. `rank` is its rank, and `start` and `end` are the positions of the bytes
// that were read. `found` is true if the log shows search results, and `picked` is true if the user
// selected the log. Responses for a different log are ignored.
let log = {};

function drawLogChoice(now) {
  const ranks = (now.ranks ?? []).map((row) => row.rank);
  $("logs-section").hidden = !ranks.length;
  if (changed("log ranks", [now.name, ranks])) {
    $("log-rank").replaceChildren(...ranks.map((rank) => h("option", { value: rank, textContent: `rank ${rank}` })));
    showLog(ranks[0]);
  }
  const affected = now.findings?.[0]?.ranks?.[0];  // show the log of this rank unless the user selected a different log
  if (!log.picked && !log.found && affected !== log.rank && ranks.includes(affected)) showLog(affected);
}

function pickLog(rank) {
  $("log-search").value = "";
  showLog(rank, true);
}

function showLog(rank, picked = log.picked) {
  if (rank == null) return;
  log = { rank, picked };
  $("log-rank").value = rank;
  $("log").replaceChildren();
  readLog();
}

const readLog = oneAtATime(async () => {
  const current = log, { rank } = log;
  if (rank == null || log.found) return;
  try {
    const piece = await ask("api/log", { run: chosen, rank, since: log.end });
    if (current !== log || log.found) return;
    if (piece.restarted) { $("log").replaceChildren(); log.start = piece.start; }
    log.end = piece.end;
    addLines(piece);
    $("log").hidden = Boolean(piece.missing);
    $("log-note").textContent = piece.missing ? `Rank ${rank} has no log in this run` : log.end ? "" : "The log is empty";
    if (piece.lines.length && piece.end < piece.size && !piece.restarted) readLog();  // there is more to read
  } catch (error) {
    if (error.status !== 404) throw error;
    if (current === log) $("log-note").textContent = "This run was deleted";
  }
}, 300);

function followLog() { if ($("log-follow").checked && !log.found) readLog(); }

function addLines(piece) {
  const box = $("log");
  box.querySelector(".rest")?.remove();
  box.append(...piece.lines.map((line) => h("div", { textContent: line || "\u00a0" })));
  if (piece.rest) box.append(h("div", { className: "rest quiet", textContent: piece.rest }));
  while (box.children.length > MOST_LINES) { box.firstChild.remove(); log.start = null; }
  if (log.start && !box.querySelector(".older")) {
    const older = h("button", { type: "button", className: "older", textContent: "Show older lines" });
    older.onclick = readOlder;
    box.prepend(older);
  }
  if ($("log-follow").checked) box.scrollTop = box.scrollHeight;
}

async function readOlder() {
  const current = log;
  const piece = await ask("api/log", { run: chosen, rank: log.rank, before: log.start });
  if (current !== log || log.found) return;
  const box = $("log"), below = box.scrollHeight - box.scrollTop;
  $("log-follow").checked = false;
  box.querySelector(".older").after(...piece.lines.map((line) => h("div", { textContent: line || "\u00a0" })));
  log.start = piece.start;
  if (!piece.start) box.querySelector(".older").remove();
  box.scrollTop = box.scrollHeight - below;
}

const searchLog = oneAtATime(async () => {
  const text = $("log-search").value;
  if (!text) { showLog(log.rank); return; }
  log.found = true;
  $("log").hidden = false;
  const current = log, rank = $("log-everywhere").checked ? "all" : log.rank;
  const found = await ask("api/search", { run: chosen, rank, q: text });
  if (current !== log || text !== $("log-search").value) return;
  const total = Object.values(found).reduce((sum, one) => sum + one.total, 0);
  const cut = Object.values(found).some((one) => !one.whole);
  $("log-note").textContent = `${total} line${total === 1 ? "" : "s"}${cut ? ", in the last 64 MB" : ""}`;
  $("log").replaceChildren(...Object.entries(found).flatMap(([rank, one]) => one.found.map((line) => {
    const from = h("button", { type: "button", className: "from", textContent: `rank ${rank}`, title: "Show this log" });
    from.onclick = () => pickLog(Number(rank));
    return h("div", {}, from, ...marked(line, text));
  })));
});

function marked(line, text) {
  const found = [], low = line.toLowerCase(), wanted = text.toLowerCase();
  let at = 0;
  for (let next; (next = low.indexOf(wanted, at)) >= 0; at = next + wanted.length) {
    found.push(line.slice(at, next), h("mark", { textContent: line.slice(next, next + wanted.length) }));
  }
  return [...found, line.slice(at)];
}

// -- start ----------------------------------------------------------------------------------------

function begin() {
  const given = new URLSearchParams(location.search);
  if (given.has("run") && !location.hash) location.hash = new URLSearchParams({ run: given.get("run") });
  if (given.has("token") || given.has("code")) history.replaceState(null, "", `/${location.hash}`);  // the token is stored in a cookie
  $("window").append(...WINDOWS.map(([name, value]) => {
    const input = h("input", { type: "radio", name: "window", checked: value === seconds });
    input.onchange = () => { seconds = value; fetchTimelines(); };
    return h("label", {}, input, h("span", { textContent: name }));
  }));
  $("legend").append(...Object.entries(KINDS).map(([kind, name]) =>
    h("li", {}, Object.assign(h("i"), { style: `background:var(--${kind})` }), name)));
  if (matchMedia("(max-width: 800px)").matches) $("runs-box").open = false;
  $("runs-filter").oninput = drawRuns;
  $("all-ranks").onclick = () => { allRanks = !allRanks; drawRanks(state()); drawTimelines(); };
  $("dialog-close").onclick = () => $("rank-dialog").close();
  $("dialog-again").onclick = () => openRank(asked);
  $("dialog-log").onclick = () => { $("rank-dialog").close(); pickLog(asked); $("logs-section").scrollIntoView(); };
  $("log-rank").onchange = () => pickLog(Number($("log-rank").value));
  $("log-search").oninput = searchLog;
  $("log-everywhere").onchange = searchLog;
  $("log-follow").onchange = followLog;
  addEventListener("hashchange", followAddress);
  addEventListener("resize", () => { drawTimelines(); fetchTimelines(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawTimelines(); panels.forEach((panel) => panel.draw()); });
  addEventListener("keydown", (event) => {
    if (event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName)) { event.preventDefault(); $("log-search").focus(); }
  });
  followAddress();
}

begin();
