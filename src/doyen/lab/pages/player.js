/* Draws a film (see film.py): lanes over virtual time on two canvases, the story beside them.

   Scene   one recording, decoded: arrays to search by time
   Fold    the scale: virtual time in which nothing but heartbeats happens takes little room
   view    what is drawn when the window moves; top: what is drawn when the cursor moves
   Play    only on a page of `doyen lab play`: changes the run

   Text of the film is only ever set as text. Times are microseconds. */
'use strict';
(() => {
const $ = id => document.getElementById(id);
const el = (tag, name, text) => { const e = document.createElement(tag); if (name) e.className = name; if (text != null) e.textContent = text; return e; };
const clip = (text, most) => text.length > most ? text.slice(0, most - 1) + '…' : text;
const secs = (t, digits = 3) => (t / 1e6).toFixed(digits);
const clamp = (v, lo, hi) => Math.max(lo, Math.min(hi, v));
/* The first place in a sorted array whose value is above (or, with `from`, not below) v. */
function above(list, v, get) { let lo = 0, hi = list.length; while (lo < hi) { const k = (lo + hi) >> 1; if ((get ? get(list[k]) : list[k]) > v) hi = k; else lo = k + 1; } return lo; }

const ICONS = {
  other: [['circle', { cx: 7, cy: 7, r: 3, fill: 'none', stroke: 'var(--faint)', 'stroke-width': 1.6 }]],
  asks: [['path', { d: 'M2 7h8M7 3.5 10.5 7 7 10.5', fill: 'none', stroke: 'var(--ask)', 'stroke-width': 1.8 }]],
  yes: [['circle', { cx: 7, cy: 7, r: 5.5, fill: 'var(--yes)' }], ['path', { d: 'M4.4 7.2 6.3 9l3.4-4', fill: 'none', stroke: 'var(--panel)', 'stroke-width': 1.6 }]],
  no: [['rect', { x: 1.8, y: 1.8, width: 10.4, height: 10.4, rx: 2, fill: 'var(--no)' }], ['path', { d: 'm4.6 4.6 4.8 4.8m0-4.8L4.6 9.4', stroke: 'var(--panel)', 'stroke-width': 1.6 }]],
  leads: [['circle', { cx: 7, cy: 7, r: 5.5, fill: 'var(--lead)' }]],
  follows: [['circle', { cx: 7, cy: 7, r: 4, fill: 'var(--follow)', stroke: 'var(--faint)' }]],
  entry: [['rect', { x: 2, y: 4, width: 10, height: 6, rx: 1.5, fill: 'var(--g0)' }]],
  fault: [['path', { d: 'M7.8 1 3 8h3.4L5.8 13 11 6H7.4z', fill: 'var(--red)' }]],
  healed: [['path', { d: 'M1.5 7H5l1.5-3 2 6L10 7h2.5', fill: 'none', stroke: 'var(--green)', 'stroke-width': 1.6 }]],
  order: [['path', { d: 'M3 2v10M3 3h8l-2.5 2.5L11 8H3', fill: 'none', stroke: 'var(--muted)', 'stroke-width': 1.5 }]],
  note: [],
  violation: [['path', { d: 'M7 1.4 13 12.4H1z', fill: 'none', stroke: 'var(--red)', 'stroke-width': 1.7, 'stroke-linejoin': 'round' }], ['path', { d: 'M7 5.6v3M7 10.3v.3', stroke: 'var(--red)', 'stroke-width': 1.6, 'stroke-linecap': 'round' }]],
  first: [['rect', { x: 1.5, y: 2, width: 2, height: 10, rx: .6, fill: 'currentColor' }], ['path', { d: 'M12.5 2.6v8.8L5 7z', fill: 'currentColor' }]],
  back: [['path', { d: 'M9 2.5 4.5 7 9 11.5', fill: 'none', stroke: 'currentColor', 'stroke-width': 1.8 }]],
  next: [['path', { d: 'M5 2.5 9.5 7 5 11.5', fill: 'none', stroke: 'currentColor', 'stroke-width': 1.8 }]],
  play: [['path', { d: 'M3 1.8v10.4L12 7z', fill: 'currentColor' }]],
  pause: [['rect', { x: 2.5, y: 2, width: 3.2, height: 10, rx: .8, fill: 'currentColor' }], ['rect', { x: 8.3, y: 2, width: 3.2, height: 10, rx: .8, fill: 'currentColor' }]],
  theme: [['circle', { cx: 7, cy: 7, r: 5.2, fill: 'none', stroke: 'currentColor', 'stroke-width': 1.5 }], ['path', { d: 'M7 1.8a5.2 5.2 0 0 1 0 10.4z', fill: 'currentColor' }]],
};
function shape(parts, width = 14, height = 14) {
  const make = (tag, attributes) => { const e = document.createElementNS('http://www.w3.org/2000/svg', tag); for (const k in attributes) e.setAttribute(k, attributes[k]); return e; };
  const e = make('svg', { width, height, viewBox: `0 0 ${width} ${height}`, 'aria-hidden': 'true' });
  for (const [tag, attributes] of parts) e.append(make(tag, attributes));
  return e;
}
const icon = name => shape(ICONS[name] || ICONS.other);

// ---- the data ------------------------------------------------------------------------------

const LOOK = {                       // by category: colour, whether it is drawn faintly
  votes: ['ask', false], entries: ['entry', false], heartbeats: ['beat', true],
  questions: ['ask', false], changes: ['entry', false], renewals: ['beat', true], notifications: ['yes', false],
};
const DOWN = 0, LOOKING = 1, LEADING = 3;

class Scene {
  constructor(raw) {
    this.raw = raw;
    this.lanes = raw.lanes.map(name => clip(name, 60));
    this.n = raw.lanes.length;
    this.end = raw.end;
    this.kinds = raw.kinds.map(kind => { const [colour, faint] = LOOK[kind.category] || ['entry', false]; return { ...kind, faint, dashed: kind.name.startsWith('pre vote'), colour: kind.tag === 'granted' ? 'yes' : kind.tag === 'refused' ? 'no' : colour }; });
    this.categories = [...new Set(raw.kinds.map(kind => kind.category))];
    this.readMessages(raw);
    this.readRoles(raw);
    this.readLogs(raw);
    this.story = raw.story.map(([at, kind, text]) => ({ at, kind, text }));
    this.marks = raw.marks.map(([at, lane, label]) => ({ at, lane, label: clip(label, 200) })).sort((a, b) => a.at - b.at);
    this.bad = raw.violations.length ? raw.violations[0].at : null;
    const times = new Set();
    for (let i = 0; i < this.m; i++) { times.add(this.sent[i]); if (this.fate[i] === 0) times.add(this.arrives[i]); }
    for (const [, at] of raw.roles) times.add(at);
    for (const line of this.story) times.add(line.at);
    times.add(this.end);
    this.times = Float64Array.from([...times].filter(t => t <= this.end)).sort();
  }
  readMessages(raw) {
    const m = this.m = raw.messages.length, ok = raw.fates.indexOf('arrived');
    this.sent = new Float64Array(m); this.arrives = new Float64Array(m); this.reach = new Float64Array(m);
    this.from = new Uint8Array(m); this.to = new Uint8Array(m); this.kind = new Uint8Array(m); this.fate = new Uint8Array(m); this.busy = new Int32Array(m + 1);
    const took = raw.messages.filter(r => r[5] === ok).map(r => r[1] - r[0]).sort((a, b) => a - b);
    this.latency = took.length ? took[took.length >> 1] : 1e4;
    let reach = 0;
    raw.messages.forEach((row, i) => {
      const [sent, arrives, from, to, kind, fate] = row;
      this.sent[i] = sent; this.arrives[i] = arrives >= 0 ? arrives : sent + this.latency; this.from[i] = from; this.to[i] = to; this.kind[i] = kind;
      this.fate[i] = fate === ok ? 0 : fate === raw.fates.indexOf('unreceived') ? 2 : 1;
      this.reach[i] = reach = Math.max(reach, this.arrives[i]);
      this.busy[i + 1] = this.busy[i] + (this.kinds[kind].faint ? 0 : 1);
    });
  }
  readRoles(raw) {
    this.roles = raw.lanes.map(() => []);
    for (const [lane, at, role, label] of raw.roles) {
      const spans = this.roles[lane], last = spans.at(-1);
      if (last) { if (last.from === at) spans.pop(); else last.to = at; }
      spans.push({ from: at, to: Infinity, role, label: clip(raw.labels[label], 80) });
    }
  }
  readLogs(raw) {
    this.logs = raw.lanes.map(() => new Map()); this.lasts = raw.lanes.map(() => [[0, 0]]); this.tallest = [[0, 0]];
    const changes = raw.lanes.map(() => []);
    const tags = [...new Set(raw.logs.map(r => r[2]))].sort((a, b) => a - b);
    this.tag = new Map(tags.map((g, k) => [g, k % 4]));
    for (const [lane, index, generation, from, committed, until] of raw.logs) {
      const rows = this.logs[lane], row = { index, generation, tag: this.tag.get(generation), from, committed: committed < 0 ? Infinity : committed, until: until < 0 ? Infinity : until };
      if (row.until <= row.from) continue;
      if (!rows.has(index)) rows.set(index, []);
      rows.get(index).push(row); changes[lane].push([from, 1, index]); if (until >= 0) changes[lane].push([until, 0, index]);
    }
    for (const [lane, at, index] of raw.bases) changes[lane].push([at, -1, index]);
    changes.forEach((list, lane) => {
      const there = new Set(); let last = 0, base = 0;
      for (const [at, add, index] of list.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
        if (add < 0) base = index; else if (add) there.add(index); else there.delete(index);
        if (add > 0) last = Math.max(last, index); else while (last > 0 && !there.has(last)) last--;
        this.lasts[lane].push([at, Math.max(last, base)]); this.tallest.push([at, Math.max(last, base)]);
      }
    });
    this.tallest.sort((a, b) => a[0] - b[0]); let most = 0; for (const step of this.tallest) step[1] = most = Math.max(most, step[1]);
  }
  at(list, t) { return list[above(list, t, step => step[0]) - 1][1]; }
  roleAt(lane, t) { const spans = this.roles[lane]; return spans[above(spans, t, s => s.from) - 1] || { role: DOWN, label: '' }; }
  entryAt(lane, index, t) { return (this.logs[lane].get(index) || []).find(row => row.from <= t && t < row.until); }
  says(i) { const row = this.raw.messages[i], kind = this.kinds[row[4]]; let k = 8; return kind.says.replace(/\{\w+\}/g, () => clip(String(row[k++]), 300)); }
  range(t0, t1) { return [above(this.reach, t0 - 1), above(this.sent, t1)]; }
}

class Fold {
  constructor(scene, on) {
    const pad = this.pad = clamp(2 * scene.latency, 4e3, 5e4), t = this.t = [], u = this.u = []; this.gaps = [];
    const busy = [0, scene.end];
    for (let i = 0; i < scene.m; i++) if (!scene.kinds[scene.kind[i]].faint) busy.push(scene.sent[i], Math.min(scene.end, scene.arrives[i]));
    for (const [, at] of scene.raw.roles) busy.push(at);
    for (const line of scene.story) busy.push(line.at);
    for (const mark of scene.marks) busy.push(mark.at);
    busy.sort((a, b) => a - b); t.push(-1e6); u.push(-1e6); let shift = 0;
    for (let k = 1; k < busy.length; k++) {
      const a = busy[k - 1] + pad, b = busy[k] - pad, keep = 1.4 * pad;
      if (!on || b - a < 4 * pad) continue;
      t.push(a); u.push(a - shift); shift += b - a - keep; t.push(b); u.push(b - shift); this.gaps.push([a, b]);
    }
    t.push(scene.end + 1e7); u.push(scene.end + 1e7 - shift);
  }
  map(v, x, y) { const k = clamp(above(x, v), 1, x.length - 1); return y[k - 1] + (v - x[k - 1]) / (x[k] - x[k - 1]) * (y[k] - y[k - 1]); }
  on(t) { return this.map(t, this.t, this.u); }
  off(u) { return this.map(u, this.u, this.t); }
  inside(t0, t1) { const k = above(this.gaps, t0, g => g[0]) - 1; return k >= 0 && t1 < this.gaps[k][1]; }
}

// ---- state ---------------------------------------------------------------------------------

let film = JSON.parse($('film').textContent), scene, fold, folding = true;
let at = 0, from = 0, wide = 1e6, playing = false, speed = .05, hot = null, pinned = null, sparse = 0;
let hidden = new Set();
const view = $('view'), over = $('over'), ctx = view.getContext('2d'), octx = over.getContext('2d'), tctx = $('top').getContext('2d');
const phone = () => innerWidth <= 720;
let W = 0, H = 0, LH = 104, C = {};
const TOP = 56, BH = 18, OVER = 66, CAP = 900, DOTS = 14;
const X = t => (fold.on(t) - from) / wide * W, T = x => fold.off(from + x / W * wide), UEND = () => fold.on(scene.end) + fold.pad;
const laneY = lane => TOP + lane * LH, bandY = lane => laneY(lane) + 13, rows = () => Math.max(1, Math.floor((LH - 13 - BH - 13) / 9));
const shownKind = kind => !hidden.has(kind.category);

function colours() {
  const probe = el('span'); document.body.append(probe); C = {};
  for (const k of ['panel', 'sunken', 'line', 'line-soft', 'text', 'muted', 'faint', 'blue', 'red', 'red-soft', 'amber-fill', 'amber', 'follow', 'look', 'lead', 'down', 'on-follow', 'on-look', 'on-lead', 'beat', 'entry', 'ask', 'yes', 'no', 'g0', 'g1', 'g2', 'g3', 'veil', 'cut', 'cutline']) { probe.style.color = `var(--${k})`; C[k] = getComputedStyle(probe).color; }
  const style = getComputedStyle(document.documentElement); C.sans = style.getPropertyValue('--sans'); C.mono = style.getPropertyValue('--mono'); probe.remove();
}
const roleFill = role => [C.down, C.look, C.follow, C.lead][role], roleText = role => [C.muted, C['on-look'], C['on-follow'], C['on-lead']][role];

function size() {
  const room = innerWidth <= 1100 ? 0 : $('stage').clientHeight - TOP;
  LH = phone() ? 82 : Math.floor(clamp(scene.n ? room / scene.n : 0, 76, 200)); H = TOP + scene.n * LH; W = Math.max(50, $('canvases').clientWidth);
  const d = devicePixelRatio || 1;
  for (const [c, w, h] of [[view, W, H], [$('top'), DOTS, H], [over, over.clientWidth, OVER]]) { c.width = Math.round(w * d); c.height = Math.round(h * d); c.getContext('2d').setTransform(d, 0, 0, d, 0, 0); if (c !== over) c.style.height = h + 'px'; }
  $('canvases').style.height = H + 'px'; for (const g of $('gut').children) g.style.height = LH + 'px';
}

// ---- drawing -------------------------------------------------------------------------------

function rr(c, x, y, w, h, r) { c.beginPath(); c.roundRect(x, y, Math.max(.5, w), h, r); }
function hatch(c, x, y, w, h, gap, colour) { c.save(); c.beginPath(); c.rect(x, y, w, h); c.clip(); c.strokeStyle = colour; c.lineWidth = 1; c.beginPath(); for (let k = x - h - (x % gap); k < x + w; k += gap) { c.moveTo(k, y + h); c.lineTo(k + h, y); } c.stroke(); c.restore(); }
function cross(c, x, y, r, colour, w) { c.strokeStyle = colour; c.lineWidth = w; c.beginPath(); c.moveTo(x - r, y - r); c.lineTo(x + r, y + r); c.moveTo(x + r, y - r); c.lineTo(x - r, y + r); c.stroke(); c.lineWidth = 1; }
function label(c, text, x, y, room, colour, font) { if (room < 12) return false; c.font = font || `500 10.5px ${C.sans}`; if (c.measureText(text).width > room) return false; c.fillStyle = colour; c.fillText(text, x, y); return true; }
function badge(c, x, y, ok, alpha) {
  c.globalAlpha = alpha; c.fillStyle = ok ? C.yes : C.no; c.strokeStyle = C.panel; c.lineWidth = 1.5; if (ok) { c.beginPath(); c.arc(x, y, 6.5, 0, 7); } else rr(c, x - 6, y - 6, 12, 12, 2); c.fill(); c.stroke(); c.lineWidth = 1.7; c.beginPath();
  if (ok) { c.moveTo(x - 3, y); c.lineTo(x - .8, y + 2.4); c.lineTo(x + 3.2, y - 2.4); } else { c.moveTo(x - 2.6, y - 2.6); c.lineTo(x + 2.6, y + 2.6); c.moveTo(x + 2.6, y - 2.6); c.lineTo(x - 2.6, y + 2.6); }
  c.stroke(); c.lineWidth = 1; c.globalAlpha = 1;
}
/* Where a message is drawn: from band to band, or as far as it got. */
function segment(i) {
  const f = scene.from[i], t = scene.to[i], down = t > f, y0 = bandY(f) + (down ? BH : 0), y1 = bandY(t) + (down ? 0 : BH), x0 = X(scene.sent[i]), x1 = X(scene.arrives[i]), part = scene.fate[i] === 1 ? .45 : 1;
  return { x0, y0, x1: x0 + (x1 - x0) * part, y1: y0 + (y1 - y0) * part };
}
function draw() {
  const c = ctx; c.clearRect(0, 0, W, H); c.textBaseline = 'middle'; c.textAlign = 'left';
  const t0 = T(-20), t1 = T(W + 20);
  axis(c); weather(c, t0, t1);
  const later = [];                   // text, which stands above all lines
  for (let lane = 0; lane < scene.n; lane++) { cuts(c, lane, t0, t1, later); log(c, lane, t0, t1); bands(c, lane, t0, t1, later); }
  const ends = messages(c, t0, t1);
  folds(c); for (const write of later) write(); marks(c, t0, t1); votes(c, ends); violations(c); overview(); top();
  const note = $('sparse'); if (note) { note.hidden = sparse < 2; note.textContent = sparse < 2 ? '' : `zoomed out: 1 of ${sparse} messages drawn`; }
}
const STEPS = [1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 2e7, 6e7, 6e8];
function axis(c) {
  const step = STEPS.find(s => s / wide * W > 64) || 6e8, digits = step < 1e4 ? 3 : step < 1e5 ? 2 : step < 1e6 ? 1 : 0, stop = Math.min(scene.end, T(W)); let last = -99;
  c.font = `11px ${C.sans}`;
  for (let k = Math.max(0, Math.ceil(T(0) / step)); k * step <= stop; k++) {
    const t = k * step; if (fold.inside(t, t)) { const gap = fold.gaps[above(fold.gaps, t, g => g[0]) - 1]; k = Math.max(k, Math.floor(gap[1] / step)); continue; }
    const x = Math.round(X(t)) + .5; c.strokeStyle = C['line-soft']; c.beginPath(); c.moveTo(x, TOP); c.lineTo(x, H); c.stroke();
    if (x > 20 && x < W - 20 && x - last > 50) { last = x; c.fillStyle = C.faint; c.textAlign = 'center'; c.fillText(secs(t, digits) + ' s', x, 11); c.textAlign = 'left'; }
  }
}
function weather(c, t0, t1) {
  let row = 0; const free = [-1, -1];
  for (const [kind, , a, b, what] of scene.raw.spans) {
    if (kind !== 'weather' || b < t0 || a > t1) continue;
    const x0 = Math.max(0, X(a)), x1 = Math.min(W, X(b)); row = free.findIndex(x => x < x0); if (row < 0) continue;
    const y = 27 + row * 13; c.fillStyle = C['amber-fill']; rr(c, x0, y - 1, x1 - x0, 3, 1.5); c.fill();
    c.font = `10.5px ${C.sans}`; const w = c.measureText(what).width, right = x1 + 7 + w < W, x = right ? x1 + 7 : x0 + 12; free[row] = Math.max(x1, x + w) + 8;
    if (!right) { c.fillStyle = C.panel; c.fillRect(x - 4, y - 6, w + 8, 12); } c.fillStyle = C.muted; c.fillText(what, x, y + .5);
  }
}
function cuts(c, lane, t0, t1, later) {
  const y = laneY(lane); c.strokeStyle = C['line-soft']; c.beginPath(); c.moveTo(0, Math.round(y) + .5); c.lineTo(W, Math.round(y) + .5); c.stroke();
  for (const [kind, on, a, b, what, share] of scene.raw.spans) {
    if (on !== lane || kind !== 'cut' || b < t0 || a > t1) continue;
    const x0 = Math.max(0, X(a)), x1 = Math.min(W, Math.max(X(b), X(a) + 3)), strong = share > .5;
    if (strong) { c.fillStyle = C.cut; c.fillRect(x0, y + 1, x1 - x0, LH - 1); hatch(c, x0, y + 1, x1 - x0, LH - 1, 9, C.cutline); }
    c.setLineDash([4, 3]); c.strokeStyle = C.red; c.beginPath(); if (strong) for (const e of [a, b]) { c.moveTo(X(e), y + 1); c.lineTo(X(e), y + LH); } else { c.moveTo(x0, y + LH - 3); c.lineTo(x1, y + LH - 3); } c.stroke(); c.setLineDash([]);
    later.push(() => label(c, what, x0 + 7, y + LH - 10, x1 - x0 - 10, C.red));
  }
}
function log(c, lane, t0, t1) {
  const y = bandY(lane) + BH + 9, room = rows(), most = scene.at(scene.tallest, Math.min(t1, scene.end)), base = Math.max(0, most - room), eh = 6;
  for (let index = base + 1; index <= most; index++) for (const e of scene.logs[lane].get(index) || []) {
    if (e.until < t0 || e.from > t1) continue;
    const yy = y + (index - base - 1) * 9, x0 = X(e.from), x1 = X(Math.min(e.until, scene.end)), colour = C['g' + e.tag];
    c.fillStyle = colour; c.globalAlpha = .28; rr(c, Math.max(-4, x0), yy, Math.min(W + 4, x1) - Math.max(-4, x0), eh, 2); c.fill(); c.globalAlpha = 1;
    if (e.committed < e.until && e.committed < t1) { const xc = Math.max(-4, X(e.committed)); rr(c, xc, yy, Math.min(W + 4, x1) - xc, eh, 2); c.fill(); }
    if (x0 > 14) { c.textAlign = 'right'; label(c, String(index), x0 - 3, yy + eh / 2 + .5, 40, C.muted, `500 9.5px ${C.mono}`); c.textAlign = 'left'; }
  }
  if (base) label(c, `${base} earlier`, 5, y - 4, 80, C.faint, `9.5px ${C.sans}`);
  for (const bad of scene.raw.violations) {
    const named = /\bentry (\d+)/.exec(bad.text); if (!named || bad.lanes[0] !== lane) continue;
    const index = +named[1], place = index - base; if (place < 1 || place > room) continue;
    let since = Infinity; for (const rows of scene.logs) for (const e of rows.get(index) || []) since = Math.min(since, e.committed);
    if (since < bad.at) { c.strokeStyle = C.red; c.setLineDash([3, 2.5]); rr(c, X(since), y + (place - 1) * 9 + .5, X(bad.at) - X(since), eh - 1, 2); c.stroke(); c.setLineDash([]); }
  }
}
function bands(c, lane, t0, t1, later) {
  const spans = scene.roles[lane], y = bandY(lane);
  for (let k = Math.max(0, above(spans, t0, s => s.from) - 1); k < spans.length && spans[k].from < t1; k++) {
    const s = spans[k], x0 = Math.max(-4, X(s.from)), x1 = Math.min(W + 4, X(Math.min(s.to, scene.end))); if (x1 < x0) continue;
    if (s.role === DOWN && !s.label) continue;
    c.fillStyle = roleFill(s.role); rr(c, x0, y, x1 - x0 - (x1 - x0 > 4 ? 1 : 0), BH, 3); c.fill();
    if (s.role === DOWN) { hatch(c, x0, y, x1 - x0, BH, 6, C.faint); if (X(s.from) > -10 && k > 0) { const x = X(s.from); c.fillStyle = C.panel; c.strokeStyle = C.red; c.lineWidth = 1.6; c.beginPath(); c.arc(x, y + BH / 2, 8.5, 0, 7); c.fill(); c.stroke(); cross(c, x, y + BH / 2, 3.4, C.red, 2); } continue; }
    later.push(() => { c.font = `500 10.5px ${C.sans}`; const x = beside(Math.max(x0, 0) + 7, c.measureText(s.label).width); label(c, s.label, x, y + BH / 2 + .5, Math.min(x1, W) - x - 5, roleText(s.role)); });
  }
  for (const [kind, on, a, b, what] of scene.raw.spans) {
    if (on !== lane || b < t0 || a > t1 || kind === 'cut') continue;
    const x0 = Math.max(0, X(a)), x1 = Math.min(W, Math.max(X(b), X(a) + 3));
    if (kind === 'paused') { c.globalAlpha = .7; c.fillStyle = C.down; c.fillRect(x0, y, x1 - x0, BH); c.globalAlpha = 1; hatch(c, x0, y, x1 - x0, BH, 5, C.muted); c.font = `500 10.5px ${C.sans}`; const w = c.measureText(what).width; if (x1 - x0 > w + 16) { c.fillStyle = C.panel; rr(c, x0 + 5, y + 2, w + 8, BH - 4, 2); c.fill(); c.fillStyle = C.muted; c.fillText(what, x0 + 9, y + BH / 2 + .5); } }
    if (kind === 'clock') { c.fillStyle = C['amber-fill']; c.fillRect(x0, y + BH + 2, x1 - x0, 2.5); label(c, what, x0 + 4, y - 6, x1 - x0 - 6, C.amber, `10px ${C.sans}`); }
  }
}
const mateOf = i => { if (i == null) return null; const k = scene.raw.messages[i][6]; return k >= 0 ? k : null; };
function messages(c, t0, t1) {
  const [i0, i1] = scene.range(t0, t1), all = i1 - i0, busy = scene.busy[i1] - scene.busy[i0], faint = all <= CAP, stride = Math.max(1, Math.ceil((faint ? all : busy) / CAP));
  sparse = all > CAP ? Math.ceil(all / Math.max(1, busy / stride)) : 1;
  const picked = pinned ?? hot, pick = picked && picked.mark == null ? picked.i : null, mate = mateOf(pick), buckets = new Map(), given = []; let seen = 0;
  for (let i = i0; i < i1; i++) {
    const kind = scene.kinds[scene.kind[i]]; if (!shownKind(kind) || (kind.faint && !faint)) continue;
    if (kind.tag && !kind.dashed) given.push(i);
    if (stride > 1 && seen++ % stride) continue;
    if (scene.arrives[i] < t0 || fold.inside(scene.sent[i], scene.arrives[i]) || i === pick || i === mate) continue;
    const lost = scene.fate[i] !== 0, key = kind.colour + (lost ? 'x' : kind.dashed ? '-' : '') + (kind.faint ? '.' : '');
    let b = buckets.get(key); if (!b) buckets.set(key, b = { colour: C[kind.colour], faint: kind.faint, lost, dashed: kind.dashed, at: [] });
    const g = segment(i); b.at.push(g.x0, g.y0, g.x1, g.y1);
  }
  c.globalAlpha = pick != null ? .32 : 1;
  for (const b of buckets.values()) lines(c, b, false);
  c.globalAlpha = 1;
  for (const i of [mate, pick]) if (i != null && i < scene.m) { const kind = scene.kinds[scene.kind[i]], g = segment(i); lines(c, { colour: C[kind.colour], faint: false, lost: scene.fate[i] !== 0, dashed: kind.dashed, at: [g.x0, g.y0, g.x1, g.y1] }, true); }
  return [given, pick, mate];
}
function lines(c, b, strong) {
  c.strokeStyle = c.fillStyle = b.colour; c.lineWidth = strong ? 2.6 : b.faint ? 1 : b.dashed ? 1.1 : 1.6; if (b.lost) c.setLineDash([3, 3]); else if (b.dashed) c.setLineDash([6, 2]);
  const p = b.at; c.beginPath(); for (let k = 0; k < p.length; k += 4) { c.moveTo(p[k], p[k + 1]); c.lineTo(p[k + 2], p[k + 3]); } c.stroke(); c.setLineDash([]); c.beginPath();
  if (b.lost) { const r = b.faint ? 2.8 : 3.6; for (let k = 0; k < p.length; k += 4) { const x = p[k + 2], y = p[k + 3]; c.moveTo(x - r, y - r); c.lineTo(x + r, y + r); c.moveTo(x + r, y - r); c.lineTo(x - r, y + r); } c.strokeStyle = C.red; c.lineWidth = 1.7; c.stroke(); c.lineWidth = 1; return; }
  const r = b.faint ? 5 : 7;
  for (let k = 0; k < p.length; k += 4) { const dx = p[k + 2] - p[k], dy = p[k + 3] - p[k + 1], n = Math.hypot(dx, dy) || 1, ux = dx / n * r, uy = dy / n * r, x = p[k + 2], y = p[k + 3]; c.moveTo(x, y); c.lineTo(x - ux * .93 + uy * .37, y - uy * .93 - ux * .37); c.lineTo(x - ux * .93 - uy * .37, y - uy * .93 + ux * .37); c.closePath(); }
  c.fill(); c.lineWidth = 1;
}
/* Where text of this width can begin, at x or after the folds that it would cover. */
function beside(x, w) { for (let k = Math.max(0, above(fold.gaps, T(x - 20), g => g[0]) - 1); k < fold.gaps.length; k++) { const f = (X(fold.gaps[k][0]) + X(fold.gaps[k][1])) / 2; if (f > x + w + 8) break; if (f > x - 8) x = f + 9; } return x; }
function folds(c) {
  let free = 0;
  for (let k = Math.max(0, above(fold.gaps, T(0), g => g[0]) - 1); k < fold.gaps.length; k++) {
    const [a, b] = fold.gaps[k], x0 = X(a), x1 = X(b), x = (x0 + x1) / 2; if (x1 < 0) continue; if (x0 > W) break;
    const zig = (x, way) => { for (let y = way > 0 ? TOP : H, k = 0; way > 0 ? y <= H : y >= TOP; y += 7 * way, k++) c.lineTo(x + (k % 2 ? 2 : -2), y); };
    c.fillStyle = C.sunken; c.beginPath(); zig(x - 4.5, 1); zig(x + 4.5, -1); c.fill(); c.strokeStyle = C.line; for (const d of [-4.5, 4.5]) { c.beginPath(); zig(x + d, 1); c.stroke(); }
    const text = b - a < 1e5 ? '' : `${secs(b - a, 2)} s quiet`; if (!text) continue; c.font = `10.5px ${C.sans}`; const w = c.measureText(text).width + 12;
    if (x - w / 2 > free && x < W - w / 2) { free = x + w / 2 + 4; c.fillStyle = C.panel; c.strokeStyle = C.line; rr(c, x - w / 2, TOP - 18, w, 16, 8); c.fill(); c.stroke(); c.fillStyle = C.muted; c.textAlign = 'center'; c.fillText(text, x, TOP - 9.5); c.textAlign = 'left'; }
  }
}
function marks(c, t0, t1) {
  const bare = !scene.m, k0 = above(scene.marks, t0, m => m.at); let used = scene.raw.lanes.map(() => -99);
  for (let k = k0; k < scene.marks.length && scene.marks[k].at < t1; k++) {
    const m = scene.marks[k], x = X(m.at), y = bandY(m.lane) + (bare ? BH / 2 : -5); if (x - used[m.lane] < 7) continue; used[m.lane] = x;
    c.fillStyle = bare ? C.blue : C['amber-fill']; c.strokeStyle = C.panel; c.beginPath(); if (bare) c.arc(x, y, 5, 0, 7); else { c.moveTo(x - 5, y - 4); c.lineTo(x + 5, y - 4); c.lineTo(x, y + 4); c.closePath(); } c.fill(); c.stroke();
    if (bare) { const next = scene.marks.slice(k + 1).find(o => o.lane === m.lane), lines = wrap(c, m.label, (next ? X(next.at) : W) - x - 20); lines.forEach((line, j) => label(c, line, x + 10, y + j * 13, W, C.text, `11px ${C.sans}`)); }
  }
}
function wrap(c, text, room) { c.font = `11px ${C.sans}`; const out = []; let line = ''; for (const word of clip(text, 120).split(' ')) { const more = line ? line + ' ' + word : word; if (line && c.measureText(more).width > Math.max(90, room)) { out.push(line); line = word; } else line = more; } if (line) out.push(line); return out.slice(0, 5); }
function votes(c, [given, pick, mate]) { for (const i of given.length > 400 ? [] : given) { const x = X(scene.sent[i]); if (x > -10 && x < W + 10) badge(c, x, bandY(scene.from[i]) + BH / 2, scene.kinds[scene.kind[i]].tag === 'granted', pick != null && i !== pick && i !== mate ? .3 : 1); } }

function violations(c) {
  for (const bad of scene.raw.violations) {
    const x = Math.round(X(bad.at)) + .5; if (x < -20 || x > W + 20) continue;
    c.strokeStyle = C.red; c.lineWidth = 1.5; c.setLineDash([2, 3]); c.beginPath(); c.moveTo(x, 20); c.lineTo(x, H); c.stroke(); c.setLineDash([]);
    for (const lane of bad.lanes.slice(0, 1)) { c.beginPath(); c.arc(x, bandY(lane) + BH / 2, 13, 0, 7); c.lineWidth = 2; c.stroke(); c.globalAlpha = .18; c.fillStyle = C.red; c.fill(); c.globalAlpha = 1; c.lineWidth = 1; }
    c.font = `600 11px ${C.sans}`; const w = c.measureText('violation').width + 14, lx = clamp(x - w / 2, 0, W - w); c.fillStyle = C.red; rr(c, lx, 25, w, 17, 4); c.fill(); c.fillStyle = C.panel; c.fillText('violation', lx + 7, 34);
  }
}
/* Everything that depends on the cursor. It is drawn at every frame, so it is small: a line with the
   messages that are under way, moved to its place, and a pale cover over what has not happened yet. */
function top() {
  const c = tctx, x = X(at), away = x < -2 || x > W + 2, veil = clamp(x, 0, W); $('veil').style.transform = `translateX(${veil}px)`; $('cursor').hidden = away; if (away) return;
  $('cursor').style.transform = `translateX(${Math.round(x)}px)`; $('cursor').classList.toggle('bad', scene.bad != null && Math.abs(at - scene.bad) < 1); c.clearRect(0, 0, DOTS, H);
  const [i0, i1] = scene.range(at, at), u = fold.on(at);
  for (let i = Math.max(i0, i1 - 400); i < i1; i++) {
    const kind = scene.kinds[scene.kind[i]]; if (scene.arrives[i] < at || !shownKind(kind)) continue;
    const u0 = fold.on(scene.sent[i]), part = (u - u0) / Math.max(1, fold.on(scene.arrives[i]) - u0); if (scene.fate[i] === 1 && part > .45) continue;
    const f = scene.from[i], t = scene.to[i], down = t > f, y0 = bandY(f) + (down ? BH : 0), y1 = bandY(t) + (down ? 0 : BH);
    c.fillStyle = kind.faint ? C.muted : C[kind.colour]; c.strokeStyle = C.panel; c.lineWidth = 1.5; c.beginPath(); c.arc(DOTS / 2, y0 + (y1 - y0) * part, kind.faint ? 3.2 : 4.6, 0, 7); c.fill(); c.stroke();
  }
  const now = $('now'); now.textContent = secs(at) + ' s'; now.style.transform = `translateX(${clamp(-36, -x, W - x - 72)}px)`;
}
/* The overview is drawn once; what moves on it are elements. */
function overview() {
  if (!drawn) { drawn = true; drawOverview(octx, over.clientWidth, OVER); }
  const a = overX(Math.max(0, T(0))), b = overX(Math.min(scene.end, T(W)));
  $('window').style.transform = `translateX(${a}px)`; $('window').style.width = Math.max(4, b - a) + 'px'; overCursor();
}
function overCursor() { $('over-cursor').style.transform = `translateX(${overX(at)}px)`; }
let drawn = false;
const overX = t => 14 + t / scene.end * (over.clientWidth - 28);
function drawOverview(c, w, h) {
  const x = overX;
  c.fillStyle = C.sunken; c.fillRect(0, 0, w, h); const step = Math.min(9, 40 / Math.max(1, scene.n)), bar = Math.max(2, step - 3);
  for (let lane = 0; lane < scene.n; lane++) {
    const y = 9 + lane * step;
    for (const s of scene.roles[lane]) { if (s.role === DOWN) { if (s.label) cross(c, x(s.from), y + bar / 2, Math.min(3.5, bar), C.red, 1.5); continue; } c.fillStyle = roleFill(s.role); const x0 = x(s.from), x1 = x(Math.min(s.to, scene.end)); c.fillRect(x0, y, Math.max(.6, x1 - x0 - (x1 - x0 > 2 ? .5 : 0)), bar); }
    for (const [kind, on, a, b, , share] of scene.raw.spans) if (on === lane && kind === 'cut' && share > .5) { c.fillStyle = C.cutline; c.fillRect(x(a), y - 1, Math.max(3, x(b) - x(a)), bar + 2); }
  }
  c.fillStyle = C.faint; c.font = `10px ${C.sans}`; c.textBaseline = 'middle'; c.textAlign = 'center'; const tick = STEPS.find(s => s / scene.end * w > 70) || 6e8; for (let t = 0; t < scene.end; t += tick) c.fillText(secs(t, tick < 1e6 ? tick < 1e5 ? 2 : 1 : 0), Math.max(x(t), 24), 56);
  for (const bad of scene.raw.violations) { const bx = x(bad.at); c.fillStyle = C.red; c.fillRect(bx - 1, 7, 2, 49); c.beginPath(); c.moveTo(bx - 5, 3); c.lineTo(bx + 5, 3); c.lineTo(bx, 10); c.fill(); }
}

// ---- beside the picture --------------------------------------------------------------------

function chips(lane, t, upto = 0, most = 5) {
  const box = el('div', 'log'), last = scene.at(scene.lasts[lane], t), high = Math.max(last, upto), low = Math.max(1, high - most + 1);
  if (low > 1) box.append(el('span', 'e more', '…'));
  for (let k = low; k <= high; k++) { const e = scene.entryAt(lane, k, t); box.append(e ? el('span', `e g${e.tag}${e.committed <= t ? '' : ' open'}`, k) : el('span', k > last ? 'e missing' : 'e', k)); }
  return box;
}
const gutters = [];
function makeGutter() {
  $('gut').replaceChildren(); gutters.length = 0;
  scene.lanes.forEach((name, lane) => {
    const box = el('div', 'ln'), a = el('div', 'a'), r = el('div', 'r'), dot = el('i'), text = el('span'), log = el('div', 'log'), b = el('b', '', name); b.title = clip(scene.raw.lanes[lane], 300); a.append(b); r.append(dot, text); box.append(a, r, log);
    if (film.play && lane < scene.raw.servers) { const act = el('button', 'act', '⋯'); act.setAttribute('aria-label', `Do something to ${name}`); act.onclick = () => menuFor(lane); box.append(act); }
    $('gut').append(box); gutters.push({ box, dot, text, log, was: '' });
  });
}
function gutter() {
  gutters.forEach((g, lane) => {
    const s = scene.roleAt(lane, at), last = scene.at(scene.lasts[lane], at); let agreed = last; while (agreed > Math.max(0, last - 5) && !((scene.entryAt(lane, agreed, at) || {}).committed <= at)) agreed--;
    const bad = scene.raw.violations.some(v => v.at <= at && v.lanes[0] === lane), now = `${s.role}/${s.label}/${last}/${agreed}/${bad}`; if (now === g.was) return;
    g.was = now; g.dot.className = 'r' + s.role; g.text.textContent = s.label || 'not started'; g.box.classList.toggle('bad', bad); const log = chips(lane, at); g.log.replaceWith(log); g.log = log;
  });
}
function makeStory() {
  $('story').replaceChildren(...scene.story.map(line => { const li = el('li', line.kind), b = el('button'); b.append(el('time', '', secs(line.at)), icon(line.kind), el('span', 'name', clip(line.text, 600))); b.onclick = () => { play(false); go(line.at, true); }; li.append(b); li.classList.add('later'); return li; }));
  $('story').classList.toggle('long', scene.story.length > 400);
  told = -1;
}
let told = -1;
function tell() {
  const now = above(scene.story, at + .5, line => line.at) - 1, items = $('story').children; if (now === told) return;
  for (let k = Math.min(told, now); k <= Math.max(told, now); k++) if (items[k]) { items[k].classList.toggle('later', k > now); items[k].classList.toggle('at', k === now); if (k === now) items[k].setAttribute('aria-current', 'step'); else items[k].removeAttribute('aria-current'); }
  told = now; const li = items[Math.max(0, now)], box = $('story'); if (li) box.scrollTop = Math.max(0, li.offsetTop - box.clientHeight * .7, li.offsetTop + li.offsetHeight + 8 - box.clientHeight);
}
function readout() { $('time').textContent = secs(at, 4) + ' s'; $('instant').textContent = `instant ${above(scene.times, at + .5)} of ${scene.times.length}`; if (!playing) { over.setAttribute('aria-valuenow', secs(at)); over.setAttribute('aria-valuetext', `${secs(at)} seconds`); } }
/* What led to a violation: who led before, the last faults, the entry that is missing, the votes. */
function causes(bad) {
  const names = bad.lanes.map(lane => scene.raw.lanes[lane]), before = scene.story.filter(line => line.at <= bad.at && line.kind !== 'violation'), entry = /\bentry (\d+)/.exec(bad.text);
  const mentions = text => !names.length || names.some(name => new RegExp(`(^|[^\\w-])${name.replace(/[^\w]/g, '\\$&')}([^\\w-]|$)`).test(text)), last = (kinds, count, of = () => true) => before.filter(line => kinds.includes(line.kind) && of(line.text)).slice(-count);
  const holds = text => { const m = /^entr(?:y|ies) (\d+)(?: to (\d+))?/.exec(text); return entry && m && +entry[1] >= +m[1] && +entry[1] <= +(m[2] || m[1]); };
  return [...new Set([...last(['fault'], 3), ...last(['healed'], 1), ...last(['leads'], 1, text => !mentions(text)), ...last(['entry'], 1, holds), ...last(['yes', 'no'], 3, mentions)])].sort((a, b) => scene.story.indexOf(a) - scene.story.indexOf(b));
}
function makeSide() {
  const bad = scene.raw.violations[0]; $('why').hidden = !bad; $('jump').hidden = !bad; $('verdict').hidden = !bad;
  if (bad) {
    $('verdict').textContent = `${scene.raw.violations.length} violation${scene.raw.violations.length > 1 ? 's' : ''}, at ${secs(bad.at)} s`;
    $('why-text').replaceChildren(...scene.raw.violations.map(v => el('p', '', `${v.kind}: ${v.text}`)));
    $('chain').replaceChildren(...causes(bad).map(line => { const li = el('li'), b = el('button'), text = el('span', 'name', ' ' + clip(line.text, 300)); b.append(el('u', '', secs(line.at) + ' s'), text); b.onclick = () => { play(false); go(line.at, true); }; li.append(b); return li; }));
  }
  $('facts').hidden = !film.facts.length && !film.notes.length; $('fact-list').replaceChildren(...film.facts.map(([text, held]) => el('li', held ? '' : 'broken', text)));
  $('notes').hidden = !film.notes.length; $('notes').textContent = film.notes.join('\n'); $('command').hidden = !film.command; $('command').textContent = film.command;
}
function makeLegend() {
  const box = $('legend'); box.replaceChildren();
  const key = (name, text) => { const k = el('span', 'k'); k.append(el('i', name), text); box.append(k); };
  const arrow = (colour, lost) => shape([['path', { d: 'M1 5h18', stroke: `var(--${colour})`, 'stroke-width': 1.8, ...(lost ? { 'stroke-dasharray': '4 2' } : {}) }], lost ? ['path', { d: 'm16 2 6 6m0-6-6 6', stroke: 'var(--red)', 'stroke-width': 1.7 }] : ['path', { d: 'm17 1.5 6 3.5-6 3.5z', fill: `var(--${colour})` }]], 24, 10);
  key('lead', 'leads'); if (scene.raw.servers) { key('follow', 'follows'); key('look', 'looking'); } else key('follow', 'waits');
  for (const category of scene.categories) { const b = el('button'); b.append(arrow((LOOK[category] || ['entry'])[0]), category); b.dataset.category = category; b.setAttribute('aria-pressed', !hidden.has(category)); b.onclick = () => { if (hidden.has(category)) hidden.delete(category); else hidden.add(category); b.setAttribute('aria-pressed', !hidden.has(category)); draw(); }; box.append(b); }
  if (scene.m) { const k = el('span', 'k'); k.append(arrow('beat', true), 'lost'); box.append(k); }
  if (scene.raw.logs.length) key('grow', 'entry: written, then committed');
  if (scene.raw.first) box.append(el('span', 'note', `the first ${scene.raw.first.toLocaleString('en')} messages are left out`));
  const note = el('span', 'note'); note.id = 'sparse'; note.hidden = true; box.append(note);
  const b = el('button', '', 'fold quiet time'); b.id = 'fold'; b.setAttribute('aria-pressed', folding); b.onclick = () => setFold(!folding); box.append(b);
}
function setFold(on) { const middle = T(W / 2); folding = on; fold = new Fold(scene, on); $('fold').setAttribute('aria-pressed', on); wide = clamp(wide, 20 * fold.pad, UEND()); from = fold.on(middle) - wide / 2; inBounds(); go(at, true); draw(); }

// ---- what a message says, and why ----------------------------------------------------------

const FATES = { cut: 'Lost: the link was cut.', disconnected: 'Not sent: there was no connection.', lost: 'Lost by the network.', dropped: 'Dropped by you.' };
function card(what, pin) {
  const box = $('card'); box.replaceChildren(); box.classList.toggle('pinned', pin);
  if (what.mark != null) { const m = scene.marks[what.mark]; box.append(el('div', 't', scene.lanes[m.lane]), el('div', 'q', m.label), el('div', 'faint mono', secs(m.at, 4) + ' s')); return; }
  const i = what.i, row = scene.raw.messages[i], kind = scene.kinds[row[4]], title = el('div', 't'); title.append(el('span', 'name', `${scene.lanes[row[2]]} → ${scene.lanes[row[3]]}: ${kind.name}`));
  const fate = scene.raw.fates[row[5]], lost = fate !== 'arrived', tag = lost && fate !== 'unreceived' ? fate : kind.tag; if (tag) title.append(el('em', tag === 'granted' ? 'yes' : 'no', tag));
  box.append(title, el('div', 'q', `“${scene.says(i)}”`), el('div', 'faint mono', row[1] < 0 ? `sent ${secs(row[0], 4)} s` : `${secs(row[0], 4)} → ${secs(row[1], 4)} s, ${((row[1] - row[0]) / 1e3).toFixed(1)} ms`));
  let why = row[7] >= 0 ? scene.raw.reasons[row[7]] : ''; if (FATES[fate]) why = FATES[fate]; else if (lost) why = row[1] >= 0 && row[1] <= scene.end ? `${scene.lanes[row[3]]} did not receive it: it was down or paused.` : 'It was under way at the end.';
  if (why) box.append(el('div', 'w', why));
  if (kind.tag && !lost && scene.raw.logs.length) { const grid = el('div', 'cmp'), upto = Math.max(scene.at(scene.lasts[row[2]], row[0]), scene.at(scene.lasts[row[3]], row[0])); for (const [lane, word] of [[row[2], 'voter'], [row[3], 'candidate']]) grid.append(el('span', 'muted', `${scene.lanes[lane]}, ${word}`), chips(lane, row[0], upto, 7)); box.append(grid); }
  if (pin && film.play && !FATES[fate]) { const b = el('button', '', 'Drop this message'); b.onclick = () => { at = Math.min(at, (row[0] + Math.max(row[0], row[1])) / 2); act({ kind: 'drop', at: row[0] / 1e6, amount: scene.raw.first + i + 1 }); }; box.append(b); }
}
function place(what) {
  const box = $('card'), left = $('canvases').offsetLeft, gs = what.mark != null ? [{ x0: X(scene.marks[what.mark].at), x1: X(scene.marks[what.mark].at), y0: bandY(scene.marks[what.mark].lane), y1: bandY(scene.marks[what.mark].lane) }] : [what.i, mateOf(what.i)].filter(i => i != null).map(segment);
  box.hidden = false; const w = box.offsetWidth, h = box.offsetHeight, wideStage = $('stage').clientWidth, xs = gs.flatMap(g => [g.x0, g.x1]).map(x => left + clamp(x, 0, W)), ys = gs.flatMap(g => [g.y0, g.y1]), lo = Math.min(...xs), hi = Math.max(...xs); let x = lo - w - 22, y = (Math.min(...ys) + Math.max(...ys)) / 2 - h / 2;
  if (x < 8) x = hi + 22; if (x + w > wideStage - 8) { x = clamp((lo + hi - w) / 2, 8, wideStage - w - 8); y = Math.max(...ys) + 30; if (y + h > H) y = Math.min(...ys) - h - 30; }
  box.style.left = x + 'px'; box.style.top = clamp(y, 4, Math.max(4, H - h - 6)) + 'px';
}
function hit(px, py) {
  for (let k = above(scene.marks, T(px - 8), m => m.at); k < scene.marks.length && X(scene.marks[k].at) < px + 8; k++) { const m = scene.marks[k]; if (Math.abs(py - bandY(m.lane) - (scene.m ? -5 : BH / 2)) < 8) return { mark: k }; }
  const [i0, i1] = scene.range(T(px - 12), T(px + 12)); let best = null, near = 7;
  for (let i = i0; i < i1; i++) {
    const kind = scene.kinds[scene.kind[i]]; if (!shownKind(kind) || fold.inside(scene.sent[i], scene.arrives[i])) continue;
    const g = segment(i); if (px < Math.min(g.x0, g.x1) - 8 || px > Math.max(g.x0, g.x1) + 8) continue;
    const dx = g.x1 - g.x0, dy = g.y1 - g.y0, k = clamp(((px - g.x0) * dx + (py - g.y0) * dy) / (dx * dx + dy * dy || 1), 0, 1), d = Math.hypot(px - g.x0 - k * dx, py - g.y0 - k * dy) + (kind.faint ? 1.5 : 0); if (d < near) { near = d; best = { i }; }
  }
  return best;
}
const same = (a, b) => a === b || (a && b && a.i === b.i && a.mark === b.mark);
function pin(what) { pinned = what; if (what) { card(what, true); place(what); } else $('card').hidden = true; draw(); }
let drag = null;
view.addEventListener('pointermove', e => {
  if (drag) { from = drag.from - (e.offsetX - drag.x) / W * wide; inBounds(); drag.moved ||= Math.abs(e.offsetX - drag.x) > 4; if (pinned) place(pinned); draw(); return; }
  const what = hit(e.offsetX, e.offsetY); view.style.cursor = what ? 'pointer' : 'crosshair'; if (same(what, hot)) return;
  hot = what; if (!pinned) { if (what) { card(what, false); place(what); } else $('card').hidden = true; draw(); }
});
view.addEventListener('pointerleave', () => { if (hot) { hot = null; if (!pinned) { $('card').hidden = true; draw(); } } });
view.addEventListener('pointerdown', e => { drag = { x: e.offsetX, from, moved: false }; view.setPointerCapture(e.pointerId); });
view.addEventListener('pointerup', e => { const was = drag; drag = null; if (!was || was.moved) return; const what = hit(e.offsetX, e.offsetY); if (what) pin(same(pinned, what) ? null : what); else { pin(null); play(false); go(T(e.offsetX)); } });
view.addEventListener('pointercancel', () => { drag = null; });
view.addEventListener('wheel', e => { if (e.ctrlKey || e.metaKey) { e.preventDefault(); zoom(Math.exp(e.deltaY * .002), T(e.offsetX)); } else if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) { e.preventDefault(); from += e.deltaX / W * wide; inBounds(); draw(); } }, { passive: false });
const seek = e => { play(false); go((e.offsetX - 14) / (over.clientWidth - 28) * scene.end, true); };
over.addEventListener('pointerdown', e => { over.setPointerCapture(e.pointerId); seek(e); }); over.addEventListener('pointermove', e => { if (e.buttons) seek(e); });

// ---- time ----------------------------------------------------------------------------------

function inBounds() { from = clamp(from, -fold.pad, Math.max(-fold.pad, UEND() - wide)); }
function follow(centre) { const u = fold.on(at), lo = from + wide * .05, hi = from + wide * .95, was = from; if (centre && (u < lo || u > hi)) from = u - wide * .6; else if (u > hi) from = u - wide * (playing ? .06 : .5); else if (u < lo && from > -fold.pad) from = u - wide * .5; inBounds(); return from !== was; }
function go(t, centre) { at = clamp(t, 0, scene.end); if (follow(centre)) { if (pinned) place(pinned); draw(); } else { overCursor(); top(); } gutter(); tell(); readout(); }
function step(way, list = scene.times, get) { play(false); const k = way > 0 ? above(list, at + .5, get) : above(list, at - .5, get) - 1; if (list[k] != null) go(get ? get(list[k]) : list[k]); }
function zoom(by, about = at) { const u = fold.on(about), w = clamp(wide * by, 8 * fold.pad, UEND() + fold.pad); from = u - (u - from) * w / wide; wide = w; inBounds(); if (pinned) place(pinned); draw(); }
const slow = matchMedia('(prefers-reduced-motion: reduce)');
let before = 0, shown = 0;
function play(on) { if (on === playing) return; playing = on; $('go').replaceChildren(icon(on ? 'pause' : 'play')); $('go').setAttribute('aria-label', on ? 'Pause' : 'Play'); if (!on) readout(); if (on) { pin(null); if (at >= scene.end - 1) { at = 0; } before = shown = performance.now(); requestAnimationFrame(frame); } }
function frame(now) {
  if (!playing) return; if (slow.matches && now - shown < 1000) return void requestAnimationFrame(frame);
  const d = Math.min(slow.matches ? 1 : .1, Math.max(0, (now - before) / 1000)); before = shown = now;
  go(fold.off(fold.on(at) + d * speed * 1e6)); if (at >= scene.end) return play(false); requestAnimationFrame(frame);
}
const toViolation = () => { if (scene.bad != null) { play(false); go(scene.bad, true); } };
$('first').onclick = () => { play(false); go(0, true); }; $('back').onclick = () => step(-1); $('go').onclick = () => play(!playing); $('next').onclick = () => step(1); $('jump').onclick = $('verdict').onclick = toViolation; $('out').onclick = () => zoom(1.4); $('in').onclick = () => zoom(1 / 1.4); $('help').onclick = () => $('dlg').showModal();
for (const name of ['first', 'back', 'next']) $(name).append(icon(name)); $('go').append(icon('play')); $('theme').append(icon('theme'));
const SPEEDS = [.02, .05, .1, .5, 1];
for (const s of SPEEDS) { const b = el('button', '', s + '×'); b.onclick = () => setSpeed(s); $('speed').append(b); }
function setSpeed(s) { speed = s; [...$('speed').children].forEach((b, k) => b.setAttribute('aria-pressed', SPEEDS[k] === s)); }
addEventListener('keydown', e => {
  if (e.metaKey || e.ctrlKey || e.altKey || document.querySelector('dialog[open]') || ['SELECT', 'INPUT'].includes(e.target.tagName)) return;
  const line = l => l.at;
  switch (e.key) {
    case ' ': if (e.target.tagName === 'BUTTON') return; e.preventDefault(); play(!playing); break;
    case 'ArrowRight': case 'ArrowLeft': { const way = e.key === 'ArrowRight' ? 1 : -1; e.preventDefault(); if (e.shiftKey) step(way, scene.story, line); else step(way); break; }
    case 'v': toViolation(); break; case 'Home': e.preventDefault(); play(false); go(0, true); break; case 'End': e.preventDefault(); play(false); go(scene.end, true); break;
    case '+': case '=': zoom(1 / 1.4); break; case '-': zoom(1.4); break; case 'f': setFold(!folding); break; case 'Escape': pin(null); break; case '?': $('dlg').showModal(); break;
    case 'h': { const b = [...document.querySelectorAll('#legend button')].find(b => ['heartbeats', 'renewals'].includes(b.dataset.category)); if (b) b.click(); break; }
    case 'm': { const list = underWay(); if (list.length) { const k = list.findIndex(i => pinned && pinned.i === i); play(false); pin({ i: list[(k + 1) % list.length] }); } break; }
  }
});
/* The messages at the cursor: with `m` they can be read without a pointer. */
function underWay() { const [i0, i1] = scene.range(at, at), out = []; for (let i = i0; i < i1; i++) if (scene.arrives[i] >= at && shownKind(scene.kinds[scene.kind[i]])) out.push(i); return out; }
for (const [k, what] of [['space', 'play, pause'], ['← →', 'one instant back, ahead'], ['shift ← →', 'one line of the story'], ['v', 'to the violation'], ['m', 'the next message at the cursor'], ['+ −', 'zoom; or ctrl and the wheel'], ['h', 'hide heartbeats'], ['f', 'fold quiet time'], ['Home End', 'beginning, end'], ['Esc', 'close what a message says']]) { const s = el('span'); s.append(el('kbd', '', k)); $('keys').append(s, el('span', '', what)); }

// ---- light and dark ------------------------------------------------------------------------

const THEMES = ['', 'light', 'dark'];
function remembered(value) { try { if (value == null) return localStorage.getItem('doyen-theme') || ''; localStorage.setItem('doyen-theme', value); } catch { /* a page may have no storage */ } return value || ''; }
function setTheme(name) { if (name) document.documentElement.dataset.theme = name; else delete document.documentElement.dataset.theme; $('theme').title = `Colours: ${name || 'as the system'}`; }
setTheme(remembered());
$('theme').onclick = () => { const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme || '') + 1) % 3]; remembered(next); setTheme(next); repaint(); };
function repaint() { colours(); drawn = false; draw(); }
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', repaint);
addEventListener('resize', () => { size(); drawn = false; inBounds(); draw(); if (pinned) place(pinned); });

// ---- doing something -----------------------------------------------------------------------

/* A run in which the reader intervenes is the same plan with one more fault, so it is the same run
   up to that instant. The server runs it; the address holds it. */
let forS = 2;
function menuFor(lane) {
  const name = scene.raw.lanes[lane], others = scene.raw.lanes.filter((_, k) => k !== lane && k < scene.raw.servers), now = Math.max(0, at / 1e6), items = $('menu-items'); play(false);
  $('menu-title').textContent = `${scene.lanes[lane]} at ${secs(at)} s`; items.replaceChildren();
  const label = el('label', 'muted', 'for'), select = el('select'); for (const [v, text] of [[.5, '0.5 s'], [2, '2 s'], [5, '5 s'], [60, 'the rest of the run']]) { const o = el('option', '', text); o.value = v; o.selected = v === forS; select.append(o); } select.onchange = () => { forS = +select.value; }; label.append(select); items.append(label);
  const add = (text, ...faults) => { const b = el('button', '', text); b.onclick = () => { $('menu').close(); act(...faults.map(fault => ({ at: now, for_s: forS, nodes: [name], ...fault }))); }; items.append(b); };
  add('Kill its process', { kind: 'crash' }); add('Cut its power', { kind: 'power' }); add('Pause its process', { kind: 'pause' }); add('Cut it off from all others', { kind: 'partition' });
  for (const other of others) add(`Cut the link to ${clip(other, 40)}, both ways`, { kind: 'oneway', nodes: [name, other] }, { kind: 'oneway', nodes: [other, name] });
  for (const other of others) add(`Lose what it sends to ${clip(other, 40)}`, { kind: 'oneway', nodes: [name, other] });
  add('Let its clock run at twice the rate', { kind: 'rate', amount: 2 }); add('Make its disk 0.3 s slower', { kind: 'stall', amount: .3 }); $('menu').showModal();
}
const ACTS = { crash: 'kill', power: 'cut the power of', pause: 'pause', partition: 'cut off', oneway: 'lose what goes from, to', rate: 'speed up the clock of', stall: 'slow the disk of', drop: 'drop message', transfer: 'hand over' };
async function act(...faults) { await rerun([...film.play.run.faults, ...faults]); }
async function rerun(faults, change = {}) {
  const run = { ...film.play.run, ...change, faults }; $('doing-error').hidden = true; document.body.setAttribute('aria-busy', 'true');
  try {
    const answer = await fetch(film.play.url, { method: 'POST', headers: { 'Content-Type': 'application/json' }, body: JSON.stringify(run) }), result = await answer.json();
    if (!answer.ok) throw new Error(result.error); film = result; history.replaceState(null, '', '#' + encodeURIComponent(JSON.stringify(film.play.run))); load(0, at);
  } catch (error) { $('doing-error').textContent = `The lab did not do it: ${error.message}`; $('doing-error').hidden = false; } finally { document.body.removeAttribute('aria-busy'); }
}
function makeDoing() {
  $('doing').hidden = !film.play; if (!film.play) return; const faults = film.play.run.faults;
  $('done').replaceChildren(...faults.map((f, k) => { const li = el('li'), b = el('button', '', '✕'); b.setAttribute('aria-label', `Undo line ${k + 1}`); b.onclick = () => rerun(faults.filter((_, j) => j !== k)); li.append(el('span', 'mono faint', f.at.toFixed(3)), el('span', 'name', `${ACTS[f.kind] || f.kind} ${f.kind === 'drop' ? f.amount : (f.nodes || []).join(', ')}${f.for_s && !['drop'].includes(f.kind) ? `, ${f.for_s < 60 ? f.for_s + ' s' : 'for good'}` : ''}`), b); return li; }));
  $('doing-hint').textContent = faults.length ? '' : 'Move the cursor to an instant. Then use ⋯ beside a server, or select a message and drop it.';
  const row = $('doing-row'); row.replaceChildren(); const button = (text, what) => { const b = el('button', '', text); b.onclick = what; row.append(b); };
  button('Another seed', () => rerun([], { seed: film.play.run.seed + 1 })); button('Undo all', () => rerun([])); button('Save as a file', save);
}
function save() { const a = el('a'); a.href = URL.createObjectURL(new Blob([film.play.file], { type: 'application/json' })); a.download = `lab-${film.play.run.protocol}-${film.play.run.seed}.json`; a.click(); URL.revokeObjectURL(a.href); }

// ---- loading -------------------------------------------------------------------------------

function makeScenes(number) {
  const box = $('scenes'); box.hidden = film.scenes.length < 2; box.replaceChildren(...film.scenes.map((s, k) => { const b = el('button', '', `${k + 1}. ${clip(s.title || 'scene', 160)}`); b.setAttribute('aria-pressed', k === number); b.onclick = () => load(k); return b; }));
}
/* Show a scene. A failing one opens at its violation; `keep` is a cursor to keep. */
function load(number, keep) {
  playing = false; $('go').replaceChildren(icon('play')); hot = pinned = null; $('card').hidden = true; drawn = false;
  document.title = 'doyen lab: ' + clip(film.title, 120); $('title').textContent = clip(film.title, 200); $('chips').replaceChildren(...film.chips.map(text => el('span', 'chip name', clip(text, 120)))); $('events').textContent = `${film.events.toLocaleString('en')} events`; $('trace').textContent = film.trace ? `trace ${film.trace}` : ''; if (film.home) $('home').href = film.home;
  scene = new Scene(film.scenes[number]); fold = new Fold(scene, folding); makeScenes(number); makeGutter(); makeLegend(); makeStory(); makeSide(); makeDoing(); size();
  setSpeed(SPEEDS.reduce((a, b) => Math.abs(Math.log(b / (fold.pad / 4e5))) < Math.abs(Math.log(a / (fold.pad / 4e5))) ? b : a));
  at = clamp(keep ?? scene.bad ?? scene.end, 0, scene.end);
  if (keep == null) { wide = firstWidth(); from = fold.on(at) - wide * .9; } inBounds(); follow(true); draw(); gutter(); tell(); readout();
  over.setAttribute('aria-valuemin', 0); over.setAttribute('aria-valuemax', secs(scene.end));
}
/* About as much time as the eye can take in: some hundred messages. */
function firstWidth() {
  const near = phone() ? 24 : 90, whole = UEND() + fold.pad; let k = above(scene.sent, at) - 1, seen = 0; for (; k >= 0 && seen < near; k--) if (!scene.kinds[scene.kind[k]].faint) seen++;
  return clamp((fold.on(at) - fold.on(k < 0 ? 0 : scene.sent[k])) * 1.15, Math.min(whole, 30 * fold.pad), whole);
}
colours(); load(0);
if (film.play && location.hash.length > 1) { try { const given = JSON.parse(decodeURIComponent(location.hash.slice(1))); rerun(given.faults || [], given); } catch { /* not an address of ours */ } }
})();
