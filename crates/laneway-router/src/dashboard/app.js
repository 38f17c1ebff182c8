// The front of the dashboard: finds the page for the address, lets it live while it is shown, and says how the connection stands.

import { get, onSecond, onTokenNeeded, readAlong, watchConnection } from "./api.js";
import { deadLetters } from "./dead_letters.js";
import { flows } from "./flows.js";
import { group, search } from "./group.js";
import { operating } from "./operating.js";
import { overview } from "./overview.js";
import { h, login, show } from "./page.js";
import { pools } from "./pools.js";

// A page is a function of the parts of its address. It gives its element, what it is called, and what to do each second.
const PAGES = { "": overview, pools, "dead-letters": deadLetters, operating, group, search, flows };

const view = document.getElementById("view");
const live = document.getElementById("live");
const notice = document.getElementById("notice");
let current = { second: () => {}, leave: () => {} };

function parts() {
  return location.hash.replace(/^#\/?/, "").split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
}

function turnTo() {
  current.leave?.();
  const [first, ...rest] = parts();
  const make = PAGES[first] ?? (() => ({ title: "Nothing here", node: h("p", {}, "There is no such page.") }));
  current = make(...rest);
  document.title = `${current.title} · Laneway`;
  const name = first || "overview";
  for (const link of document.querySelectorAll("nav [data-page]")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  show(view, current.node);
  current.second?.();
}

// An address of a page it is not: the page stays.
document.querySelector(".skip-link").addEventListener("click", (event) => {
  event.preventDefault();
  view.focus();
});

window.addEventListener("hashchange", () => {
  turnTo();
  view.focus();
  scrollTo(0, 0);
});

document.getElementById("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = document.getElementById("search-text").value.trim();
  if (text) location.hash = `#/search/${encodeURIComponent(text)}`;
});

// `/` goes to the search, as elsewhere.
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.closest("input, textarea, select, dialog")) {
    event.preventDefault();
    document.getElementById("search-text").focus();
  }
});

const themes = ["light", "dark"];
const kept = localStorage.getItem("laneway-theme");
if (themes.includes(kept)) document.documentElement.dataset.theme = kept;
document.getElementById("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const next = dark === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  localStorage.setItem("laneway-theme", next);
  current.second?.();
});

watchConnection((state, why) => {
  live.dataset.state = state;
  live.textContent = state === "live" ? "live" : "not live";
  notice.hidden = state === "live";
  if (state !== "live") show(notice, `${why ?? "The service does not answer."} Trying again; what is shown is from before.`);
});

onTokenNeeded(login);
onSecond(() => current.second?.());
turnTo();
readAlong();

// Flows are there where the service was built with them and has a database.
get("/openapi.json").then((description) => {
  document.getElementById("flows-link").hidden = !Object.keys(description.paths).some((path) => path.startsWith("/api/flow"));
}, () => {});
