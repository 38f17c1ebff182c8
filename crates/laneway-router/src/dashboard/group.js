// One group: why it waits, what is at its head, what is behind it, what went wrong, and what can be done about it. And the search that leads there.

import { change, get, history, oneAtATime, path } from "./api.js";
import { overTime } from "./charts.js";
import { isListed } from "./dead_letters.js";
import { attempt, badge, card, confirm, count, facts, groupAddress, groupLink, h, micros, moment, name, show, showUnlessInUse, span, table } from "./page.js";

const DEAD_LETTERS = 200;

export function group(pool = "", key = "") {
  if (!pool || !key) return { title: "No group", node: h("p", {}, "The address names no group.") };
  const base = `/api/groups${path(pool, key)}`;
  const title = h("bdi", {}, cut(key));
  const status = h("div", {});
  const body = h("div", { class: "stack" });
  const dead = h("div", {});
  const depth = overTime("Messages in the pool", "each second", "group-depth");
  const latency = overTime("Latency of attempts", "mean and longest of each second", "group-latency", { format: micros, gaps: true });
  let state = null;
  let over = false;

  const act = (title, text, action, request, options = {}) => async () => {
    const answer = await confirm({ title, text, action, ...options });
    if (!answer) return;
    const done = await attempt(`${title}: done`, () => request(answer));
    if (done?.state) draw(done);
    refresh();
  };
  const buttons = {
    park: h("button", { type: "button", onclick: act("Park the group", `${cut(key)} stops in front of its next message; what is with its target ends first.`, "Park", ({ text }) => change("POST", `${base}/park`, text ? { why: text } : {}), { field: "Why (for whoever looks next)" }) }, "Park"),
    resume: h("button", { type: "button", onclick: act("Resume the group", `${cut(key)} goes on from its head at once, also if it waits for another attempt.`, "Resume", () => change("POST", `${base}/resume`)) }, "Resume"),
    skip: h("button", { type: "button", class: "danger", onclick: act("Skip the head", `The next message of ${cut(key)} is given up: it goes to the dead letters, and the one behind it runs.`, "Skip", () => change("POST", `${base}/skip`), { danger: true }) }, "Skip head"),
  };

  function draw(view) {
    state = view;
    // The address may have only the beginning of a long name.
    show(title, cut(view.group));
    const start = predicted(view);
    show(
      status,
      h("p", { class: "row" }, badge(view.state), h("span", { class: "soft" }, `${count(view.depth)} in the pool, ${count(view.waiting)} waiting, ${count(view.inFlight)} with their target`)),
      h("p", { class: "why", id: "why" }, sentence(view)),
      h("p", { class: "soft", id: "predicted" }, start),
    );
    buttons.park.disabled = ["parked", "idle", "inQueue"].includes(view.state);
    buttons.resume.disabled = !["parked", "retrying", "putAside"].includes(view.state);
    buttons.skip.disabled = view.depth === 0 || view.state === "running";
    const head = view.head
      ? facts([
          ["Message", h("bdi", { class: "mono", id: "head-id" }, view.head.messageId)],
          ["Attempts", `${view.head.attempts} of ${view.head.attemptsMax}${view.state === "running" ? ", this one under way" : ""}`],
          ["Target", h("bdi", { class: "mono" }, view.head.target || "simulated")],
          ["Priority", view.head.priority.toLowerCase()],
          ["When it fails", view.head.dispatchMode === "BLOCK_ON_ERROR" ? "the group stops" : "the next one runs"],
          view.head.sequence !== null && ["Sequence", String(view.head.sequence)],
        ])
      : h("p", { class: "soft" }, "Nothing of this group is in the pool.");
    const behind = view.behind.map((message) => [h("bdi", { class: "name mono" }, message.messageId), String(message.sequence), message.predictedStartMillis === null ? "–" : `in ${span(message.predictedStartMillis)}`]);
    const unlisted = view.depth - behind.length - (view.head ? 1 : 0);
    const failures = view.failures.map((failure) => [moment(failure.at), h("bdi", { class: "name mono" }, failure.messageId), String(failure.attempt), h("bdi", {}, failure.reason)]);
    const queues = view.queues.map((queue) => [h("bdi", {}, queue.queue), badge(queue.state), count(queue.depth), count(queue.leased), queue.delayedForMillis === null ? "–" : span(queue.delayedForMillis)]);
    showUnlessInUse(
      body,
      h("div", { class: "grid" }, card("Head", head), card("What went wrong last", table("Failed attempts", [["When"], ["Message"], ["Attempt", "number"], ["What happened", "wide"]], failures, "No attempt has failed while messages of this group were here.", { stacked: true }))),
      h("div", { class: "grid" }, card("Behind it", h("div", { class: "tall" }, table("Messages behind the head", [["Message"], ["Sequence", "number"], ["Expected to start", "number"]], behind, "Nothing waits behind the head.")), unlisted > 0 && h("p", { class: "small soft", id: "unlisted" }, `and ${count(unlisted)} more`)), card("In the queues", table("In the queues", [["Queue"], ["State"], ["Messages", "number"], ["Leased", "number"], ["Not before", "number"]], queues, "No queue has messages of it."))),
    );
    drawHistory();
  }

  function drawHistory() {
    const short = state?.short ?? key;
    const row = [...history.groups.values()].find((row) => row.pool === pool && row.group === short);
    const times = row ? history.times : [];
    depth.draw({ times, series: row ? [{ name: "messages", color: "var(--c0)", values: row.depth }] : [] });
    latency.draw({ times, least: 100, series: row ? [{ name: "longest", color: "var(--c2)", values: row.maxMicros }, { name: "mean", color: "var(--c0)", values: row.meanMicros }] : [] });
  }

  const refresh = oneAtATime(async () => {
    if (over) return;
    try {
      const view = await get(base);
      if (!over) draw(view);
    } catch (error) {
      if (!over) show(status, h("p", { class: "why" }, error.message));
    }
  });

  const refreshDead = oneAtATime(async () => {
    if (over) return;
    try {
      const sources = await get("/api/sources");
      const queues = sources.filter(isListed).map((source) => source.name);
      const brokers = sources.filter((source) => !isListed(source)).map((source) => source.name);
      const found = [];
      for (const queue of queues) {
        const letters = await get(`/api/dead-letters?queue=${encodeURIComponent(queue)}&most=${DEAD_LETTERS}`).catch(() => []);
        found.push(...letters.filter((letter) => letter.group === (state?.group ?? key)).map((letter) => ({ queue, ...letter })));
      }
      if (over) return;
      const rows = found.map((letter) => [
        moment(letter.at),
        h("bdi", { class: "name mono" }, letter.id ?? "–"),
        h("bdi", {}, letter.reason),
        h("button", { type: "button", class: "small", onclick: act("Redrive", `${letter.id ?? letter.sequence} becomes a message again, at the end of its group.`, "Redrive", () => change("POST", "/api/dead-letters/redrive", { queue: letter.queue, sequences: [letter.sequence] }).then(redriven)) }, "Redrive"),
      ]);
      showUnlessInUse(dead, table("Dead letters of this group", [["When"], ["Message"], ["Why", "wide"], [""]], rows, queues.length ? "None." : "Cannot be listed."), brokers.length > 0 && h("p", { class: "small soft" }, `Those of ${brokers.join(", ")} cannot be listed: they are in the broker's own dead letters.`));
    } catch {
      // The next second tries again.
    }
  });

  /// The button that was pressed goes with its letter.
  function redriven() {
    if (dead.contains(document.activeElement)) document.activeElement.blur();
    return refreshDead();
  }

  refreshDead();
  let seconds = 0;
  const node = h(
    "div",
    { class: "stack" },
    h("section", { class: "card stack" }, h("div", { class: "between" }, h("h1", {}, title, h("span", { class: "soft small" }, " in ", h("a", { href: `#/pools/${encodeURIComponent(pool)}` }, pool))), h("div", { class: "row" }, Object.values(buttons))), status),
    body,
    h("div", { class: "grid" }, depth.node, latency.node),
    card("Dead letters of this group", h("div", { class: "tall" }, dead)),
  );
  return {
    title: cut(key),
    node,
    second() {
      refresh();
      seconds += 1;
      if (seconds % 5 === 0) refreshDead();
    },
    leave: () => (over = true),
    state: () => state,
  };
}

function cut(text) {
  return text.length > 300 ? `${text.slice(0, 300)}… (${text.length} characters)` : text;
}

/// Why it waits, in the words of the dashboard; the service's own sentence is for programs and terminals.
function sentence({ state, reason, explanation }) {
  const because = reason.why ? `: ${reason.why}` : "";
  switch (state) {
    case "idle": return "Nothing of it is waiting in this pool.";
    case "inQueue": return `Nothing of it is in this pool: it is ${explanation}.`;
    case "running": return `Its head is with its target, for ${span(reason.sinceMillis)}.`;
    case "retrying": return `Its head ${reason.failedAttempts ? `has failed ${reason.failedAttempts} ${reason.failedAttempts === 1 ? "time" : "times"}` : "was put off"} and is tried again in ${span(reason.afterMillis)}${because}`;
    case "rateLimited": return `The rate of the pool lets it start in ${span(reason.afterMillis)}.`;
    case "parked": return `Parked for ${span(reason.sinceMillis)}${because}`;
    case "noSlotFree": return `It could run, and no slot is free; ${count(reason.readyGroups)} groups wait for one.${reason.busyWith?.length ? ` Slots are busy with ${reason.busyWith.map((name) => cut(name).slice(0, 60)).join(", ")}.` : ""}`;
    case "poolPaused": return "Its pool is paused.";
    case "putAside": return `Only messages that were put aside are left${because}`;
    default: return "It is on its way.";
  }
}

function predicted(view) {
  if (view.predictedStartMillis === null) return view.state === "parked" || view.state === "poolPaused" ? "It will not start before somebody resumes it." : "";
  if (view.state === "running") return view.averageMillis ? `Attempts of this group take ${span(view.averageMillis)} on the average.` : "";
  const at = new Date(Date.now() + view.predictedStartMillis);
  return `Expected to start in about ${span(view.predictedStartMillis)}, at ${at.toLocaleTimeString("en-GB")}.`;
}

/// Where something is that was found: in a pool, in a queue for a pool, or in a queue only.
function place({ pool, queue }) {
  if (!queue) return h("bdi", {}, `pool ${pool}`);
  return h("bdi", {}, pool ? `queue ${queue}, for ${pool}` : `queue ${queue}`);
}

export function search(text = "") {
  const body = h("div", { class: "stack" }, h("p", { class: "soft" }, "Looking…"));
  const node = h("div", { class: "stack" }, h("h1", {}, "Search for ", h("bdi", {}, cut(text))), body);
  get(`/api/search?q=${encodeURIComponent(text)}`).then(
    (found) => {
      const groups = found.groups.map((group) => [groupLink(group.pool, group.group), place(group), count(group.depth), h("bdi", {}, group.why)]);
      const messages = found.messages.map((message) => [name(message.messageId, "name mono"), badge(message.state), place(message), message.group ? groupLink(message.pool, message.group) : "–", h("bdi", {}, message.why ?? "–")]);
      const unseen = found.notSearched.map((it) => h("li", {}, h("strong", {}, h("bdi", {}, it.source)), ": ", h("bdi", {}, it.why)));
      show(
        body,
        card("Groups", table("Groups", [["Group"], ["Where"], ["Messages", "number"], ["Why it waits", "wide"]], groups, "No group with messages has this in its name.")),
        card("Messages", table("Messages", [["Message"], ["State"], ["Where"], ["Group"], ["Why it waits", "wide"]], messages, "No message in a pool or in a queue, and no dead letter, has this id.")),
        unseen.length > 0 && card("Not looked through", h("ul", { id: "not-searched" }, unseen)),
      );
      // One exact answer needs no list.
      const exact = found.groups.filter((group) => group.exact && group.pool);
      if (exact.length === 1 && !found.messages.length) location.replace(groupAddress(exact[0].pool, exact[0].group));
    },
    (error) => show(body, h("p", { class: "notice" }, error.message)),
  );
  return { title: "Search", node };
}
