// Dead letters: what was given up and why, and letting it come again.

import { change, get, getPage } from "./api.js";
import { attempt, confirm, count, groupLink, h, moment, name, show, table } from "./page.js";

const PAGE = 50;

/// Whether the service can list the dead letters of a source; other brokers keep them where their own tools show them.
export const isListed = (source) => source.deadLettersAt === null;

export function deadLetters() {
  const body = h("div", {}, h("p", { class: "soft" }, "Looking…"));
  const summary = h("span", { class: "soft" });
  const elsewhere = h("section", { class: "card", hidden: true });
  const select = h("select", { id: "queue-choice", onchange: () => turn(0) });
  const chosen = new Set();
  let [queue, after, letters, more, over] = [null, 0, [], false, false];
  const before = [];

  const redrive = h("button", { type: "button", class: "main", disabled: true, onclick: redriveChosen }, "Redrive chosen");
  const redriveAll = h("button", { type: "button", onclick: redriveOldest }, "Redrive all");
  const purge = h("button", { type: "button", class: "danger", onclick: forget }, "Forget all");
  const back = h("button", { type: "button", class: "small", onclick: () => { after = before.pop() ?? 0; refresh(); } }, "Older");
  const next = h("button", { type: "button", class: "small", onclick: () => { before.push(after); after = letters.at(-1).sequence; refresh(); } }, "Newer");
  const node = h(
    "div",
    { class: "stack" },
    h("div", { class: "between" }, h("h1", {}, "Dead letters"), h("div", { class: "row" }, h("label", { for: "queue-choice", class: "soft" }, "Queue"), select, redrive, redriveAll, purge)),
    h("section", { class: "card" }, body, h("div", { class: "between" }, summary, h("div", { class: "row" }, back, next))),
    elsewhere,
  );

  function turn(to) {
    queue = select.value;
    after = to;
    before.length = 0;
    chosen.clear();
    refresh();
  }

  async function redriveChosen() {
    const sequences = [...chosen];
    if (!(await confirm({ title: "Redrive", text: `${count(sequences.length)} dead letters become messages again, each at the end of its group.`, action: "Redrive" }))) return;
    const done = await attempt("They are messages again", () => change("POST", "/api/dead-letters/redrive", { queue, sequences }));
    if (done) chosen.clear();
    refresh();
  }

  async function redriveOldest() {
    if (!(await confirm({ title: "Redrive all", text: `The oldest thousand dead letters of ${queue} become messages again, each at the end of its group.`, action: "Redrive" }))) return;
    await attempt("They are messages again", () => change("POST", "/api/dead-letters/redrive", { queue }));
    turn(0);
  }

  async function forget() {
    if (!(await confirm({ title: "Forget all", text: `All dead letters of ${queue} are removed for good.`, action: "Forget", danger: true }))) return;
    await attempt("They are gone", () => change("DELETE", `/api/dead-letters?queue=${encodeURIComponent(queue)}`));
    turn(0);
  }

  async function refresh() {
    try {
      if (queue === null) {
        const sources = await get("/api/sources");
        if (over) return;
        const listed = sources.filter(isListed);
        show(select, listed.map((source) => h("option", { value: source.name }, source.name)));
        drawElsewhere(sources.filter((source) => !isListed(source)));
        if (!listed.length) return drawNoQueue();
        queue = select.value;
      }
      const answer = await getPage(`/api/dead-letters?queue=${encodeURIComponent(queue)}&after=${after}&most=${PAGE}`);
      if (over) return;
      [letters, more] = [answer.list, answer.more];
      draw();
    } catch (error) {
      if (!over) show(body, h("p", {}, error.message));
    }
  }

  /// Of a broker only the number is known: it keeps them itself.
  function drawElsewhere(sources) {
    const rows = sources.map((source) => [name(source.name), source.kind, count(source.dead), h("bdi", {}, source.deadLettersAt)]);
    show(elsewhere, rows.length ? table("Dead letters of brokers", [["Source"], ["Kind"], ["Dead letters", "number"], ["Where", "wide"]], rows) : []);
    elsewhere.hidden = !rows.length;
  }

  function drawNoQueue() {
    show(body, h("p", { class: "soft" }, "There is no source here whose dead letters could be listed."));
    for (const button of [redrive, redriveAll, purge, back, next]) button.disabled = true;
  }

  function draw() {
    const choose = (letter) => {
      const box = h("input", { type: "checkbox", "aria-label": `Choose ${letter.id ?? letter.sequence}`, onchange: () => { box.checked ? chosen.add(letter.sequence) : chosen.delete(letter.sequence); redrive.disabled = !chosen.size; } });
      box.checked = chosen.has(letter.sequence);
      return box;
    };
    const rows = letters.map((letter) => [
      choose(letter),
      moment(letter.at),
      name(letter.id ?? "–", "name mono"),
      letter.group ? groupLink(poolOf(letter), letter.group) : "–",
      String(letter.attempts ?? "–"),
      h("bdi", {}, letter.reason),
      h("details", {}, h("summary", {}, "Show"), h("pre", { tabindex: "0" }, pretty(letter.text))),
    ]);
    show(body, table("Dead letters", [["Choose"], ["Given up"], ["Message"], ["Group"], ["Deliveries", "number"], ["Why", "wide"], ["Text"]], rows, "None. Whatever is given up after its last attempt comes here.", { stacked: true }));
    summary.textContent = letters.length ? `${count(letters.length)} shown, the oldest first` : "";
    redrive.disabled = !chosen.size;
    redriveAll.disabled = purge.disabled = !letters.length && after === 0;
    back.disabled = !before.length;
    next.disabled = !more;
  }

  let seconds = 0;
  refresh();
  return {
    title: "Dead letters",
    node,
    second() {
      seconds += 1;
      // Not under the eyes of somebody who reads or chooses.
      if (seconds % 5 === 0 && !chosen.size && !body.querySelector("details[open]") && !body.contains(document.activeElement)) refresh();
    },
    leave: () => (over = true),
  };
}

function poolOf(letter) {
  try {
    return JSON.parse(letter.text).poolCode || "DEFAULT-POOL";
  } catch {
    return null;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
