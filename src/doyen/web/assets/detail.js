// One election: its leader, the line in order, its lease over time, and its past terms.

import { condition, leaseLeft, leaseTtl, view } from './list.js';
import { CAUSES, FAILED } from './timeline.js';
import { $, clock, el, hue, many, name, span } from './text.js';
import { get, isLive, known, now, state } from './state.js';
import { resign, transfer, whyNot } from './dialog.js';

let full = null, asked = '', live = null, pressed = false, due = false;
// While a button is pressed nothing is replaced, so that the click reaches it.
$('detail').addEventListener('pointerdown', () => { pressed = true; });
addEventListener('pointerup', () => { if (pressed) { pressed = false; if (due) setTimeout(draw); } });

// Details that are not part of a row: the whole names, meta, the line. Asked for when the row has changed.
async function fetchFull(row) {
  const what = `${row.key} ${row.token} ${row.leader} ${row.line} ${row.next.join()} ${Math.floor(now() / 5)}`;
  if (what === asked || !state.connected) return;
  asked = what;
  try {
    const found = await get('api/election', { key: row.key });
    if (view.selected === found.key) { full = found; draw(); }
  } catch { full = null; }
}

export function detail() {
  const row = state.rows.get(view.selected);
  if (row) fetchFull(row);
  draw();
}

function draw() {
  const root = $('detail'), chosen = getSelection();
  due = pressed;
  if (pressed || (chosen.type === 'Range' && root.contains(chosen.anchorNode))) return;   // to be copied
  const row = state.rows.get(view.selected);
  const focused = document.activeElement?.dataset?.act;
  if (!row) { root.hidden = true; return; }
  root.hidden = false;
  const known_ = full?.key === row.key ? full : null, how = condition(row), term = row.terms.at(-1);
  const off = whyNot() || (row.leader == null ? 'nobody leads' : known_ ? '' : 'reading …');
  const head = el('div', 'head');
  const title = el('h2');
  title.append(name(row.name));
  head.append(title, el('span', 'sub', { elections: 'election', locks: 'lock', semaphores: 'slot' }[row.kind]));
  const ttl = leaseTtl(row);
  if (ttl) { const r = el('div', 'right muted', `ttl ${+ttl.toFixed(1)} s`); head.append(r); }

  const body = el('div', 'body'), lead = el('div', 'lead'), big = el('div', 'big');
  if (row.leader != null && how === 'led') { const s = el('i', 'sw'); s.style.background = hue(row.leader); big.append(s, name(row.leader)); }
  else if (how === 'unknown') big.append(el('span', 'muted', 'unknown'));
  else big.append(el('span', how === 'lost' ? 'red' : 'muted', how === 'lost' ? 'nobody leads' : 'free'));
  if (row.token != null) { const tok = el('span', 'tok', 'token '); tok.append(el('b', 'mono', row.token)); big.append(tok); }
  const track = el('div', 'track'), fill = el('b'), mark = el('u'), under = el('div', 'under'), u1 = el('span'), u2 = el('span');
  mark.style.left = `${(1 / 6 + .005) * 100}%`;
  track.append(fill, mark);
  under.append(u1, u2);
  lead.append(big, track, under);

  const facts = el('dl'), put = (k, v) => { const d = el('dd', 'clip'); d.append(v); facts.append(el('dt', '', k), d); };
  if (row.leader != null && term) put('since', term[6] ? `${clock(term[2])}, ${span(Math.max(0, known() - term[2]))} ago` : `before ${clock(term[2])}, at least ${span(Math.max(0, known() - term[2]))}`);
  else if (term) put('ended', `${clock(term[3] ?? term[2])}, ${CAUSES[term[4]] ?? ''}`);
  if (row.ordered) put('order', 'the leader has been ordered to resign');
  const meta = Object.entries(known_?.leader?.meta ?? {});
  if (meta.length) {
    const tags = el('span', 'tags');
    for (const [k, v] of meta.slice(0, 12)) { const tag = el('span', 'tag clip', `${k} `); tag.dir = 'auto'; tag.append(el('b', '', v)); tag.title = v.slice(0, 500); tags.append(tag); }
    put('meta', tags);
  }
  body.append(lead, facts);

  const line = known_?.line ?? row.next.map(n => ({ name: n, rank: 0, meta: {} }));
  const waiting = el('div'), ol = el('ol', 'line');
  waiting.append(el('h3', '', row.line ? `Line: ${row.line} waiting, in this order` : 'Line: nobody waits'));
  line.slice(0, 30).forEach((each, n) => {
    const li = el('li');
    li.append(el('span', 'pos', n + 1), name(each.name), name(each.rank ? `priority ${each.rank}` : each.meta.host ?? each.meta.address ?? '', 'mono faint'));
    if (row.kind !== 'semaphores') {
      const b = el('button', '', 'Hand over');
      b.disabled = !!off;
      b.title = off;
      b.dataset.act = `to ${n}`;
      b.onclick = () => transfer({ ...row, name: known_?.name ?? row.name, leader: known_?.leader?.name ?? row.leader }, each.name, ttl);
      li.append(b);
    }
    ol.append(li);
  });
  if (line.length) waiting.append(ol);
  if (row.line > Math.min(30, line.length) && line.length) waiting.append(el('p', 'note', `and ${row.line - Math.min(30, line.length)} more`));
  body.append(waiting);
  if (known_?.samples?.length > 2 && ttl) body.append(chart(known_.samples, ttl));
  body.append(past(row));

  const acts = el('div', 'acts'), b1 = el('button', '', 'Transfer…'), b2 = el('button', 'danger', 'Resign…');
  b1.id = 'act-transfer'; b2.id = 'act-resign';
  b1.dataset.act = 'transfer'; b2.dataset.act = 'resign';
  b1.disabled = !!off || !line.length || row.kind === 'semaphores';
  b2.disabled = !!off;
  b1.onclick = () => transfer({ ...row, name: known_?.name ?? row.name }, line[0].name, ttl);
  b2.onclick = () => resign({ ...row, name: known_?.name ?? row.name });
  acts.append(b1, b2, el('span', 'why', off || 'each asks first'));
  root.replaceChildren(head, body, acts);
  if (focused) root.querySelector(`[data-act="${focused}"]`)?.focus();
  live = { row, track, fill, u1, u2 };
  lease();
}

export function lease() {
  if (!live) return;
  const { row, track, fill, u1, u2 } = live, left = leaseLeft(row), ttl = leaseTtl(row);
  track.hidden = row.leader == null || left == null;
  if (row.leader == null) { u1.textContent = ''; u2.textContent = ''; return; }
  if (left == null) { u1.textContent = Object.keys(state.topics.leases ?? {}).length || now() - (row.terms.at(-1)?.[2] ?? 0) < 3 ? 'looking …' : 'this store does not tell what is left of a lease'; u2.textContent = ''; return; }
  const f = Math.max(0, Math.min(1, left / ttl));
  fill.style.transform = `scaleX(${f.toFixed(3)})`;
  track.classList.toggle('low', f < .4);
  u1.textContent = left > 0 ? `${left.toFixed(1)} s of ${+ttl.toFixed(1)} s left` : isLive() ? 'running out' : 'ran out: who leads is unknown from here';
  u2.textContent = left > 0 ? `stops itself at ${(ttl / 6).toFixed(1)} s` : '';
}

const NS = 'http://www.w3.org/2000/svg';
function shape(tag, attributes) {
  const node = document.createElementNS(NS, tag);
  for (const [k, v] of Object.entries(attributes)) node.setAttribute(k, v);
  return node;
}
// What was left of the lease at each look. A leader in good health renews at two thirds.
function chart(samples, ttl) {
  const W = 334, H = 34, box = el('div'), end = samples.at(-1)[0], from = Math.max(samples[0][0], end - 300);
  const shown = samples.filter(s => s[0] >= from), least = Math.min(...shown.map(s => s[1]));
  const svg = shape('svg', { viewBox: `0 0 ${W} ${H}`, class: 'spark', role: 'img', 'aria-label': `Least left of the lease: ${least.toFixed(1)} s of ${ttl.toFixed(1)} s` });
  const x = t => from === end ? W : (t - from) / (end - from) * (W - 3), y = left => H - 1.5 - left / ttl * (H - 4);
  svg.append(shape('line', { x1: 0, x2: W, y1: y(0), y2: y(0), class: 'base' }));
  for (const [t, left] of shown) svg.append(shape('rect', { x: x(t).toFixed(1), y: y(left).toFixed(1), width: 2, height: Math.max(1, y(0) - y(left)).toFixed(1), rx: 1, class: left < ttl * .4 ? 'look late' : 'look' }));
  svg.append(shape('line', { x1: 0, x2: W, y1: y(ttl / 6), y2: y(ttl / 6), class: 'limit' }));
  const under = el('div', 'under');
  under.append(el('span', '', `least ${least.toFixed(1)} s left`), el('span', '', 'dashed: the leader stops itself'));
  box.append(el('h3', '', `Lease, last ${span(Math.max(1, end - from))}`), svg, under);
  return box;
}

function past(row) {
  const box = el('div'), ended = row.terms.map((t, k) => [t, k]).filter(([t]) => t[3] != null).slice(-10).reverse();
  if (!ended.length) return box;
  const table = el('table'), head = el('tr'), rows = el('tbody');
  for (const [text, cls] of [['Token', 'num'], ['Leader', ''], ['Led for', 'num'], ['Ended by', ''], ['Gap', 'num']]) head.append(el('th', cls, text));
  const thead = el('thead');
  thead.append(head);
  for (const [t, k] of ended) {
    const next = row.terms[k + 1], gap = (next ? next[2] : known()) - t[3], tr = el('tr'), who = el('td');
    who.append(name(t[0]));
    const ended_ = el('td', 'muted', CAUSES[t[4]] ?? t[4]);
    ended_.title = t[5];
    const cell = el('td', 'num', row.kind !== 'elections' && !FAILED.has(t[4]) ? '–' : gap < .0015 ? '<2 ms' : span(Math.max(0, gap)));
    if (gap > 1 && FAILED.has(t[4])) cell.classList.add('red');
    tr.append(el('td', 'num mono', t[1]), who, el('td', 'num', `${t[6] ? '' : '≥ '}${span(Math.max(0, t[3] - t[2]))}`), ended_, cell);
    rows.append(tr);
  }
  table.append(thead, rows);
  box.append(el('h3', '', `Past terms${row.terms.length > 10 ? `, the last 10 of ${many(row.terms.length, 'term')}` : ''}`), table);
  return box;
}
