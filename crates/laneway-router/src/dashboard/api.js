// What the pages know of the service: requests with the token, the history, and the seconds as they come.

const TOKEN = "laneway-token";

/// How long a look may take.
const LOOK = 20000;

/// Something that the service refused, or that kept it from answering.
export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

/// Called when a token is needed; gives one, or nothing.
let askForToken = async () => null;
let asking = null;

export function onTokenNeeded(ask) {
  askForToken = ask;
}

function headers(more) {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { ...more, authorization: `Bearer ${token}` } : { ...more };
}

async function problemOf(response) {
  try {
    return new Refused(response.status, (await response.json()).detail ?? response.statusText);
  } catch {
    return new Refused(response.status, response.statusText || `status ${response.status}`);
  }
}

/// A response, whatever its status but 401: then a token is asked for, once for all who wait, and the request is made again.
async function send(path, options, wrong) {
  let response;
  try {
    // Who only looks gives up at some time and looks again; a change takes as long as the service lets it.
    const limit = options.method ? undefined : AbortSignal.timeout(LOOK);
    response = await fetch(path, { cache: "no-store", ...options, signal: options.signal ?? limit, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The service does not answer.");
  }
  if (response.status !== 401) return response;
  const used = sessionStorage.getItem(TOKEN);
  asking ??= askForToken(wrong ?? used !== null).finally(() => (asking = null));
  const token = await asking;
  if (!token) throw await problemOf(response);
  sessionStorage.setItem(TOKEN, token);
  return send(path, options, true);
}

export async function get(path, signal) {
  const response = await send(path, { signal });
  if (!response.ok) throw await problemOf(response);
  return response.json();
}

/// A list of which there may be more, and whether there is: a page may end before it is as long as was asked for.
export async function getPage(path) {
  const response = await send(path, {});
  if (!response.ok) throw await problemOf(response);
  return { list: await response.json(), more: response.headers.has("link") };
}

/// The same work, never twice at a time: asked for while it goes on, it is done once more after that.
export function oneAtATime(work) {
  let [busy, again] = [false, false];
  return async () => {
    again = true;
    if (busy) return;
    busy = true;
    try {
      while (again) {
        again = false;
        await work();
      }
    } finally {
      busy = false;
    }
  };
}

export async function change(method, path, body) {
  const options = { method };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers = { "content-type": "application/json" };
  }
  const response = await send(path, options);
  if (!response.ok) throw await problemOf(response);
  return response.status === 204 ? null : response.json();
}

/// A path of names that may contain anything.
export function path(...parts) {
  return "/" + parts.map((part) => encodeURIComponent(part)).join("/");
}

// ── the history ─────────────────────────────────────────────────────────────────────────────────────────────────────

const POOL_NUMBERS = [
  "submitted", "succeeded", "failed", "retried", "heldBack", "refused", "givenBack", "waiting", "inFlight", "slots", "busy",
  "p50Micros", "p95Micros", "p99Micros",
];
const GROUP_NUMBERS = ["depth", "attempts", "failures", "busy", "meanMicros", "maxMicros"];

/// The last minutes. Every list is as long as `times`; what is not known is zero.
export const history = { number: 0, seconds: 300, times: [], pools: new Map(), groups: new Map(), deepest: [], now: null };

const listeners = new Set();

/// Calls `listener` for every second, and when the state of the connection changes; gives what ends that.
export function onSecond(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

let connection = "waiting";
let onConnection = () => {};

export function watchConnection(listener) {
  onConnection = listener;
}

function turn(state, why) {
  connection = state;
  onConnection(state, why);
}

export function isLive() {
  return connection === "live";
}

function padded(list, length) {
  return list.length >= length ? list.slice(-length) : [...new Array(length - list.length).fill(0), ...list];
}

function takeWhole(whole) {
  const length = whole.times.length;
  Object.assign(history, { number: whole.number, seconds: whole.seconds, times: whole.times, deepest: whole.deepest, now: whole.now });
  history.pools = new Map();
  for (const pool of whole.pools) {
    const row = { code: pool.code };
    for (const name of POOL_NUMBERS) row[name] = padded(pool[name], length);
    history.pools.set(pool.code, row);
  }
  history.groups = new Map();
  for (const group of whole.groups) {
    const row = { number: group.number, pool: group.pool, group: group.group };
    for (const name of GROUP_NUMBERS) row[name] = padded(group[name], length);
    history.groups.set(group.number, row);
  }
}

function append(rows, points, keyOf, names, make) {
  const length = history.times.length;
  const there = new Set();
  for (const point of points) {
    const key = keyOf(point);
    there.add(key);
    let row = rows.get(key);
    if (!row) {
      row = make(point);
      for (const name of names) row[name] = new Array(length - 1).fill(0);
      rows.set(key, row);
    }
    for (const name of names) row[name] = padded([...row[name], point[name]], length);
  }
  for (const key of rows.keys()) if (!there.has(key)) rows.delete(key);
}

function takeSecond(second) {
  history.number = second.number;
  history.times = [...history.times, second.at].slice(-history.seconds);
  history.deepest = second.deepest;
  history.now = second.now;
  append(history.pools, second.pools, (pool) => pool.code, POOL_NUMBERS, ({ code }) => ({ code }));
  append(history.groups, second.groups, (it) => it.number, GROUP_NUMBERS, ({ number, pool, group }) => ({ number, pool, group }));
}

function tell() {
  for (const listener of [...listeners]) listener();
}

/// Lines of an event stream, gathered into events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const data = text.slice(0, end).split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
      text = text.slice(end + 2);
      if (data.length) yield data.join("\n");
    }
  }
}

const wait = (millis) => new Promise((resolve) => setTimeout(resolve, millis));

/// A service that has told nothing for so long is away, whatever the connection says.
const SILENCE = 5000;

/// Resolves while somebody can see the page.
function seen() {
  return new Promise((resolve) => {
    const look = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", look);
      resolve();
    };
    document.addEventListener("visibilitychange", look);
    look();
  });
}

/// One connection: the whole history, then every second. `heard` is called whenever something came.
async function follow(signal, heard) {
  const response = await send("/api/stream", { signal });
  if (!response.ok) throw await problemOf(response);
  heard();
  takeWhole(await get("/api/history", signal));
  turn("live");
  heard();
  tell();
  for await (const data of events(response.body)) {
    heard();
    const second = JSON.parse(data);
    if (second.number <= history.number) continue;
    if (second.number === history.number + 1) takeSecond(second);
    else takeWhole(await get("/api/history", signal));
    tell();
  }
  throw new Refused(0, "The service has ended the connection.");
}

/// Reads along for ever, while the page is seen; from the beginning again after anything went wrong.
export async function readAlong() {
  let pause = 250;
  for (;;) {
    await seen();
    const stream = new AbortController();
    let watchdog;
    const watch = () => {
      clearTimeout(watchdog);
      // Somebody who is asked for the token may take his time.
      watchdog = setTimeout(() => (asking ? watch() : stream.abort()), SILENCE);
    };
    const hide = () => document.hidden && stream.abort();
    document.addEventListener("visibilitychange", hide);
    watch();
    try {
      await follow(stream.signal, watch);
    } catch (error) {
      const why = stream.signal.aborted ? "The service does not answer." : error.message;
      clearTimeout(watchdog);
      document.removeEventListener("visibilitychange", hide);
      stream.abort();
      if (document.hidden) continue;
      pause = isLive() ? 500 : Math.min(pause * 2, 5000);
      turn("away", why);
      await wait(pause);
    }
  }
}
