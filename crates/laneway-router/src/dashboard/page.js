// What every page is made of: elements whose texts are always texts, numbers and times as people read them, questions and answers.

/// An element. Children are elements or texts; nothing is ever read as markup. `on*` attributes are listeners.
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/// The same for SVG.
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/// Puts other children into an element.
export function show(element, ...children) {
  element.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
}

let pressed = null;

// The click comes a little after the pointer was let go, on a touch screen.
const CLICK = 300;
document.addEventListener("pointerdown", (event) => (pressed = { on: event.target }), true);
for (const end of ["pointerup", "pointercancel"]) {
  document.addEventListener(
    end,
    () => {
      const released = pressed;
      setTimeout(() => pressed === released && (pressed = null), CLICK);
    },
    true,
  );
}

/// Whether somebody is about to press something in an element, or has come to it by the keyboard: to draw it anew would take it away from him.
export function isInUse(element) {
  const active = document.activeElement;
  if (active && element.contains(active) && active.matches(":focus-visible")) return true;
  return pressed !== null && element.contains(pressed.on);
}

/// The same as `show`, at another time if it is in use now.
export function showUnlessInUse(element, ...children) {
  if (!isInUse(element)) show(element, ...children);
}

// ── numbers and times ───────────────────────────────────────────────────────────────────────────────────────────────

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export function count(number) {
  if (number === null || number === undefined) return "–";
  return Math.abs(number) >= 100000 ? short.format(number) : plain.format(number);
}

/// A time span in milliseconds.
export function span(millis) {
  if (millis === null || millis === undefined) return "–";
  if (millis === 0) return "0";
  if (millis < 1) return `${plain.format(millis * 1000)} µs`;
  if (millis < 1000) return `${millis < 10 ? plain.format(millis) : Math.round(millis)} ms`;
  if (millis < 60000) return `${plain.format(millis / 1000)} s`;
  if (millis < 3600000) return `${Math.floor(millis / 60000)} min ${Math.round((millis % 60000) / 1000)} s`;
  if (millis < 86400000) return `${Math.floor(millis / 3600000)} h ${Math.round((millis % 3600000) / 60000)} min`;
  return `${Math.floor(millis / 86400000)} d ${Math.round((millis % 86400000) / 3600000)} h`;
}

export function micros(number) {
  return span(number / 1000);
}

/// A moment, as an element that tells its whole date.
export function moment(iso) {
  const time = new Date(iso);
  const today = time.toDateString() === new Date().toDateString();
  const text = today ? time.toLocaleTimeString("en-GB") : time.toLocaleString("en-GB");
  return h("time", { datetime: iso, title: time.toLocaleString("en-GB") }, text);
}

/// A name that may be anything: in a direction of its own, and cut by the browser, not by us, unless nobody could read it.
export function name(text, className = "name") {
  const shown = text.length > 400 ? `${text.slice(0, 400)}…` : text;
  return h("bdi", { class: className, title: shown }, shown);
}

export function groupLink(pool, group, className = "name") {
  // Which pool it is for only the queue knows, and the search asks that.
  if (!pool) return h("a", { href: `#/search/${encodeURIComponent(group)}`, class: className, title: `${group.slice(0, 400)}, still in the queue` }, h("bdi", {}, group.slice(0, 400)));
  return h("a", { href: groupAddress(pool, group), class: className, title: `${group.slice(0, 400)} in ${pool}` }, h("bdi", {}, group.slice(0, 400)));
}

export function groupAddress(pool, group) {
  return `#/group/${encodeURIComponent(pool)}/${encodeURIComponent(group)}`;
}

const TONES = {
  open: "good", running: "good", idle: "", paused: "warn", waiting: "warn", draining: "warn", retrying: "warn", rateLimited: "warn",
  poolPaused: "warn", parked: "bad", putAside: "bad", inQueue: "warn", delayed: "warn", deadLetter: "bad", inFlight: "good", noSlotFree: "warn", closed: "good", halfOpen: "warn", completed: "good",
  started: "good", failed: "bad", cancelled: "warn",
};

const WORDS = {
  noSlotFree: "waits for a slot", rateLimited: "rate limited", poolPaused: "pool paused", putAside: "put aside", retrying: "in retry",
  perhapsRunning: "perhaps running", halfOpen: "half open", inFlight: "with its target", deadLetter: "dead letter", inQueue: "in the queue",
};

export function badge(state, tone = TONES[state]) {
  return h("span", { class: `badge ${tone ?? ""}` }, WORDS[state] ?? state);
}

/// A table. Columns are [title, class], cells texts or elements; `none` is said where there are no rows. One that is `stacked` has on a phone a block for each row, with a line for each
/// cell: for rows that are too long to be read, or acted on, a part at a time.
export function table(caption, columns, rows, none = "Nothing here.", { stacked = false } = {}) {
  if (!rows.length) return h("p", { class: "soft" }, none);
  const head = columns.map(([title, className]) => h("th", { scope: "col", class: className }, title || h("span", { class: "unseen" }, "Actions")));
  const body = rows.map((cells) => h("tr", {}, cells.map((cell, place) => h("td", { class: columns[place][1], "data-label": stacked && columns[place][0] }, cell))));
  return h(
    "div",
    { class: stacked ? "scroll stacked" : "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

export function card(title, ...children) {
  return h("section", { class: "card" }, h("h2", {}, title), ...children);
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([term, fact]) => [h("dt", {}, term), h("dd", {}, fact)]));
}

// ── questions and answers ───────────────────────────────────────────────────────────────────────────────────────────

const dialog = document.getElementById("dialog");

let answered = null;

function ask(content, valueOf) {
  // One question at a time: the one before, if it is still there, is taken back.
  answered?.(null);
  return new Promise((resolve) => {
    const settle = (value) => {
      dialog.removeEventListener("close", closed);
      answered = null;
      if (dialog.open) dialog.close();
      resolve(value);
    };
    // That of the question before may come late, when this one is open already.
    const closed = () => {
      if (!dialog.open) settle(null);
    };
    answered = settle;
    show(dialog, content);
    content.addEventListener("submit", (event) => {
      event.preventDefault();
      settle(valueOf());
    });
    content.querySelector("[data-cancel]")?.addEventListener("click", () => settle(null));
    dialog.addEventListener("close", closed);
    dialog.showModal();
  });
}

/// Asks whether something is to be done. With `field` there is a text to write, which is the answer; with `long` one of many lines.
export function confirm({ title, text, action, danger = false, field = null, long = false }) {
  const line = () => h("input", { type: "text", maxlength: "300", "aria-label": field });
  const lines = () => h("textarea", { rows: "8", spellcheck: "false", class: "mono", "aria-label": field });
  const input = field ? (long ? lines() : line()) : null;
  const form = h(
    "form",
    { method: "dialog" },
    h("h2", { id: "dialog-title" }, title),
    h("p", {}, text),
    input && h("label", {}, field, input),
    h(
      "div",
      { class: "row" },
      h("button", { type: "button", "data-cancel": true }, "Cancel"),
      h("button", { type: "submit", class: danger ? "main danger" : "main", "data-confirm": true }, action),
    ),
  );
  return ask(form, () => (input ? { text: input.value } : true));
}

/// Asks for the admin token.
export function login(wasWrong) {
  const input = h("input", { type: "password", autocomplete: "current-password", required: true, id: "token" });
  const form = h(
    "form",
    { method: "dialog" },
    h("h2", { id: "dialog-title" }, "Admin token"),
    h("p", {}, wasWrong ? "That token is not the right one." : "This service shows and changes messages for holders of its token only. It is kept until this tab is closed."),
    h("label", { for: "token" }, "Token", input),
    h("div", { class: "row" }, h("button", { type: "submit", class: "main" }, "Continue")),
  );
  return ask(form, () => input.value.trim());
}

export function toast(text, bad = false) {
  const element = h("div", { class: bad ? "toast bad" : "toast" }, text);
  document.getElementById("toasts").append(element);
  setTimeout(() => element.remove(), bad ? 9000 : 4500);
}

/// Does something and says how it went. The answer is what was done, or nothing.
export async function attempt(what, act) {
  try {
    const result = await act();
    toast(what);
    return result ?? true;
  } catch (error) {
    toast(error.message, true);
    return null;
  }
}
