// The page of a store: header, summary, keys, and when what is drawn again.

import { CAUSES, FAILED } from './timeline.js';
import { $, calm, clock, el, many, said, span, thousands } from './text.js';
import { follow, health, isLive, isWaiting, known, now, onChange, state } from './state.js';
import * as list from './list.js';
import { detail, lease } from './detail.js';
import { help, isOpen, quoted } from './dialog.js';
import { drawPanels, ticking } from './panels.js';

// ---- header, banner, summary ---------------------------------------------------------------
function headline() {
  const h = health(), live = isLive(), at = known();
  $('store').textContent = state.hello?.store ?? '…';
  $('store').title = state.hello?.store ?? '';
  const word = isWaiting() ? 'connecting' : !state.connected ? (state.refused ? 'refused' : 'page offline') : h.reachable ? 'healthy' : 'unreachable';
  if ($('health').textContent !== word) $('health').textContent = word;
  $('health-dot').className = `dot ${live ? '' : isWaiting() ? 'unknown' : 'bad'}`;
  $('asof').textContent = h.as_of == null ? '' : clock(live ? h.as_of : at, 1);   // of the last answer
  document.body.classList.toggle('stale', !live && !isWaiting());
  const banner = $('banner');
  if (live || isWaiting()) { banner.hidden = true; }
  else {
    const since = state.connected ? h.since : state.lostAt;
    $('banner-what').textContent = state.connected ? 'Store unreachable' : state.refused ? 'The server refuses this page' : 'This page has lost its server';
    $('banner-when').hidden = state.refused;
    $('banner-since').textContent = clock(since);
    $('banner-long').textContent = state.refused ? '' : ` (${span(Math.max(0.001, now() - since))})`;
    $('banner-why').textContent = (state.connected ? h.error : state.problem) || 'no answer';
    $('banner-stale').hidden = h.as_of == null;
    $('banner-known').textContent = h.as_of == null ? '' : clock(at, 1);
    $('retry').hidden = state.connected;   // the server asks the store by itself
    if (banner.hidden) banner.hidden = false;
  }
  partial(live ? h.stale ?? [] : []);
  document.title = `${live ? '' : state.paused ? 'paused: ' : '✕ '}doyen · ${(state.hello?.store ?? '').slice(0, 80)}`;
}

// The store answers, and a part of the page cannot be read.
const PARTS = { elections: 'the list of elections and locks', changes: 'notifications of changes', members: 'groups', shards: 'shards', configs: 'configurations', nodes: 'the nodes of the quorum', leases: 'leases', processes: 'the processes of this demonstration' };
function partial(stale) {
  const text = stale.map(([part, at, error]) => `Not up to date: ${PARTS[part] ?? part}, ${at == null ? 'never read' : `last read at ${clock(at)}`} (${error || 'no answer'}).`).join(' ');
  $('partial').hidden = !text;
  if ($('partial-text').textContent !== text) $('partial-text').textContent = text;
}

function summary() {
  let led = 0, elections = 0, locks = 0, gap = 0, unknown = 0, failovers = 0;
  const newest = [], hour = now() - 3600;   // the two newest changes of leader
  for (const row of state.rows.values()) {
    const how = list.condition(row);
    if (row.kind === 'elections') { elections++; if (how === 'led') led++; if (how === 'unknown') unknown++; } else locks++;
    if (how === 'lost') gap++;
    for (let k = row.terms.length - 1; k >= 0; k--) {
      const term = row.terms[k];
      if (term[3] != null && term[3] < hour) break;
      if (term[3] == null) continue;
      if (FAILED.has(term[4])) failovers++;
      if (newest.length < 2 || term[3] > newest[1][0]) { newest.push([term[3], row, k]); newest.sort((x, y) => y[0] - x[0]); newest.length = Math.min(2, newest.length); }
    }
  }
  const b = $('s-led');
  b.textContent = led || !unknown ? thousands(led) : '–';
  b.append(el('small', '', ` of ${thousands(elections)}${unknown ? `, ${thousands(unknown)} unknown` : ''}${locks ? `, and ${many(locks, 'lock')}` : ''}`));
  $('s-gap').textContent = unknown ? '–' : thousands(gap);
  $('st-gap').classList.toggle('bad', gap > 0);
  $('s-fail').textContent = thousands(failovers);
  const h = health();
  $('s-rt').textContent = isLive() && h.p50_ms != null ? `${h.p50_ms.toFixed(1)} · ${h.p99_ms.toFixed(1)}` : '–';
  $('s-rt').append(el('small', '', isLive() && h.p50_ms != null ? ' ms' : ''));
  const lines = newest.map(([at, row, k]) => {
    const term = row.terms[k], next = row.terms[k + 1], line = el('div', 'clip');
    line.dir = 'auto';
    line.append(el('span', 'mono', clock(at)), next
      ? `${said(row.name)}: ${said(term[0])} → ${said(next[0])}, ${CAUSES[term[4]]}, ${next[2] - term[3] < .0015 ? 'no gap' : `${span(next[2] - term[3])} without a leader`}`
      : `${said(row.name)} has no leader: ${CAUSES[term[4]]}`);
    return line;
  });
  const text = lines.map(line => line.textContent).join('\n');
  if (text !== summary.text) { summary.text = text; $('feed').replaceChildren(...lines); }
  const none = state.rows.size === 0 && state.connected && health().as_of != null;
  document.body.classList.toggle('empty', none);
  if (none) $('example').textContent = `doyen run billing --store ${quoted(state.hello?.store ?? '')} -- ./bill`;
}

// ---- when what is drawn ----------------------------------------------------------------------
// The rows that are shown are drawn at once; what sums them up, five times a second at most.
let around = 0;
function drawAround() {
  if (around) return;
  around = setTimeout(() => { around = 0; summary(); headline(); drawPanels(); }, document.body.dataset.painted ? 200 : 0);
}
// Thousands of rows are sorted anew twice a second at most: nobody can follow rows that move more often.
let sorting = 0;
function sortSoon() {
  if (!sorting) sorting = setTimeout(() => { sorting = 0; list.reorder(); list.layout(); }, 500);
}
onChange(() => {
  if (state.listChanged) { state.listChanged = false; list.reorder(); state.changed.clear(); list.fitRange(); list.layout(); list.lanes(); detail(); }
  else if (state.changed.size) {
    if (list.view.sort !== 'name') sortSoon();
    list.layout(state.changed);
    if (state.changed.has(list.view.selected)) detail();
    state.changed.clear();
  }
  if (isLive() !== shownLive) { shownLive = isLive(); headline(); }
  drawAround();
  if (list.view.order.length && !document.body.dataset.painted) {
    document.body.dataset.painted = '1';
    performance.mark('doyen-first-rows');
  }
});
let shownLive = false;
let n = 0, was = null;
function tick() {
  n++;
  list.leases();
  lease();
  ticking();
  if (calm.matches || n % 5 === 0) {
    headline();
    if (!isOpen()) { if (n % 25 === 0) list.fitRange(); list.lanes(); summary(); if (n % 10 === 0 || was !== isLive()) detail(); }
    was = isLive();
  }
}
let timer = 0;
function pace() { clearInterval(timer); timer = setInterval(tick, calm.matches ? 1000 : 200); }
calm.addEventListener('change', pace);

// ---- keys ------------------------------------------------------------------------------------
const REGIONS = ['list', 'groups', 'shards', 'configs', 'nodes'];
function go(id) {
  const section = $(id);
  if (!section.hidden) { section.scrollIntoView({ behavior: calm.matches ? 'auto' : 'smooth', block: 'center' }); (section.querySelector('[tabindex="0"]') ?? section.querySelector('button'))?.focus({ preventScroll: true }); }
}
addEventListener('keydown', event => {
  if (isOpen() || event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.target === $('filter')) {
    if (event.key === 'Escape') { $('filter').value = ''; list.setFilter(''); $('scroll').focus(); }
    if (event.key === 'ArrowDown' || event.key === 'Enter') { event.preventDefault(); $('scroll').focus(); list.select(list.view.order[0], true); }
    return;
  }
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const keys = {
    ArrowDown: () => list.step(1), j: () => list.step(1), ArrowUp: () => list.step(-1), k: () => list.step(-1),
    PageDown: () => list.step(list.pageOfRows()), PageUp: () => list.step(-list.pageOfRows()),
    Home: () => list.step(-Infinity), End: () => list.step(Infinity),
    ArrowLeft: () => list.stepTerm(-1), ArrowRight: () => list.stepTerm(1),
    '/': () => $('filter').focus(), '?': help, Escape: list.leaveTerms,
    '[': () => list.widen(-1), ']': () => list.widen(1),
    t: () => $('act-transfer')?.click(), r: () => $('act-resign')?.click(),
  };
  const act = keys[event.key] ?? (/^[1-5]$/.test(event.key) ? () => go(REGIONS[event.key - 1]) : null);
  if (act) { event.preventDefault(); act(); }
});
$('filter').oninput = () => list.setFilter($('filter').value);
$('range').onclick = event => list.setRange(+event.target.dataset.m);
$('th').onclick = event => { if (event.target.dataset.sort) list.setSort(event.target.dataset.sort); };
$('help').onclick = help;
$('retry').onclick = () => state.retry?.();
for (const link of document.querySelectorAll('nav a')) link.onclick = event => { event.preventDefault(); go(link.hash.slice(1)); };
list.whenSelected(detail);
pace();
follow();
