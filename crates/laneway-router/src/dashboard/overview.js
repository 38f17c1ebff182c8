// The overview: is it healthy, where is the work, what waits. Drawn anew each second from the history.

import { get, history } from "./api.js";
import { bars, color, heatMap, overTime, spark } from "./charts.js";
import { badge, card, count, groupAddress, groupLink, h, micros, moment, show, showUnlessInUse, span, table } from "./page.js";

const LINES = 7;
const LANES = 14;
const COLUMN_SECONDS = 5;
const ALL = "all pools";
const OTHERS = "(others)";

let chosen = ALL;

const sum = (list) => list.reduce((total, value) => total + value, 0);
const mean = (list) => (list.length ? sum(list) / list.length : 0);
const last = (list, most) => list.slice(-most);

/// The sum over the chosen pools, second by second.
function totals() {
  const rows = [...history.pools.values()].filter((pool) => chosen === ALL || pool.code === chosen);
  const names = ["submitted", "succeeded", "failed", "retried", "heldBack", "refused", "givenBack", "waiting", "inFlight", "slots", "busy"];
  const total = {};
  for (const name of names) total[name] = history.times.map((_, place) => sum(rows.map((row) => row[name][place])));
  // Of percentiles there is no sum: the worst pool of each second is the one to know.
  for (const name of ["p50Micros", "p95Micros", "p99Micros"]) total[name] = history.times.map((_, place) => Math.max(0, ...rows.map((row) => row[name][place])));
  return total;
}

function groups() {
  return [...history.groups.values()].filter((group) => chosen === ALL || group.pool === chosen);
}

function label(group) {
  return chosen === ALL && history.pools.size > 1 ? `${group.group} · ${group.pool}` : group.group;
}

export function overview() {
  const health = h("div", {});
  const tiles = h("dl", { class: "tiles" });
  const select = h("select", { id: "pool-choice", onchange: () => { chosen = select.value; second(); } });
  const perGroup = bars("Messages per group", "the deepest now", "chart-bars", {
    none: "No group has messages that wait.",
    legend: [{ name: "in its pool", color: "var(--c0)" }, { name: "still in the queue", color: "var(--c1)" }],
  });
  const depth = overTime("Queue depth per group", "messages in the pool", "chart-depth", { height: 330 });
  const latency = heatMap("Latency per group", `mean of attempts, ${COLUMN_SECONDS} s each`, "chart-latency", { format: micros });
  const utilisation = overTime("Worker utilisation per group", "busy slots", "chart-utilisation", { stacked: true, height: 330 });
  const throughput = overTime("Throughput and outcomes", "messages per second", "chart-throughput");
  const percentiles = overTime("Attempts", "p50, p95, p99 of each second; the slowest pool", "chart-percentiles", { format: micros, gaps: true });
  const outcomes = bars("Outcomes of attempts", "since the start", "chart-outcomes");
  const rejections = bars("Not taken, by reason", "since the start", "chart-rejections");
  const pools = h("div", {});
  const sources = h("div", {});
  const failures = h("div", {});
  const node = h(
    "div",
    { class: "stack" },
    h("div", { class: "between" }, h("h1", {}, "Overview"), h("div", { class: "row" }, h("label", { for: "pool-choice", class: "soft" }, "Show"), select)),
    health,
    tiles,
    h("div", { class: "grid" }, perGroup.node, depth.node, latency.node, utilisation.node, throughput.node, percentiles.node),
    h("div", { class: "grid" }, outcomes.node, rejections.node),
    h("div", { class: "grid" }, card("Pools", pools), card("Sources and targets", sources)),
    card("Newest failures", failures),
  );

  let asked = 0;
  async function askForFailures() {
    // The list changes seldom and is not in the stream.
    if (Date.now() - asked < 3000) return;
    asked = Date.now();
    try {
      const newest = await get("/api/failures?most=8");
      const rows = newest.map((failure) => [
        moment(failure.at),
        failure.group ? groupLink(failure.pool, failure.group) : h("span", { class: "soft" }, "without a group"),
        h("bdi", { class: "name mono" }, failure.messageId),
        String(failure.attempt),
        h("bdi", {}, failure.reason),
      ]);
      showUnlessInUse(failures, table("Newest failed attempts", [["When"], ["Group"], ["Message"], ["Attempt", "number"], ["What happened", "wide"]], rows, "No attempt has failed.", { stacked: true }));
    } catch {
      asked = 0;
    }
  }

  function second() {
    if (!history.now) {
      show(health, h("div", { class: "health", "data-state": "warn" }, "Waiting for the first second."));
      return;
    }
    const total = totals();
    chooseAmong(select);
    drawHealth(health, total);
    drawTiles(tiles, total);
    drawGroups({ perGroup, depth, latency, utilisation }, total);
    throughput.draw({
      times: history.times,
      series: [
        { name: "taken in", color: color(1), values: total.submitted },
        { name: "delivered", color: color(0), values: total.succeeded },
        { name: "to be tried again", color: color(4), values: total.retried },
        { name: "dead letters", color: color(2), values: total.failed },
      ],
    });
    percentiles.draw({
      times: history.times,
      least: 100,
      series: [
        { name: "p99", color: color(2), values: total.p99Micros },
        { name: "p95", color: color(4), values: total.p95Micros },
        { name: "p50", color: color(0), values: total.p50Micros },
      ],
    });
    drawCounts(outcomes, { delivered: history.now.verdicts.done, "to be tried again": history.now.verdicts.again, "put off": history.now.verdicts.wait, "failed for good": history.now.verdicts.final });
    drawCounts(rejections, history.now.rejections);
    drawPools(pools);
    drawSources(sources);
    askForFailures();
  }

  return { title: "Overview", node, second };
}

function chooseAmong(select) {
  const codes = [ALL, ...history.pools.keys()];
  if (!codes.includes(chosen)) chosen = ALL;
  if (select.dataset.codes === codes.join("\u0000")) return;
  select.dataset.codes = codes.join("\u0000");
  show(select, codes.map((code) => h("option", { value: code }, code)));
  select.value = chosen;
}

/// The attempts of the last half minute, and those of them that failed.
function attempts(total) {
  const failed = sum(last(total.retried, 30)) + sum(last(total.failed, 30));
  return [sum(last(total.succeeded, 30)) + failed, failed];
}

function failedShare(total) {
  const [tried, failed] = attempts(total);
  const share = (100 * failed) / tried;
  return failed ? (share < 1 ? "less than 1 %" : `${Math.round(share)} %`) : "";
}

/// What somebody should look at, the worst first.
function troubles(total) {
  const { now } = history;
  const found = [];
  for (const source of now.sources) if (!source.healthy) found.push(["bad", `The source ${source.name} does not answer: ${source.trouble ?? "no reason given"}`]);
  if (now.breakers.open) found.push(["bad", `${now.breakers.open} ${now.breakers.open === 1 ? "target is" : "targets are"} not called: too many calls failed`]);
  if (now.closing) found.push(["warn", "The service is shutting down"]);
  for (const pool of now.states) if (pool.state !== "open") found.push(["warn", `The pool ${pool.code} is ${pool.state}`]);
  const [tried, failed] = attempts(total);
  if (failed > 0 && failed / tried > 0.1) found.push(["warn", `${failedShare(total)} of the attempts of the last 30 s failed`]);
  const busy = mean(last(total.busy, 10)) / 1000;
  const slots = total.slots.at(-1) ?? 0;
  if (slots && busy / slots > 0.95 && total.waiting.at(-1) > slots) found.push(["warn", "Nearly all slots are busy, and messages wait for one"]);
  return found.sort(([one], [other]) => (one === other ? 0 : one === "bad" ? -1 : 1));
}

function drawHealth(node, total) {
  const found = troubles(total);
  const state = found[0]?.[0] ?? "good";
  const failing = failedShare(total);
  const text = JSON.stringify([found, failing]);
  if (node.dataset.text === text) return;
  node.dataset.text = text;
  const words = found.length === 1 ? found[0][1] : h("ul", {}, found.slice(0, 6).map(([, trouble]) => h("li", {}, trouble)));
  show(node, h("div", { class: "health", "data-state": state, role: "status", id: "health" }, found.length ? words : `All is well: every source answers, every pool is open, ${failing ? `and ${failing} of the attempts of the last 30 s failed` : "and no attempt of the last 30 s failed"}.`));
}

function tile(title, value, unit, below, values, tone) {
  return h("div", { class: "card tile" }, h("dt", {}, title), h("dd", {}, h("div", { class: "value", "data-tile": title }, value, unit && h("small", {}, unit)), h("div", { class: "below" }, below), spark(values, tone)));
}

function drawTiles(node, total) {
  const { now } = history;
  const slots = total.slots.at(-1) ?? 0;
  const busy = total.busy.map((value) => value / 1000);
  const dead = sum(now.sources.map((source) => source.dead ?? 0));
  const waiting = sum(now.sources.map((source) => source.waiting ?? 0));
  const failing = total.retried.map((value, place) => value + total.failed[place]);
  const smooth = mean(last(total.succeeded, 5));
  showUnlessInUse(
    node,
    tile("Delivered", count(smooth), "per second", `${count(sum(total.succeeded))} in ${span((history.times.length) * 1000)}`, total.succeeded),
    tile("Busy slots", count(mean(last(busy, 5))), `of ${count(slots)}`, `${count(total.inFlight.at(-1))} with their targets now`, busy, "var(--c1)"),
    tile("Waiting", count(total.waiting.at(-1)), "in pools", `${count(waiting)} still in the queues`, total.waiting, "var(--c5)"),
    tile("Latency p95", micros(total.p95Micros.at(-1)), "", `p50 ${micros(total.p50Micros.at(-1))}, p99 ${micros(total.p99Micros.at(-1))}`, total.p95Micros, "var(--c4)"),
    tile("Failed attempts", count(mean(last(failing, 5))), "per second", `${count(sum(total.retried))} tried again, ${count(sum(total.failed))} given up`, failing, "var(--c2)"),
    tile("Dead letters", count(dead), "", h("a", { href: "#/dead-letters" }, dead ? "look at them" : "none"), total.failed, "var(--bad)"),
  );
}

function drawGroups({ perGroup, depth, latency, utilisation }, total) {
  const deepest = history.deepest.filter((group) => chosen === ALL || group.pool === chosen).slice(0, LANES);
  perGroup.draw(
    deepest.map((group) => ({
      name: groupLink(group.pool, group.group),
      label: group.group,
      parts: [["in-pool", group.inPool], ["in-queue", group.inQueue]],
      value: group.inPool + group.inQueue,
    })),
  );
  const all = groups();
  const deep = all.filter((group) => group.depth.some(Boolean)).sort((one, other) => sum(other.depth) - sum(one.depth)).slice(0, LINES);
  depth.draw({ times: history.times, series: deep.map((group, place) => ({ name: label(group), color: color(place), values: group.depth, link: groupAddress(group.pool, group.group) })) });
  drawLatency(latency, all);
  const busy = all.filter((group) => group.busy.some(Boolean)).sort((one, other) => sum(other.busy) - sum(one.busy)).slice(0, LINES);
  const layers = busy.map((group, place) => ({ name: label(group), color: color(place), values: group.busy.map((value) => value / 1000), link: groupAddress(group.pool, group.group) }));
  const others = total.busy.map((value, place) => Math.max(0, value / 1000 - sum(layers.map((layer) => layer.values[place]))));
  if (layers.length) layers.push({ name: "all others", color: "var(--c8)", values: others });
  const few = Math.max(...total.slots, 0) <= 4 * Math.max(1, ...total.busy.map((value) => value / 1000));
  utilisation.draw({ times: history.times, series: layers, ...(few ? { limit: total.slots, limitName: "slots" } : {}) });
}

/// Seconds gathered into columns: the mean of the attempts that ended in each.
function drawLatency(chart, all) {
  const columns = Math.ceil(history.times.length / COLUMN_SECONDS);
  const first = history.times.length - columns * COLUMN_SECONDS;
  const places = (column) => Array.from({ length: COLUMN_SECONDS }, (_, step) => first + column * COLUMN_SECONDS + step).filter((place) => place >= 0);
  const numbers = Array.from({ length: columns }, (_, column) => column);
  const rows = all
    .filter((group) => group.attempts.some(Boolean))
    .map((group) => {
      const values = numbers.map((column) => {
        const ended = places(column).filter((place) => group.attempts[place] > 0);
        const attempts = sum(ended.map((place) => group.attempts[place]));
        return attempts ? sum(ended.map((place) => group.meanMicros[place] * group.attempts[place])) / attempts : 0;
      });
      return { name: groupLink(group.pool, group.group), label: label(group), values, weight: sum(group.busy) };
    })
    .sort((one, other) => other.weight - one.weight)
    .slice(0, LANES);
  chart.draw({ times: numbers.map((column) => history.times[places(column).at(-1)]), rows });
}

function drawCounts(chart, counts) {
  const rows = Object.entries(counts).filter(([, value]) => value > 0).map(([reason, value]) => ({ name: h("span", { class: "name" }, reason), label: reason, parts: [["plain", value]], value }));
  chart.draw(rows.sort((one, other) => other.value - one.value));
}

function drawPools(node) {
  const states = new Map(history.now.states.map((pool) => [pool.code, pool.state]));
  const rows = [...history.pools.values()].map((pool) => [
    h("a", { href: `#/pools/${encodeURIComponent(pool.code)}`, class: "name" }, h("bdi", {}, pool.code)),
    // Those that share a row have no state in common; one that has none was removed, and its past is still shown.
    pool.code === OTHERS ? "–" : badge(states.get(pool.code) ?? "gone"),
    count(mean(last(pool.succeeded, 5))),
    `${count(mean(last(pool.busy, 5)) / 1000)} of ${count(pool.slots.at(-1))}`,
    count(pool.waiting.at(-1)),
    micros(pool.p95Micros.at(-1)),
  ]);
  showUnlessInUse(node, table("Pools", [["Pool"], ["State"], ["Per second", "number"], ["Busy", "number"], ["Waiting", "number"], ["p95", "number"]], rows));
}

function drawSources(node) {
  const { sources, breakers } = history.now;
  const rows = sources.map((source) => [
    h("bdi", { class: "name" }, source.name),
    source.healthy ? badge("answers", "good") : badge("trouble", "bad"),
    count(source.waiting),
    count(source.leased),
    count(source.dead),
  ]);
  const all = breakers.closed + breakers.open + breakers.halfOpen;
  const words = all ? `${count(all)} targets called lately: ${breakers.open} open, ${breakers.halfOpen} half open breakers.` : "No target was called lately.";
  showUnlessInUse(
    node,
    table("Sources", [["Source"], ["State"], ["Waiting", "number"], ["Leased", "number"], ["Dead", "number"]], rows),
    h("p", { class: "small soft" }, words, " ", h("a", { href: "#/operating" }, "Breakers, warnings and the audit log")),
  );
}
