// What the server has told: rows, topics, and whether it and the store answer.

export const state = {
  rows: new Map(), changed: new Set(), listChanged: true, topics: {}, hello: null,
  page: null, connected: false, lostAt: null, rowsDue: 0, paused: false, refused: false,
};
let offset = Date.now() / 1000 - performance.now() / 1000;
export const now = () => performance.now() / 1000 + offset;   // on the server's wall clock

const listeners = new Set();
export const onChange = f => listeners.add(f);
let scheduled = false;
function changed() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => { scheduled = false; for (const f of listeners) f(); });
}

// Until the first message about the store, nothing is known about it.
export const isWaiting = () => state.connected ? state.topics.health == null : state.lostAt == null;
export const health = () => state.topics.health ?? { reachable: true, as_of: null };
// Until when anything is known: now, or when the store was last heard of.
export function known() {
  if (!state.connected && state.lostAt != null) return Math.min(state.lostAt, health().as_of ?? state.lostAt);
  const h = health();
  return h.reachable ? now() : (h.as_of ?? h.since ?? now());
}
export const isLive = () => state.connected && !isWaiting() && health().reachable;

// The token is in the part of the address that is not sent, and is kept for this tab only.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get('token');
  if (given) {
    try { sessionStorage.setItem('doyen-token', given); } catch { /* kept in memory */ }
    history.replaceState(null, '', location.pathname);
    return given;
  }
  try { return sessionStorage.getItem('doyen-token'); } catch { return null; }
}
const token = takeToken();
const headers = token ? { authorization: `Bearer ${token}` } : {};

export async function get(path, query) {
  const answer = await fetch(`${path}?${new URLSearchParams(query)}`, { headers, cache: 'no-store' });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}
export async function post(path, body) {
  const answer = await fetch(path, {
    method: 'POST', headers: { ...headers, 'content-type': 'application/json' }, body: JSON.stringify(body),
  });
  const result = await answer.json();
  if (!answer.ok) throw new Error(result.error);
  return result;
}

const SILENT_MS = 4000;   // the server writes at least once a second
const HIDDEN_MS = 3000;   // a page that nobody has seen for this long gives up its connection
let fresh = null;
function take(kind, data) {
  const message = JSON.parse(data);
  if (kind === 'hello') { state.hello = message; fresh = new Set(); changed(); return; }
  const { now: at, page, rows_in_all: all, rows, gone, ...topics } = message;
  offset = at - performance.now() / 1000;
  // The first message of a connection has all topics: what another server told is out of date.
  if (page) { state.page = page; state.rowsDue = all; state.topics = topics; } else Object.assign(state.topics, topics);
  for (const row of rows ?? []) {
    if (!state.rows.has(row.key)) state.listChanged = true;
    state.rows.set(row.key, row);
    state.changed.add(row.key);
    fresh?.add(row.key);
  }
  for (const key of gone ?? []) { state.rows.delete(key); state.listChanged = true; fresh?.add(key); }
  if (fresh && fresh.size >= state.rowsDue) {   // what an earlier connection had told is out of date
    for (const key of [...state.rows.keys()]) if (!fresh.has(key)) { state.rows.delete(key); state.listChanged = true; }
    fresh = null;
  }
  if (!state.connected) { state.connected = true; state.lostAt = null; state.listChanged = true; }
  changed();
}

// A browser has six connections to a server for all its tabs, and a page that is open takes one. So
// a page that nobody sees gives up its own, and asks again when it is shown.
let hiding = 0, current = null, shown = () => {};
function look() {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => { state.paused = true; current?.abort(); }, HIDDEN_MS);
  else if (state.paused) { state.paused = false; shown(); }
}
document.addEventListener('visibilitychange', look);
look();   // a tab may be opened in the background

async function stream() {
  const abort = current = new AbortController();
  let timer = 0;
  const alive = () => { clearTimeout(timer); timer = setTimeout(() => abort.abort(new Error(`nothing was heard for ${SILENT_MS / 1000} s`)), SILENT_MS); };
  alive();
  try {
    const answer = await fetch('api/stream', { headers, cache: 'no-store', signal: abort.signal });
    state.refused = !answer.ok;
    if (!answer.ok) throw new Error((await answer.json()).error);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = '';
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error('the server has closed the connection');
      alive();
      text += value;
      const parts = text.split('\n\n');
      text = parts.pop();
      for (const part of parts) {
        const kind = /^event: (\w+)/m.exec(part)?.[1], data = /^data: (.*)/m.exec(part)?.[1];
        if (data) take(kind, data);
      }
    }
  } finally { clearTimeout(timer); abort.abort(); }   // a connection that is not read stays open otherwise
}

export async function follow() {
  for (let pause = 250; ; pause = Math.min(5000, pause * 2)) {
    try { await stream(); } catch (error) { state.problem = error instanceof TypeError ? 'it cannot be reached' : String(error.message ?? error); }
    if (state.connected) { state.connected = false; pause = 250; }
    if (state.paused) { state.lostAt = null; await new Promise(done => { shown = done; }); continue; }
    state.lostAt ??= now();
    changed();
    await new Promise(done => { state.retry = done; setTimeout(done, pause); });
  }
}
