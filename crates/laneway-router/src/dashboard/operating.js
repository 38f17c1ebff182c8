// What an operator looks at beside the pictures: breakers, warnings, sources, and who did what.

import { change, get, oneAtATime } from "./api.js";
import { attempt, badge, card, confirm, count, groupLink, h, moment, show, showUnlessInUse, span, table } from "./page.js";

export function operating() {
  const [sources, parked, breakers, warnings, audit, ingress] = [0, 0, 0, 0, 0, 0].map(() => h("div", {}));
  const forget = h("button", { type: "button", class: "small", onclick: forgetWarnings }, "Forget all");
  const reload = h("button", { type: "button", onclick: reloadConfiguration }, "Reload the configuration");
  const node = h(
    "div",
    { class: "stack" },
    h("div", { class: "between" }, h("h1", {}, "Operating"), reload),
    card("Sources", sources),
    card("Parked groups", parked),
    h("div", { class: "grid" }, h("section", { class: "card" }, h("div", { class: "between" }, h("h2", {}, "Warnings"), forget), warnings), card("Breakers", breakers)),
    card("Network ingress", ingress),
    card("Audit log", audit),
  );
  let over = false;

  async function forgetWarnings() {
    if (!(await confirm({ title: "Forget all warnings", text: "They are removed from the list; what causes them will bring them back.", action: "Forget" }))) return;
    await attempt("The warnings are gone", () => change("DELETE", "/api/warnings"));
    refresh();
  }

  async function reloadConfiguration() {
    if (!(await confirm({ title: "Reload the configuration", text: "The file is read again; what can be applied is applied at once, and a mistake in it changes nothing.", action: "Reload" }))) return;
    const done = await attempt("The configuration was read", () => change("POST", "/api/config/reload"));
    if (done?.changed) await confirm({ title: "Reloaded", text: [...done.changed, ...done.needsRestart.map((it) => `needs a restart: ${it}`)].join("; ") || "Nothing is different.", action: "Good" });
    refresh();
  }

  async function reset(target) {
    if (!(await confirm({ title: "Reset the breaker", text: `${target} is called again at once.`, action: "Reset" }))) return;
    await attempt("The breaker is closed", () => change("POST", "/api/breakers/reset", { target }));
    // The button goes with what it has done.
    document.activeElement?.blur();
    refresh();
  }

  const refresh = oneAtATime(async () => {
    if (over) return;
    const fill = async (element, path, draw) => {
      try {
        const answer = await get(path);
        if (!over && !document.getElementById("dialog").open) showUnlessInUse(element, draw(answer));
      } catch (error) {
        if (!over) show(element, h("p", {}, error.message));
      }
    };
    await Promise.all([
      fill(sources, "/api/sources", (list) =>
        table("Sources", [["Source"], ["Kind"], ["State"], ["Waiting", "number"], ["Leased", "number"], ["Held here", "number"], ["Claimed", "number"], ["Dead letters", "number"], ["In quarantine", "number"]],
          list.map((it) => [h("bdi", { class: "name" }, it.name), it.kind, [it.healthy ? badge(it.state === "connected" ? "answers" : it.state, it.state === "connected" ? "good" : "warn") : badge(it.state, "bad"), " ", it.trouble && h("bdi", {}, it.trouble), " ", h("span", { class: "small soft" }, "since ", moment(it.since))], count(it.waiting), count(it.leased), count(it.held), count(it.claimed), count(it.dead), count(it.quarantined)]))),
      fill(parked, "/api/parked?most=100", (list) =>
        table("Parked groups", [["Group"], ["Pool"], ["Since"], ["Why", "wide"]], list.map((it) => [groupLink(it.pool, it.group), h("bdi", {}, it.pool), moment(it.since), h("bdi", {}, it.why)]), "No group is parked.")),
      fill(breakers, "/api/breakers?most=200", (list) =>
        table("Breakers", [["Target", "wide"], ["State"], ["Calls", "number"], ["Failed", "number"], [""]],
          list.map((it) => [h("bdi", { class: "mono" }, it.target), [badge(it.state, it.state === "open" ? "bad" : undefined), it.openForMillis !== null && ` for another ${span(it.openForMillis)}`, it.coolingForMillis !== null && ` asked for patience, ${span(it.coolingForMillis)}`], count(it.calls), count(it.failures), it.state === "closed" && it.coolingForMillis === null ? "" : h("button", { type: "button", class: "small", onclick: () => reset(it.target) }, "Reset")]),
          "No target was called lately.")),
      fill(warnings, "/api/warnings?most=50", (list) =>
        table("Warnings", [["When"], ["About"], ["What", "wide"], ["Times", "number"]], list.map((it) => [moment(it.at), it.about, h("bdi", {}, it.text), count(it.count)]), "None.")),
      fill(audit, "/api/audit?most=100", (list) =>
        table("Audit log", [["When"], ["Who"], ["What"], ["To what", "wide"], ["Answer", "number"]],
          list.map((it) => [moment(it.at), it.who, badge(deed(it), ""), h("bdi", {}, it.detail ? `${it.path} (${it.detail})` : it.path), it.status < 400 ? badge("done", "good") : badge(String(it.status), "bad")]), "Nobody has changed anything since the start.")),
      fill(ingress, "/api/ingress", (it) =>
        it.enabled
          ? [h("p", { class: "soft" }, `${it.address}: ${count(it.connectionsOpen)} connections, ${count(it.accepted)} of ${count(it.lines)} lines accepted.`),
            table("Partitions", [["Partition"], ["In", "number"], ["Completed", "number"], ["Failed", "number"], ["Outstanding", "number"], ["Families", "number"], ["Deepest", "number"]],
              it.partitions.map((part) => [part.name, count(part.tasksIn), count(part.tasksCompleted), count(part.tasksFailed), count(part.outstanding), count(part.activeFamilies), count(part.maxPendingDepthObserved)]))]
          : h("p", { class: "soft" }, "Not enabled (laneway.ingress.enabled).")),
    ]);
  });

  let seconds = 0;
  refresh();
  return { title: "Operating", node, second: () => { seconds += 1; if (seconds % 3 === 0) refresh(); }, leave: () => (over = true) };
}

/// The last word of a path says what was done, where it is one of ours.
function deed({ method, path }) {
  const word = path.split("/").at(-1);
  if (["park", "resume", "skip", "pause", "drain", "redrive", "reset", "reload", "messages", "start", "cancel", "complete", "retry", "fail"].includes(word)) return word === "messages" ? "seed" : word;
  return { PUT: "change", DELETE: "remove", POST: "make" }[method] ?? method;
}
