// Flows: their runs, each drawn as a graph with the state of every step, timings along time, and what can be done by hand.

import { change, get, path } from "./api.js";
import { attempt, badge, card, confirm, count, facts, h, isInUse, moment, name, show, showUnlessInUse, span, svg, table, toast } from "./page.js";

export function flows(kind, id) {
  if (kind === "flow" && id) return flow(id);
  if (kind === "run" && id) return run(id);
  return all();
}

const flowAddress = (slug) => `#/flows/flow/${encodeURIComponent(slug)}`;
const runAddress = (id) => `#/flows/run/${encodeURIComponent(id)}`;

/// A page that asks again every few seconds, and says what kept it from an answer.
function living(title, node, refresh, every = 2) {
  let [seconds, over, busy] = [0, false, false];
  // Beside what is shown, not instead of it: the next answer goes where this one went.
  const trouble = h("p", { class: "why", role: "status" });
  const again = async () => {
    if (busy || over) return;
    busy = true;
    try {
      await refresh(() => over);
      trouble.remove();
    } catch (error) {
      show(trouble, error.message);
      if (!over && !trouble.isConnected) node.firstElementChild.after(trouble);
    }
    busy = false;
  };
  again();
  return { title, node, second: () => { seconds += 1; if (seconds % every === 0 && !document.getElementById("dialog").open) again(); }, leave: () => (over = true), again };
}

function runsTable(runs, none) {
  const rows = runs.map((it) => [
    h("a", { href: runAddress(it.runId), class: "name mono" }, it.runId),
    h("a", { href: flowAddress(it.flow), class: "name" }, it.flow),
    badge(it.status),
    it.key === null ? "–" : name(String(it.key)),
    moment(it.startedAt),
    it.endedAt ? span(new Date(it.endedAt) - new Date(it.startedAt)) : h("span", { class: "soft" }, `${count(it.remainingSteps)} steps left`),
    it.error ? h("bdi", { class: "name" }, it.error) : "",
  ]);
  return table("Runs", [["Run"], ["Flow"], ["State"], ["Key"], ["Started"], ["Took"], ["Error"]], rows, none);
}

function all() {
  const [list, runs, workers, queues] = [0, 0, 0, 0].map(() => h("div", {}));
  const node = h("div", { class: "stack" }, h("h1", {}, "Flows"), card("Flows", list), card("Newest runs", runs), h("div", { class: "grid" }, card("Workers", workers), card("Queues", queues)));
  return living("Flows", node, async (over) => {
    const [flows, newest, whoWorks, waiting] = await Promise.all([get("/api/flows"), get("/api/runs?limit=20"), get("/api/flow-workers"), get("/api/flow-queues")]);
    if (over()) return;
    const states = ["waiting", "started", "completed", "failed", "cancelled"];
    showUnlessInUse(list, table("Flows", [["Flow"], ["Steps", "number"], ["Queues"], ...states.map((state) => [state, "number"])], flows.map((it) => [h("a", { href: flowAddress(it.slug), class: "name" }, it.slug), count(it.stepCount), it.queues.join(", "), ...states.map((state) => count(it.runs[state] ?? 0))]), "No flow is defined."));
    showUnlessInUse(runs, runsTable(newest, "No run yet."));
    showUnlessInUse(workers, table("Workers", [["Worker"], ["State"], ["Polls"], ["In hand", "number"], ["Last heard of"]], whoWorks.map((it) => [name(it.name), it.alive ? badge("alive", "good") : badge(it.stoppedAt ? "stopped" : "silent", it.stoppedAt ? "" : "bad"), it.queues.join(", "), count(it.inHand), moment(it.lastHeartbeatAt)]), "No worker has registered."));
    showUnlessInUse(queues, table("Queues", [["Queue"], ["Flows"], ["Waiting", "number"], ["Started", "number"]], waiting.map((it) => [name(it.queue), it.flows.join(", "), count(it.waiting), count(it.started)]), "None."));
  });
}

/// Where each step is drawn: its column by the longest way to it, its row by those before it.
function layout(steps) {
  const bySlug = new Map(steps.map((step) => [step.slug, step]));
  const columns = new Map();
  const column = (slug, seen = new Set()) => {
    if (columns.has(slug)) return columns.get(slug);
    if (seen.has(slug)) return 0;
    const before = (bySlug.get(slug)?.dependsOn ?? []).filter((other) => bySlug.has(other));
    const place = before.length ? 1 + Math.max(...before.map((other) => column(other, new Set([...seen, slug])))) : 0;
    columns.set(slug, place);
    return place;
  };
  steps.forEach((step) => column(step.slug));
  // An edge that passes a column has a place of its own there, so that it does not pass under a step.
  const lanes = [];
  const put = (at, item) => (lanes[at] ??= []).push(item);
  const ways = new Map();
  for (const step of steps) {
    put(columns.get(step.slug), { slug: step.slug, before: step.dependsOn ?? [] });
    for (const other of (step.dependsOn ?? []).filter((it) => bySlug.has(it))) {
      const way = [];
      for (let at = columns.get(other) + 1; at < columns.get(step.slug); at += 1) {
        const key = `${other}\u0000${step.slug}\u0000${at}`;
        put(at, { slug: key, before: [way.at(-1) ?? other] });
        way.push(key);
      }
      ways.set(`${other}\u0000${step.slug}`, way);
    }
  }
  const places = new Map();
  lanes.forEach((lane, at) => {
    const height = (item) => {
      const before = item.before.map((other) => places.get(other)?.row).filter((row) => row !== undefined);
      return before.length ? before.reduce((one, other) => one + other, 0) / before.length : 0;
    };
    if (at > 0) lane.sort((one, other) => height(one) - height(other));
    lane.forEach((item, row) => places.set(item.slug, { column: at, row: row - (lane.length - 1) / 2 }));
  });
  return { places, ways, columns: lanes.length, rows: Math.max(...lanes.map((lane) => lane.length), 1) };
}

const [BOX, TALL, GAP, SPACE] = [172, 52, 64, 20];

/// The graph of a flow, or of a run with the states of its steps.
function graph(steps, wordsOf) {
  const { places, ways, columns, rows } = layout(steps);
  const [width, height] = [columns * (BOX + GAP) - GAP + 8, rows * (TALL + SPACE) - SPACE + 8];
  const at = (slug) => {
    const { column, row } = places.get(slug);
    return { x: 4 + column * (BOX + GAP), y: height / 2 + row * (TALL + SPACE) - TALL / 2 };
  };
  const edges = steps.flatMap((step) =>
    (step.dependsOn ?? []).filter((other) => places.has(other)).map((other) => {
      const start = at(other);
      let text = `M${start.x + BOX} ${start.y + TALL / 2}`;
      let [x1, y1] = [start.x + BOX, start.y + TALL / 2];
      for (const next of [...ways.get(`${other}\u0000${step.slug}`), step.slug]) {
        const { x, y } = at(next);
        text += `C${x1 + GAP / 2} ${y1} ${x - GAP / 2} ${y + TALL / 2} ${x} ${y + TALL / 2}`;
        // Straight on through the column, where it only passes.
        if (next !== step.slug) text += `H${x + BOX}`;
        [x1, y1] = [x + BOX, y + TALL / 2];
      }
      return svg("path", { class: "edge", d: text });
    }),
  );
  const boxes = steps.map((step) => {
    const { x, y } = at(step.slug);
    const shown = step.slug.length > 20 ? `${step.slug.slice(0, 19)}…` : step.slug;
    return svg("g", { class: "step", "data-state": step.status ?? "created", "data-step": step.slug }, svg("rect", { x, y, width: BOX, height: TALL, rx: 10 }), svg("text", { x: x + 12, y: y + 22 }, shown), svg("text", { class: "below", x: x + 12, y: y + 40 }, wordsOf(step)));
  });
  const words = steps.map((step) => `${step.slug}${step.status ? `: ${step.status}` : ""}${step.dependsOn?.length ? `, after ${step.dependsOn.join(" and ")}` : ""}`).join("; ");
  return h("div", { class: "dag", tabindex: "0", role: "region", "aria-label": "The graph of the steps" }, svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": words }, edges, boxes));
}

function flow(slug) {
  const body = h("div", { class: "stack" });
  const start = h("button", { type: "button", class: "main", onclick: startRun }, "Start a run");
  const node = h("div", { class: "stack" }, h("div", { class: "between" }, h("h1", {}, h("bdi", {}, slug)), start), body);

  async function startRun() {
    const answer = await confirm({ title: `Start ${slug}`, text: "Its input, as JSON.", action: "Start", field: "Input", long: true });
    if (!answer) return;
    let input;
    try {
      input = JSON.parse(answer.text || "{}");
    } catch {
      return toast("The input is not JSON.", true);
    }
    const done = await attempt("Started", () => change("POST", `/api/flows${path(slug)}/runs`, { input }));
    if (done?.runId) location.hash = runAddress(done.runId);
  }

  return living(slug, node, async (over) => {
    const [it, runs] = await Promise.all([get(`/api/flows${path(slug)}`), get(`/api/runs?flow=${encodeURIComponent(slug)}&limit=30`)]);
    if (over()) return;
    showUnlessInUse(
      body,
      card("Steps", graph(it.steps, (step) => (step.manual ? "by hand" : `${step.stepType}, ${step.queue}`))),
      h(
        "div",
        { class: "grid" },
        card("How it runs", facts([["Queues", it.queues.join(", ") || "–"], ["Attempts", `${it.maxAttempts}, ${2 * it.baseDelay} s apart at first`], ["Time for a step", `${it.timeout} s`], it.keyPath && ["One run at a time per", it.keyPath.join(".")], ["Defined", moment(it.createdAt)]])),
        card("Runs", facts(Object.entries(it.runs).map(([state, number]) => [badge(state), count(number)]))),
      ),
      card("Newest runs", runsTable(runs, "No run yet.")),
    );
  });
}

/// What is said of a value that a look leaves out because it is large; a null has a few bytes itself.
function cut(value, bytes) {
  return value === null && bytes > 100 ? `${count(bytes)} bytes, too large to be shown` : "";
}

function run(id) {
  const base = `/api/runs${path(id)}`;
  const [status, picture, timings, steps, tasks, texts] = [0, 0, 0, 0, 0, 0].map(() => h("div", {}));
  const cancel = h("button", { type: "button", class: "danger", onclick: act("Cancel the run", "What is under way ends; nothing more of it begins.", "Cancel run", ({ text }) => change("POST", `${base}/cancel`, text ? { reason: text } : {}), { field: "Why", danger: true }) }, "Cancel run");
  const retry = h("button", { type: "button", onclick: act("Retry the run", "The steps that failed are tried again.", "Retry", () => change("POST", `${base}/retry`)) }, "Retry");
  const node = h(
    "div",
    { class: "stack" },
    h("section", { class: "card stack" }, h("div", { class: "between" }, h("h1", { class: "mono" }, h("bdi", {}, id)), h("div", { class: "row" }, retry, cancel)), status),
    card("Steps", picture),
    card("Along time", timings),
    card("Each step", steps),
    card("Tasks", tasks),
    card("Input and output", texts),
  );

  function act(title, text, action, request, options = {}) {
    return async () => {
      const answer = await confirm({ title, text, action, ...options });
      if (!answer) return;
      await attempt(`${title}: done`, () => request(answer));
      // What was pressed may not be there any more, and while it has the focus it is not drawn anew.
      if (node.contains(document.activeElement)) document.getElementById("view").focus();
      page.again();
    };
  }

  /// Ends a step that waits for a person.
  function byHand(step) {
    const at = `${base}/steps${path(step.slug)}`;
    const complete = act(`Complete ${step.slug}`, "Its output, as JSON.", "Complete", ({ text }) => change("POST", `${at}/complete`, { output: JSON.parse(text || "null") }), { field: "Output", long: true });
    const fail = act(`Fail ${step.slug}`, "The run fails with it, or goes on, as the flow says.", "Fail", ({ text }) => change("POST", `${at}/fail`, { error: text || "failed by hand" }), { field: "Error", danger: true });
    return h("span", { class: "row" }, h("button", { type: "button", class: "small", onclick: complete }, "Complete"), h("button", { type: "button", class: "small danger", onclick: fail }, "Fail"));
  }

  const page = living(id, node, async (over) => {
    const [it, list] = await Promise.all([get(base), get(`${base}/tasks?limit=200`)]);
    if (over()) return;
    const isOver = ["completed", "failed", "cancelled"].includes(it.status);
    cancel.disabled = isOver;
    retry.disabled = !["failed", "cancelled"].includes(it.status);
    show(status, facts([["Flow", h("a", { href: flowAddress(it.flow) }, it.flow)], ["State", badge(it.status)], it.key !== null && ["Key", h("bdi", {}, String(it.key))], ["Started", moment(it.startedAt)], ["Took", span((it.endedAt ? new Date(it.endedAt) : new Date()) - new Date(it.startedAt))], it.error && ["Error", h("bdi", {}, it.error)]]));
    showUnlessInUse(picture, graph(it.steps, words));
    show(timings, along(it));
    showUnfolded(
      steps,
      table(
        "Steps",
        [["Step"], ["State"], ["Queue"], ["Tasks"], ["Attempts", "number"], ["Took", "number"], ["Input"], ["Output or error", "wide"], [""]],
        it.steps.map((step) => [
          name(step.slug),
          badge(step.status),
          step.manual ? "by hand" : (step.queue ?? "–"),
          Object.entries(step.tasks).filter(([, number]) => number).map(([state, number]) => `${number} ${state}`).join(", ") || "–",
          attemptsOf(step, list),
          step.startedAt ? span((step.endedAt ? new Date(step.endedAt) : new Date()) - new Date(step.startedAt)) : "–",
          step.startedAt ? folded(`${step.slug} input`, inputOf(step, it)) : "–",
          step.error ? h("bdi", {}, step.error) : step.skipReason ? `skipped: ${step.skipReason}` : step.output === null ? cut(step.output, step.outputBytes) : folded(`${step.slug} output`, step.output),
          step.manual && step.status === "started" ? byHand(step) : "",
        ]),
        undefined,
        { stacked: true },
      ),
    );
    showUnlessInUse(tasks, table("Tasks", [["Step"], ["Number", "number"], ["State"], ["Attempts", "number"], ["Worker"], ["Queued"], ["Took", "number"], ["Error", "wide"]], list.map((task) => [name(task.step), String(task.index), badge(task.status), String(task.attempts), task.worker ? name(task.worker) : "–", task.queuedAt ? moment(task.queuedAt) : "–", task.startedAt && task.endedAt ? span(new Date(task.endedAt) - new Date(task.startedAt)) : "–", task.error ? h("bdi", {}, task.error) : ""]), "No task yet."));
    showUnlessInUse(texts, h("div", { class: "grid" }, [["Input", it.input, it.inputBytes], ["Output", it.output, it.outputBytes]].map(([title, value, bytes]) => h("div", {}, h("h3", {}, title), h("pre", { tabindex: "0" }, value === null || value === undefined ? cut(value, bytes) || "–" : JSON.stringify(value, null, 2))))));
  });
  return page;
}

function folded(key, value) {
  return h("details", { "data-key": key }, h("summary", {}, "Show"), h("pre", { tabindex: "0" }, JSON.stringify(value, null, 2)));
}

/// Draws anew, and what somebody has unfolded stays so.
function showUnfolded(element, ...children) {
  if (isInUse(element)) return;
  const unfolded = new Set([...element.querySelectorAll("details[open]")].map((it) => it.dataset.key));
  show(element, ...children);
  for (const it of element.querySelectorAll("details")) it.open = unfolded.has(it.dataset.key);
}

/// What a step gets: the input of the run, or, behind others, what those gave. Large values are left out of a look, and so here.
function inputOf(step, { steps, input }) {
  if (!step.dependsOn?.length) return input;
  const given = new Map(steps.map((other) => [other.slug, other.output]));
  return Object.fromEntries(step.dependsOn.map((other) => [other, given.get(other) ?? null]));
}

/// Of a map, those of the task that needed the most.
function attemptsOf(step, tasks) {
  const all = tasks.filter((task) => task.step === step.slug).map((task) => task.attempts);
  return all.length ? count(Math.max(...all)) : "–";
}

function words(step) {
  const done = step.tasks.completed ?? 0;
  const many = step.initialTasks > 1 ? ` ${done} of ${step.initialTasks}` : "";
  return `${step.status}${many}${step.manual ? ", by hand" : step.queue ? `, ${step.queue}` : ""}`;
}

/// A bar for each step along the time of the run.
function along(it) {
  const started = new Date(it.startedAt).getTime();
  const ended = it.endedAt ? new Date(it.endedAt).getTime() : Date.now();
  const whole = Math.max(ended - started, 1);
  const lanes = it.steps.filter((step) => step.startedAt).map((step) => {
    const from = new Date(step.startedAt).getTime();
    const to = step.endedAt ? new Date(step.endedAt).getTime() : ended;
    const bar = h("span", { class: step.status === "failed" ? "bar failed" : "bar", style: { left: `${((from - started) / whole) * 100}%`, width: `${((to - from) / whole) * 100}%` } });
    return h("div", { class: "lane", "data-step": step.slug }, name(step.slug), h("span", { class: "track", "aria-hidden": "true" }, bar), h("span", { class: "number" }, span(to - from)));
  });
  return lanes.length ? h("div", { class: "gantt" }, lanes) : h("p", { class: "soft" }, "No step has started.");
}
