// The list of elections: as many rows in the document as fit, whatever the number of elections.

import { FAILED, TAGS, Tip, describe, drawAxis, drawLane } from './timeline.js';
import { $, el, hue, name, plain, span, thousands } from './text.js';
import { isLive, known, now, post, state } from './state.js';

const scroll = $('scroll'), pad = $('pad'), pool = [];
export const tip = new Tip($('tip'));
export const view = { minutes: 15, chosen: false, selected: null, order: [], filter: '', sort: 'name', termAt: null };
const RANGES = [1, 5, 15, 60, 360, 1440];
const NOTCH = 1 / 6 + .005;   // of the ttl: where a leader stops itself, with the default options

// Measured when the window changes, and not while drawing: reading sizes after writing costs a layout.
const size = { row: 27, height: 0, lane: 300, most: 6 };
function measure() {
  size.row = parseFloat(getComputedStyle(document.documentElement).getPropertyValue('--row'));
  size.height = scroll.clientHeight;
  size.lane = $('axis').clientWidth || size.lane;
}
const frame = () => { const end = now(); return { from: end - view.minutes * 60, to: end, known: Math.min(end, known()), tolerance: Infinity }; };

// What a row says about its election: led, lost (no leader, though there should be one), free, or unknown.
export function condition(row) {
  if (row.leader != null) {
    const left = leaseLeft(row);
    return !isLive() && (left == null || left <= 0) ? 'unknown' : 'led';
  }
  if (!isLive()) return 'unknown';
  if (row.kind !== 'elections' && !row.line) return 'free';
  const last = row.terms.at(-1);
  return row.line || (last && FAILED.has(last[4])) ? 'lost' : 'free';
}

// Seconds left of the lease of a row's leader; null if the store does not tell.
export function leaseLeft(row) {
  const sight = row.lease && state.topics.leases?.[row.lease];
  return sight ? sight[0] - (now() - sight[1]) : null;
}
export const leaseTtl = row => row.ttl ?? state.topics.leases?.[row.lease]?.[2] ?? null;

export function lastFailover(row) {
  for (let k = row.terms.length - 1; k >= 0; k--) if (row.terms[k][3] != null) return row.terms[k];
  return null;
}

const SORTS = {
  name: (a, b) => collate(a.name, b.name),
  leader: (a, b) => collate(a.leader ?? '', b.leader ?? '') || collate(a.name, b.name),
  token: (a, b) => (b.token ?? 0) - (a.token ?? 0),
  line: (a, b) => b.line - a.line || collate(a.name, b.name),
  last: (a, b) => urgency(b) - urgency(a) || collate(a.name, b.name),
};
const collator = new Intl.Collator(undefined, { numeric: true });
const collate = (a, b) => collator.compare(a, b);
const urgency = row => row.leader == null && row.line ? Infinity : lastFailover(row)?.[3] ?? 0;

export function reorder() {
  const q = view.filter.toLowerCase();
  const rows = [...state.rows.values()].filter(row => !q || matches(row, q));
  rows.sort(SORTS[view.sort]);
  view.order = rows.map(row => row.key);
  if (!state.rows.has(view.selected)) view.selected = view.order[0] ?? null;
}
const matches = (row, q) => row.name.toLowerCase().includes(q) || (row.leader ?? '').toLowerCase().includes(q)
  || row.host.toLowerCase().includes(q) || row.next.some(n => n.toLowerCase().includes(q));

const NS = 'http://www.w3.org/2000/svg';
function lockMark() {
  const svg = document.createElementNS(NS, 'svg');
  for (const [k, v] of [['width', 11], ['height', 12], ['viewBox', '0 0 11 12'], ['aria-hidden', 'true']]) svg.setAttribute(k, v);
  const path = document.createElementNS(NS, 'path');
  path.setAttribute('d', 'M1.5 6.2a1.2 1.2 0 0 1 1.2-1.2h5.6a1.2 1.2 0 0 1 1.2 1.2v3.6a1.2 1.2 0 0 1-1.2 1.2H2.7a1.2 1.2 0 0 1-1.2-1.2zM3.3 5V3.4a2.2 2.2 0 0 1 4.4 0V5');
  for (const [k, v] of [['fill', 'none'], ['stroke', 'currentColor'], ['stroke-width', 1.3]]) path.setAttribute(k, v);
  svg.append(path);
  return svg;
}

function makeRow() {
  const d = el('div', 'row cols');
  d.setAttribute('role', 'option');
  const p = d.parts = {
    dot: el('span', 'dot'), name: el('span', 'name'), lock: lockMark(), text: name('', ''), phone: name('', 'phone muted'),
    who: el('span', 'who'), sw: el('i', 'sw'), wn: name(''), tok: el('span', 'num mono tok'),
    lease: el('span', 'lease'), track: el('span', 'track'), fill: el('b'), mark: el('u'), secs: el('span', 'num'),
    ln: el('span', 'num ln'), last: el('span', 'last clip muted'), lane: el('div', 'lane'),
  };
  p.name.append(p.lock, p.text, p.phone);
  p.who.append(p.sw, p.wn);
  p.mark.style.left = `${NOTCH * 100}%`;
  p.track.append(p.fill, p.mark);
  p.lease.append(p.track, p.secs);
  d.append(p.dot, p.name, p.who, p.tok, p.lease, p.ln, p.last, p.lane);
  d.onclick = event => {   // by touch there is no hover
    const bar = event.target.closest('.t,.g'), row = d.row;
    select(row.key);
    if (bar) explain(row, bar, event.clientX, d.getBoundingClientRect().bottom - 8);
  };
  pad.append(d);
  return d;
}

let posted = '', postTimer = 0;
export function layout(only) {
  if (!size.height) measure();
  const h = size.row, first = Math.floor(scroll.scrollTop / h);
  const need = Math.min(view.order.length, Math.ceil(size.height / h) + 1);
  const shownRows = Math.max(h > 40 ? 3 : 6, Math.min(20, view.filter ? size.most : view.order.length));
  if (shownRows > size.most || !view.filter) size.most = shownRows;
  if (scroll.dataset.rows !== String(shownRows)) { scroll.dataset.rows = shownRows; scroll.style.setProperty('--shown', shownRows); }
  const height = `${view.order.length * h}px`;
  if (pad.style.height !== height) pad.style.height = height;
  while (pool.length < need) pool.push(makeRow());
  // A row of the list keeps its element while it is shown, so scrolling fills only those that come in.
  for (let at = first; at < first + pool.length; at++) {
    const d = pool[at % pool.length], key = view.order[at];
    const row = at < first + need ? state.rows.get(key) : null;
    if (!row) { d.hidden = true; d.row = null; continue; }
    const moved = d.row?.key !== key || d.hidden;
    d.hidden = false;
    if (moved || d.at !== at) { d.at = at; d.style.transform = `translateY(${at * h}px)`; d.setAttribute('aria-posinset', at + 1); }
    if (d.of !== view.order.length) { d.of = view.order.length; d.setAttribute('aria-setsize', d.of); }
    d.row = row;
    if (moved || !only || only.has(key)) fill(d);
  }
  const inAll = state.rows.size, shown = pool.filter(d => d.row).length;
  const count = view.filter ? `${thousands(view.order.length)} of ${thousands(inAll)} match`
    : inAll > shown ? `${Math.min(shown, Math.floor(size.height / h))} of ${thousands(inAll)}` : thousands(inAll);
  if ($('count').textContent !== count) $('count').textContent = count;
  tellShown();
}

// Tell the server which rows are shown: it looks at their leases only.
function tellShown() {
  const keys = [...new Set([view.selected, ...pool.filter(d => d.row).map(d => d.row.key)])].filter(k => k != null);
  const text = `${state.page} ${keys.join('\n')}`;
  if (text === posted || postTimer || !state.connected || !state.page) return;
  posted = text;
  post('api/view', { page: state.page, keys }).catch(() => { posted = ''; });
  postTimer = setTimeout(() => { postTimer = 0; tellShown(); }, 300);
}

function fill(d) {
  const row = d.row, p = d.parts, how = condition(row), last = lastFailover(row);
  d.setAttribute('aria-selected', row.key === view.selected);
  d.id = row.key === view.selected ? 'selected-row' : '';
  d.className = `row cols ${how}`;
  p.dot.className = `dot ${{ led: '', lost: 'bad', free: 'free', unknown: 'unknown' }[how]}`;
  p.lock.style.display = row.kind === 'elections' ? 'none' : '';
  p.text.textContent = p.text.title = plain(row.name);
  const who = how === 'unknown' ? 'unknown' : row.leader ?? (how === 'lost' ? 'nobody' : 'free');
  p.wn.textContent = p.phone.textContent = plain(who);
  p.sw.style.display = row.leader != null && how === 'led' ? '' : 'none';
  if (row.leader != null) p.sw.style.background = hue(row.leader);
  p.tok.textContent = row.token ?? '–';
  p.ln.textContent = row.line || '–';
  p.ln.classList.toggle('amber', !row.line && row.kind === 'elections' && how === 'led');
  p.ln.title = !row.line && how === 'led' && row.kind === 'elections' ? 'nobody waits: if the leader fails, nobody takes over' : row.next.join(', ');
  const gone = how === 'lost' && last;
  p.last.textContent = gone ? `for ${span(Math.max(0, known() - last[3]))}` : last ? `${span(Math.max(0, known() - last[3]))}, ${TAGS[last[4]]}` : 'none seen';
  p.last.title = last ? plain(last[5]) : '';
  d.setAttribute('aria-label', `${row.name}, ${row.kind.slice(0, -1)}: ${who}, token ${row.token ?? 'none'}, ${row.line} in line`);
  drawLane(p.lane, row.terms, frame(), size.lane);
  lease(d);
}

function lease(d) {
  const row = d.row, p = d.parts, left = leaseLeft(row), ttl = leaseTtl(row);
  p.track.style.visibility = row.leader != null && left != null ? '' : 'hidden';
  if (row.leader == null || left == null) { p.secs.textContent = row.leader == null ? '–' : ''; return; }
  const f = Math.max(0, Math.min(1, left / ttl));
  p.track.classList.toggle('low', f < .4);
  p.fill.style.transform = `scaleX(${f.toFixed(3)})`;
  p.secs.textContent = `${Math.max(0, left).toFixed(1)} s`;
}
export function leases() { for (const d of pool) if (d.row) { lease(d); if (d.row.leader != null && !isLive() && condition(d.row) === 'unknown' && !d.classList.contains('unknown')) fill(d); } }

export function lanes() {
  drawAxis($('axis'), frame(), size.lane);
  if (view.termAt == null) for (const d of pool) if (d.row) fill(d);
}

let onSelect = () => {};
export const whenSelected = f => { onSelect = f; };
export function select(key, reveal) {
  if (key == null) return;
  view.selected = key;
  view.termAt = null;
  tip.hide();
  if (reveal) {
    const h = size.row, at = view.order.indexOf(key) * h;
    if (at < scroll.scrollTop) scroll.scrollTop = at;
    else if (at + h > scroll.scrollTop + size.height) scroll.scrollTop = at + h - size.height;
  }
  layout();
  scroll.setAttribute('aria-activedescendant', 'selected-row');
  onSelect();
}
export function step(by) {
  const at = view.order.indexOf(view.selected);
  select(view.order[Math.max(0, Math.min(view.order.length - 1, at + by))], true);
}
export const pageOfRows = () => Math.max(1, Math.floor(size.height / size.row) - 1);

// Until a range is chosen, the shortest that has everything that was seen, within an hour.
export function fitRange() {
  if (view.chosen) return;
  let first = now();
  for (const row of state.rows.values()) if (row.terms.length && row.terms[0][2] < first) first = row.terms[0][2];
  const fits = RANGES.find(m => m * 60 >= now() - first) ?? 60;
  if (Math.min(60, fits) !== view.minutes) setRange(Math.min(60, fits), true);
}
export function setRange(minutes, fitted) {
  if (!minutes) return;
  if (!fitted) view.chosen = true;
  view.minutes = minutes;
  for (const b of $('range').children) b.setAttribute('aria-pressed', +b.dataset.m === minutes);
  lanes();
}
export function widen(by) { setRange(RANGES[Math.max(0, Math.min(RANGES.length - 1, RANGES.indexOf(view.minutes) + by))]); }
export function setFilter(text) { view.filter = text.trim(); reorder(); scroll.scrollTop = 0; layout(); }
export function setSort(by) {
  view.sort = by;
  for (const b of $('th').querySelectorAll('button')) b.setAttribute('aria-pressed', b.dataset.sort === by);
  reorder();
  layout();
}

// Causes: on hover, on touch, and by the keyboard.
function explain(row, node, x, y) {
  if (row) tip.show(describe(row.terms, +node.dataset.k, node.dataset.gap, known()), x, y);
}
export function stepTerm(by) {
  const d = pool.find(each => each.row?.key === view.selected);
  const nodes = d ? [...d.parts.lane.querySelectorAll('.t,.g')] : [];
  if (!nodes.length) return;
  view.termAt = view.termAt == null ? (by < 0 ? nodes.length - 1 : 0) : Math.max(0, Math.min(nodes.length - 1, view.termAt + by));
  for (const node of pad.querySelectorAll('.on')) node.classList.remove('on');
  const node = nodes[view.termAt], box = node.getBoundingClientRect();
  node.classList.add('on');
  explain(d.row, node, (box.left + box.right) / 2, box.bottom - 8);
  $('spoken').textContent = $('tip').textContent;
}
export function leaveTerms() {
  view.termAt = null;
  tip.hide();
  for (const node of pad.querySelectorAll('.on')) node.classList.remove('on');
}
pad.addEventListener('pointermove', event => {
  const node = event.target.closest('.t,.g');
  if (!node) { if (view.termAt == null) tip.hide(); return; }
  explain(node.closest('.row').row, node, event.clientX, node.getBoundingClientRect().bottom - 8);
});
pad.addEventListener('pointerleave', () => { if (view.termAt == null) tip.hide(); });
addEventListener('pointerdown', event => { if (event.pointerType === 'touch') tip.hide(); });
scroll.addEventListener('scroll', () => { tip.hide(); layout(new Set()); }, { passive: true });
new ResizeObserver(() => { measure(); lanes(); layout(); }).observe(scroll);
