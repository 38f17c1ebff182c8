// The pictures: drawn by ourselves as SVG and HTML, with a legend, a reading at the pointer, and the same numbers as a table for whoever cannot see them.

import { count, h, isInUse, show, showUnlessInUse, svg } from "./page.js";

const LEFT = 46;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 24;

export function color(place) {
  return `var(--c${place % 8})`;
}

/// Round numbers from zero to at least `most`.
function ticksTo(most) {
  const raw = Math.max(most, 1e-9) / 4;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const ticks = [];
  for (let tick = 0; tick < most + step * 0.999; tick += step) ticks.push(tick);
  return ticks.length > 1 ? ticks : [0, step];
}

function ago(times, place) {
  const seconds = Math.round((times.at(-1) - times[place]) / 1000);
  if (seconds === 0) return "now";
  return seconds >= 60 ? `−${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")}` : `−${seconds} s`;
}

/// The frame of a picture. `draw` gets a model and fills the plot; the table is made when it is opened.
function figure(title, about, id) {
  const plot = h("div", { class: "plot" });
  const legend = h("ul", { class: "legend" });
  const rows = h("div", {});
  const details = h("details", { ontoggle: () => frame.tabulate() }, h("summary", {}, "As a table"), rows);
  const node = h(
    "figure",
    { class: "card", id },
    h("figcaption", {}, h("h2", {}, title), h("span", { class: "about" }, about)),
    plot,
    legend,
    details,
  );
  const frame = {
    node,
    plot,
    legend,
    tabulate() {
      if (details.open && frame.columns) showUnlessInUse(rows, tableOf(title, frame.columns, frame.cells()));
    },
  };
  return frame;
}

function tableOf(title, columns, cells) {
  const head = columns.map((column, place) => h("th", { scope: "col", class: place ? "number" : "" }, column));
  const body = cells.map((row) =>
    h("tr", {}, row.map((cell, place) => (place ? h("td", { class: "number" }, cell) : h("th", { scope: "row" }, h("bdi", { class: "name" }, cell))))),
  );
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": `${title}, as a table` },
    h("table", {}, h("caption", { class: "unseen" }, title), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

/// A line that is interrupted where there is no value; one alone is a dot.
function broken(points, values) {
  let text = "";
  points.forEach((point, place) => {
    if (values[place] > 0) text += values[place - 1] > 0 ? `L${point}` : `M${point}L${point}`;
  });
  return text;
}

/// Values that have no neighbours: a line would be too thin to be seen.
function lonely(values) {
  return values.flatMap((value, place) => (value > 0 && !(values[place - 1] > 0) && !(values[place + 1] > 0) ? [place] : []));
}

function dot(cx, cy, fill) {
  const circle = svg("circle", { cx: cx.toFixed(1), cy: cy.toFixed(1), r: "3.5" });
  circle.style.setProperty("fill", fill);
  return circle;
}

function legendOf(series) {
  return series.map((one) => {
    const text = one.link ? h("a", { href: one.link, class: "name", title: one.name.slice(0, 400) }, h("bdi", {}, one.name.slice(0, 400))) : h("bdi", { class: "name" }, one.name);
    return h("li", {}, h("span", { class: "key", style: { background: one.color } }), text);
  });
}

/// Lines or stacked areas along time; with `gaps`, zero is nothing and not a number. A model has `times` and `series` of {name, color, values, link}; `limit` is a line of its own.
export function overTime(title, about, id, { stacked = false, format = count, height: HEIGHT = 220, gaps = false } = {}) {
  const frame = figure(title, about, id);
  let model = null;
  let pointed = null;
  // As wide as it is shown, so that letters have the same size on a phone.
  let wide = 640;
  const tip = h("div", { class: "tip", hidden: true });
  const picture = svg("svg", { viewBox: `0 0 ${wide} ${HEIGHT}`, role: "img", preserveAspectRatio: "none" });
  const cross = svg("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
  frame.plot.append(picture, tip);

  const x = (place) => LEFT + ((wide - LEFT - RIGHT) * place) / Math.max(model.times.length - 1, 1);

  function draw(next) {
    model = next;
    const { times, series } = model;
    wide = Math.max(260, frame.plot.clientWidth || wide);
    picture.setAttribute("viewBox", `0 0 ${wide} ${HEIGHT}`);
    if (!series.length || times.length < 2) {
      show(picture, svg("text", { x: wide / 2, y: HEIGHT / 2, "text-anchor": "middle" }, times.length < 2 ? "Gathering the first seconds" : "Nothing to show yet"));
      picture.setAttribute("aria-label", `${title}: nothing to show yet`);
      show(frame.legend);
      frame.columns = frame.keys = null;
      return;
    }
    const sums = times.map(() => 0);
    const layers = series.map((one) => {
      const from = stacked ? [...sums] : null;
      one.values.forEach((value, place) => (sums[place] = stacked ? sums[place] + value : Math.max(sums[place], value)));
      return { one, from, to: stacked ? [...sums] : one.values };
    });
    const most = Math.max(...sums, ...(model.limit ?? [0]), model.least ?? 1);
    const ticks = ticksTo(most);
    const highest = ticks.at(-1);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / highest);
    const parts = ticks.map((tick) => [
      svg("line", { class: "grid-line", x1: LEFT, x2: wide - RIGHT, y1: y(tick), y2: y(tick) }),
      svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick)),
    ]);
    // Not more than there are seconds: two would stand in one place.
    const marks = Math.min(wide < 420 ? 3 : 5, times.length);
    for (let mark = 0; mark < marks; mark += 1) {
      const place = Math.round(((times.length - 1) * mark) / (marks - 1));
      const anchor = mark === 0 ? "start" : mark === marks - 1 ? "end" : "middle";
      parts.push(svg("text", { x: x(place), y: HEIGHT - 6, "text-anchor": anchor }, ago(times, place)));
    }
    for (const { one, from, to } of layers) {
      const line = to.map((value, place) => `${x(place).toFixed(1)} ${y(value).toFixed(1)}`);
      if (stacked) {
        const back = from.map((value, place) => `${x(place).toFixed(1)} ${y(value).toFixed(1)}`).reverse();
        const area = svg("path", { d: `M${line.join("L")}L${back.join("L")}Z`, "fill-opacity": "0.75" });
        area.style.setProperty("fill", one.color);
        parts.push(area);
      } else {
        const path = svg("path", { class: "line", d: gaps ? broken(line, to) : `M${line.join("L")}` });
        path.style.setProperty("stroke", one.color);
        parts.push(path);
        if (gaps) parts.push(lonely(to).map((place) => dot(x(place), y(to[place]), one.color)));
      }
    }
    if (model.limit) {
      const line = model.limit.map((value, place) => `${x(place).toFixed(1)} ${y(value).toFixed(1)}`);
      parts.push(svg("path", { class: "limit", d: `M${line.join("L")}` }));
    }
    show(picture, parts, cross);
    const last = series.slice(0, 5).map((one) => `${one.name.slice(0, 60)} ${format(one.values.at(-1))}`);
    picture.setAttribute("aria-label", `${title}. Now: ${last.join(", ")}.`);
    const keys = series.map((one) => `${one.name}\u0000${one.color}`).join("\u0001");
    if (frame.keys !== keys && !isInUse(frame.legend)) {
      frame.keys = keys;
      const limit = model.limit ? [{ name: model.limitName, color: "var(--c8)" }] : [];
      show(frame.legend, legendOf([...series, ...limit]));
    }
    frame.columns = ["Series", "Now", "Highest", "Lowest"];
    frame.cells = () =>
      series.map((one) => [one.name.slice(0, 400), format(one.values.at(-1)), format(Math.max(...one.values)), format(Math.min(...one.values))]);
    frame.tabulate();
    frame.node.dataset.now = JSON.stringify(series.map((one) => [one.name.slice(0, 400), one.values.at(-1)]));
    point();
  }

  function point() {
    if (pointed === null || !model?.series.length || model.times.length < 2) {
      tip.hidden = true;
      cross.setAttribute("visibility", "hidden");
      return;
    }
    const place = Math.max(0, Math.min(model.times.length - 1, Math.round(pointed * (model.times.length - 1))));
    cross.setAttribute("x1", x(place));
    cross.setAttribute("x2", x(place));
    cross.setAttribute("visibility", "visible");
    const lines = model.series
      .map((one) => ({ ...one, value: one.values[place] }))
      .sort((one, other) => other.value - one.value)
      .slice(0, 9);
    show(
      tip,
      h("strong", {}, new Date(model.times[place]).toLocaleTimeString("en-GB")),
      lines.map((one) =>
        h("div", { class: "pair" }, h("span", {}, h("span", { class: "key", style: { background: one.color } }), h("bdi", { class: "name" }, one.name.slice(0, 80))), h("span", {}, format(one.value))),
      ),
    );
    tip.hidden = false;
    const side = pointed < 0.55 ? ["left", "right"] : ["right", "left"];
    const share = (x(place) / wide) * 100;
    tip.style.setProperty(side[0], `calc(${side[0] === "left" ? share : 100 - share}% + 12px)`);
    tip.style.setProperty(side[1], "auto");
    tip.style.setProperty("top", "6px");
  }

  frame.plot.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    pointed = (share * wide - LEFT) / (wide - LEFT - RIGHT);
    point();
  });
  frame.plot.addEventListener("pointerleave", () => {
    pointed = null;
    point();
  });
  return { node: frame.node, draw };
}

/// Bars, one under the other. A model is a list of {name (an element), label, parts: [[class, number]], value}.
export function bars(title, about, id, { none = "Nothing to show yet.", legend = [] } = {}) {
  const frame = figure(title, about, id);
  show(frame.legend, legendOf(legend));
  return {
    node: frame.node,
    draw(rows) {
      if (isInUse(frame.plot)) return;
      if (!rows.length) show(frame.plot, h("p", { class: "nothing" }, none));
      else {
        const most = Math.max(...rows.map((row) => row.value), 1);
        const list = rows.map((row) => {
          const parts = row.parts.map(([className, number]) => h("span", { class: `part ${className}`, style: { width: `${(number / most) * 100}%` } }));
          return h("li", { "data-value": row.value, "data-name": row.label.slice(0, 400) }, row.name, h("span", { class: "track", "aria-hidden": "true" }, parts), h("span", { class: "count" }, count(row.value)));
        });
        show(frame.plot, h("ol", { class: "bars" }, list));
      }
      frame.columns = ["Name", "Count"];
      frame.cells = () => rows.map((row) => [row.label.slice(0, 400), count(row.value)]);
      frame.tabulate();
    },
  };
}

// From quick to slow, in equal steps for the eye: in the light, from pale to dark; in the dark, the other way round.
const LIGHT = [[226, 243, 240], [134, 207, 197], [44, 150, 150], [47, 92, 150], [88, 28, 110]];
const DARK = [[24, 56, 62], [20, 105, 106], [46, 160, 140], [190, 190, 90], [255, 214, 120]];

function shade(share, dark) {
  const ramp = dark ? DARK : LIGHT;
  const at = Math.max(0, Math.min(1, share)) * (ramp.length - 1);
  const [low, high] = [ramp[Math.floor(at)], ramp[Math.ceil(at)]];
  return `rgb(${low.map((from, place) => Math.round(from + (high[place] - from) * (at % 1))).join(" ")})`;
}

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/// A heat map along time: a lane per row, darker (in the dark: brighter) for more. A model has `times` (of the columns) and `rows` of {name, label, values, shown}.
export function heatMap(title, about, id, { format }) {
  const frame = figure(title, about, id);
  const tip = h("div", { class: "tip", hidden: true });
  return {
    node: frame.node,
    draw({ times, rows }) {
      if (isInUse(frame.plot)) return;
      const values = rows.flatMap((row) => row.values).filter((value) => value > 0);
      if (!values.length) {
        show(frame.plot, h("p", { class: "nothing" }, "Nothing to show yet."));
        show(frame.legend);
        frame.columns = null;
        return;
      }
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const spread = Math.log(high / low) || 1;
      const dark = isDark();
      const lanes = rows.map((row) => {
        const cells = row.values.map((value, place) =>
          value > 0 ? svg("rect", { x: place + 0.04, y: 0, width: 0.92, height: 1, fill: shade(Math.log(value / low) / spread, dark) }) : null,
        );
        const worst = Math.max(...row.values);
        const strip = svg("svg", { viewBox: `0 0 ${times.length} 1`, preserveAspectRatio: "none", role: "img", "aria-label": `${row.label.slice(0, 60)}: up to ${format(worst)}` }, cells.filter(Boolean));
        strip.addEventListener("pointermove", (event) => {
          const box = strip.getBoundingClientRect();
          const place = Math.max(0, Math.min(times.length - 1, Math.floor(((event.clientX - box.left) / box.width) * times.length)));
          show(tip, h("strong", {}, h("bdi", { class: "name" }, row.label.slice(0, 60))), h("div", { class: "pair" }, h("span", {}, new Date(times[place]).toLocaleTimeString("en-GB")), h("span", {}, row.values[place] ? format(row.values[place]) : "nothing")));
          const outer = frame.plot.getBoundingClientRect();
          tip.hidden = false;
          tip.style.setProperty("left", `${Math.min(event.clientX - outer.left + 12, outer.width - 190)}px`);
          tip.style.setProperty("top", `${box.bottom - outer.top + 6}px`);
        });
        strip.addEventListener("pointerleave", () => (tip.hidden = true));
        return h("div", { class: "lane", "data-name": row.label.slice(0, 400), "data-worst": worst }, row.name, strip);
      });
      const axis = h("div", { class: "lane" }, h("span", {}), h("span", { class: "axis" }, h("span", {}, ago(times, 0)), h("span", {}, "now")));
      show(frame.plot, h("div", { class: "heat" }, lanes, axis), tip);
      const steps = Array.from({ length: 24 }, (_, place) => svg("rect", { x: place, y: 0, width: 1.05, height: 1, fill: shade(place / 23, dark) }));
      show(frame.legend, h("li", { class: "scale" }, h("span", {}, format(low)), svg("svg", { viewBox: "0 0 24 1", preserveAspectRatio: "none", "aria-hidden": "true" }, steps), h("span", {}, format(high))));
      frame.columns = ["Group", "Now", "Highest"];
      frame.cells = () => rows.map((row) => [row.label.slice(0, 400), format(row.values.at(-1)), format(Math.max(...row.values))]);
      frame.tabulate();
    },
  };
}

/// A small line without words; the number stands beside it.
export function spark(values, tone = "var(--accent)") {
  const most = Math.max(...values, 1e-9);
  const points = values.map((value, place) => `${((place / Math.max(values.length - 1, 1)) * 100).toFixed(2)} ${(28 - (value / most) * 26).toFixed(2)}`);
  const line = svg("path", { d: points.length > 1 ? `M${points.join("L")}` : "", fill: "none", "stroke-width": "1.6", "vector-effect": "non-scaling-stroke" });
  const area = svg("path", { d: points.length > 1 ? `M0 30L${points.join("L")}L100 30Z` : "", "fill-opacity": "0.12" });
  line.style.setProperty("stroke", tone);
  area.style.setProperty("fill", tone);
  return svg("svg", { class: "spark", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
}
