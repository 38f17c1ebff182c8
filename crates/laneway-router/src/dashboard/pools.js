// Pools: how they stand, and changing them while they run. One of them in detail: its dispatchers, and what each slot does.

import { change, get, history, oneAtATime, path } from "./api.js";
import { overTime } from "./charts.js";
import { attempt, badge, card, confirm, count, facts, groupLink, h, isInUse, micros, name, show, showUnlessInUse, span, table } from "./page.js";

const address = (code) => `/api/pools${path(code)}`;

export function pools(code) {
  return code ? one(code) : all();
}

/// The buttons of a pool. `done` is called after each.
function actions(pool, done) {
  const act = (title, text, action, request, options = {}) => async () => {
    if (!(await confirm({ title, text, action, ...options }))) return;
    await attempt(`${title}: done`, request);
    done();
  };
  const size = h("input", { type: "number", min: "1", max: "65536", step: "1", value: String(pool.concurrency), class: "resize", "aria-label": `Slots of ${pool.code}`, "data-slots": pool.code });
  const resize = async (event) => {
    event.preventDefault();
    const slots = Number(size.value);
    if (!Number.isInteger(slots) || slots < 1) return size.reportValidity();
    await act(`Resize ${pool.code}`, `From ${pool.concurrency} to ${slots} slots. A slot that goes ends what it has first.`, "Resize", () => change("PUT", address(pool.code), { concurrency: slots }))();
  };
  const isPaused = pool.state === "paused";
  const toggle = isPaused
    ? h("button", { type: "button", class: "small", onclick: act(`Resume ${pool.code}`, "Its messages go on.", "Resume", () => change("POST", `${address(pool.code)}/resume`)) }, "Resume")
    : h("button", { type: "button", class: "small", disabled: pool.state === "draining", onclick: act(`Pause ${pool.code}`, "What is with its target ends; everything else waits.", "Pause", () => change("POST", `${address(pool.code)}/pause`)) }, "Pause");
  const isDefault = pool.code === "DEFAULT-POOL";
  const drain = h("button", { type: "button", class: "small danger", disabled: isDefault || pool.state === "draining", title: isDefault ? "The default pool stands in for unknown ones and stays" : null, onclick: act(`Drain ${pool.code}`, "It takes nothing more and runs what it has; this cannot be undone. When it is empty it can be removed.", "Drain", () => change("POST", `${address(pool.code)}/drain`), { danger: true }) }, "Drain");
  const remove = pool.state === "draining" ? h("button", { type: "button", class: "small danger", onclick: act(`Remove ${pool.code}`, "Waits until it is empty, then it is gone.", "Remove", () => change("DELETE", address(pool.code)), { danger: true }) }, "Remove") : null;
  return h("div", { class: "row" }, h("form", { class: "row", onsubmit: resize }, size, h("button", { type: "submit", class: "small" }, "Resize")), toggle, drain, remove);
}

function all() {
  const body = h("div", {}, h("p", { class: "soft" }, "Looking…"));
  const node = h("div", { class: "stack" }, h("h1", {}, "Pools"), h("section", { class: "card" }, body));
  let over = false;

  const refresh = oneAtATime(async () => {
    // Somebody writes a number, or has his finger on a button.
    if (body.contains(document.activeElement) || document.getElementById("dialog").open) return;
    try {
      const list = await get("/api/pools");
      if (!over && !isInUse(body)) show(body, draw(list));
    } catch (error) {
      if (!over && !body.querySelector("table")) show(body, h("p", {}, error.message));
    }
  });

  function draw(list) {
    const rows = list.map((pool) => [
      h("a", { href: `#/pools/${encodeURIComponent(pool.code)}`, class: "name" }, h("bdi", {}, pool.code)),
      badge(pool.state),
      `${count(pool.inFlight)} of ${count(pool.concurrency)}`,
      `${count(pool.held - pool.parkedMessages)} of ${count(pool.capacity)}`,
      count(pool.groups),
      pool.parkedGroups ? badge(String(pool.parkedGroups), "bad") : "0",
      pool.retryingGroups ? badge(String(pool.retryingGroups), "warn") : "0",
      count(pool.counts.succeeded),
      span(pool.latency.p95Millis),
      actions(pool, () => {
        document.activeElement?.blur();
        refresh();
      }),
    ]);
    const columns = [["Pool"], ["State"], ["With targets", "number"], ["Held", "number"], ["Groups", "number"], ["Parked", "number"], ["In retry", "number"], ["Delivered", "number"], ["p95", "number"], ["Slots and state"]];
    return table("Pools", columns, rows, undefined, { stacked: true });
  }

  return { title: "Pools", node, second: refresh, leave: () => (over = true) };
}

function one(code) {
  const top = h("div", {});
  const dispatchers = h("div", {});
  const slots = h("div", {});
  const buttons = h("div", {});
  const throughput = overTime("Throughput", "messages per second", "pool-throughput");
  const busy = overTime("Busy slots", "on the average of each second", "pool-busy", { stacked: true });
  const waiting = overTime("Waiting", "messages in the pool", "pool-waiting");
  const latency = overTime("Latency", "of attempts", "pool-latency", { format: micros, gaps: true });
  const node = h(
    "div",
    { class: "stack" },
    h("section", { class: "card stack" }, h("div", { class: "between" }, h("h1", {}, h("bdi", {}, code)), buttons), top),
    h("div", { class: "grid" }, throughput.node, busy.node, waiting.node, latency.node),
    card("Dispatchers", dispatchers),
    card("Slots", slots),
  );
  let over = false;

  function drawHistory() {
    const row = history.pools.get(code);
    const times = row ? history.times : [];
    const series = (...list) => (row ? list.map(([name, color, of]) => ({ name, color: `var(--c${color})`, values: of(row) })) : []);
    throughput.draw({ times, series: series(["taken in", 1, (it) => it.submitted], ["delivered", 0, (it) => it.succeeded], ["to be tried again", 4, (it) => it.retried], ["dead letters", 2, (it) => it.failed]) });
    busy.draw({ times, series: series(["busy", 1, (it) => it.busy.map((value) => value / 1000)]), ...(row ? { limit: row.slots, limitName: "slots" } : {}) });
    waiting.draw({ times, series: series(["waiting", 5, (it) => it.waiting]) });
    latency.draw({ times, least: 100, series: series(["p99", 2, (it) => it.p99Micros], ["p95", 4, (it) => it.p95Micros], ["p50", 0, (it) => it.p50Micros]) });
  }

  const refresh = oneAtATime(async () => {
    if (over) return;
    try {
      const [pool, detail] = await Promise.all([get(address(code)), get(`${address(code)}/slots`)]);
      if (over) return;
      drawPool(pool);
      drawSlots(detail);
    } catch (error) {
      if (!over) show(top, h("p", {}, error.message));
    }
  });

  function drawPool(pool) {
    show(
      top,
      facts([
        ["State", badge(pool.state)],
        ["Holds", `${count(pool.held - pool.parkedMessages)} of ${count(pool.capacity)} messages of ${count(pool.groups)} groups, at most ${count(pool.groupCapacity)} of one`],
        pool.parkedGroups > 0 && ["Parked", [badge(`${count(pool.parkedGroups)} ${pool.parkedGroups === 1 ? "group" : "groups"}`, "bad"), ` with ${count(pool.parkedMessages)} messages, which do not count. `, h("a", { href: "#/operating" }, "Which, and why")]],
        ["Rate", pool.ratePerSecond === null ? "no limit" : `${count(pool.ratePerSecond)} per second`],
        ["Attempts", `${pool.attempts}, ${span(pool.backoffMillis)} to ${span(pool.backoffMaxMillis)} apart; then ${{ deadLetter: "to the dead letters", parkGroup: "the group is parked", giveBack: "the group goes back to its queue" }[pool.exhausted]}`],
        ["Counted", `${count(pool.counts.submitted)} taken in, ${count(pool.counts.succeeded)} delivered, ${count(pool.counts.transient)} tried again, ${count(pool.counts.failed)} given up, ${count(pool.counts.refused)} refused (${count(pool.counts.refusedPoolFull)} pool full, ${count(pool.counts.refusedGroupFull)} group full)`],
      ]),
    );
    if (!buttons.contains(document.activeElement) && !isInUse(buttons) && !document.getElementById("dialog").open) show(buttons, actions(pool, refresh));
  }

  function drawSlots(detail) {
    const rows = detail.dispatchers.map((part) => [part.name, part.paused ? badge("paused") : badge("open"), count(part.groups), count(part.runningGroups), count(part.retryingGroups), count(part.parkedGroups), count(part.waiting), count(part.deepest), count(part.attempts), `${(part.lockFailureRatio * 100).toFixed(2)} %`]);
    showUnlessInUse(dispatchers, table("Dispatchers", [["Dispatcher"], ["State"], ["Groups", "number"], ["Running", "number"], ["In retry", "number"], ["Parked", "number"], ["Waiting", "number"], ["Deepest ever", "number"], ["Attempts", "number"], ["Lock misses", "number"]], rows));
    const list = detail.slots.map((slot) =>
      h(
        "li",
        { "data-busy": String(slot.messageId !== null) },
        h("div", { class: "between" }, h("span", { class: "mono" }, slot.name), h("span", { class: "soft" }, count(slot.handled))),
        slot.messageId === null ? h("span", { class: "soft" }, "free") : [slot.group ? groupLink(code, slot.group) : name(slot.messageId), h("span", { class: "soft" }, `attempt ${slot.attempt}, ${span(slot.sinceMillis)}`)],
      ),
    );
    showUnlessInUse(slots, h("ul", { class: "slots" }, list), detail.total > detail.slots.length && h("p", { class: "soft" }, `and ${count(detail.total - detail.slots.length)} more`));
  }

  return { title: code, node, second: () => { drawHistory(); refresh(); }, leave: () => (over = true) };
}
