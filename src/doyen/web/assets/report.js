// The report of doyen verify: the verdict, and the terms of every election on one axis.

import { $, clock, day, el, many, name, plain, thousands } from './text.js';
import { Tip, describe, drawAxis, drawLane } from './timeline.js';

const data = JSON.parse($('data').textContent), tip = new Tip($('tip'));
const all = data.elections, pool = [];
let shown = all, selected = 0, termAt = null;
const ends = all.flatMap(e => e.terms.flatMap(t => [t[2], t[3]]));
let first = Infinity, last = -Infinity;
for (const t of ends) { if (t < first) first = t; if (t > last) last = t; }
if (!(last > first)) { first = (Number.isFinite(first) ? first : 0) - 1; last = first + 2; }
const margin = (last - first) * .01;
const whole = { from: first - margin, to: last + margin, known: Infinity, tolerance: data.tolerance };
let view = whole;

$('verdict').classList.add(data.verdict);
$('heading').textContent = data.heading;
$('text').textContent = data.text;
$('clocks').textContent = data.clocks;
$('figures').append(...data.figures.map(([value, label]) => {
  const box = el('div', 'stat');
  box.append(el('b', '', typeof value === 'number' ? thousands(value) : value), el('span', '', label));
  return box;
}));
$('violations').hidden = !data.violations.length;
$('v-count').textContent = thousands(data.violations.length);
$('v-list').append(...data.violations.slice(0, 200).map((v, k) => {
  const box = el('details'), head = el('summary', '', v.headline), show = el('button', 'small', 'Show on the timeline');
  head.dir = 'auto';
  box.open = k < 3;
  show.onclick = () => look(v);
  box.append(head, el('pre', '', v.story), show);
  return box;
}));
$('warnings').hidden = !data.warnings.length;
$('w-list').append(...data.warnings.slice(0, 200).map(text => { const li = el('li', '', text); li.dir = 'auto'; return li; }));
$('lanes').hidden = !all.length;

function look(v) {
  const at = shown.findIndex(e => e.name === v.election);
  const wide = Math.max(.2, v.by);
  view = { ...view, from: v.at - wide, to: v.at + v.by + wide };
  if (at >= 0) { selected = at; $('scroll').scrollTop = at * height(); }
  draw();
  $('lanes').scrollIntoView({ block: 'nearest' });
}

const scroll = $('scroll'), pad = $('pad');
const height = () => matchMedia('(max-width: 720px)').matches ? 40 : 27;
function make() {
  const row = el('div', 'row r-row');
  row.setAttribute('role', 'option');
  row.label = name('');
  row.lane = el('div', 'lane');
  row.append(row.label, row.lane);
  row.onclick = event => {   // by touch there is no hover
    const node = event.target.closest('.t,.g,.v');
    selected = row.at;
    draw();
    if (node) explain(row, node, event.clientX, row.getBoundingClientRect().bottom - 8);
  };
  pad.append(row);
  return row;
}
function draw() {
  const h = height(), top = Math.floor(scroll.scrollTop / h), need = Math.min(shown.length, Math.ceil(scroll.clientHeight / h) + 1);
  pad.style.height = `${shown.length * h}px`;
  while (pool.length < need) pool.push(make());
  const width = $('axis').clientWidth;
  drawAxis($('axis'), view, width, `${day(view.to)} ${clock(view.to)}`);
  pool.forEach((row, k) => {
    const at = top + k, lane = shown[at];
    row.hidden = k >= need || !lane;
    if (row.hidden) return;
    row.at = at;
    row.style.transform = `translateY(${at * h}px)`;
    row.setAttribute('aria-selected', at === selected);
    row.label.textContent = row.label.title = lane.kind === 'elections' ? plain(lane.name) : `${plain(lane.name)} (${lane.kind.slice(0, -1)})`;
    row.setAttribute('aria-label', `${lane.name}, ${many(lane.terms.length, 'term')}`);
    drawLane(row.lane, lane.terms, view, width, lane.marks);
  });
  $('l-count').textContent = shown.length < all.length ? `${thousands(shown.length)} of ${thousands(all.length)}` : many(all.length, 'election');
}
function explain(row, node, x, y) {
  const lane = shown[row.at];
  tip.show(node.dataset.v != null ? [{ cls: 'head red', text: lane.marks[+node.dataset.v].text }] : describe(lane.terms, +node.dataset.k, node.dataset.gap, last), x, y);
}
pad.addEventListener('pointermove', event => {
  const node = event.target.closest('.t,.g,.v');
  if (node) explain(node.closest('.row'), node, event.clientX, node.getBoundingClientRect().bottom - 8); else tip.hide();
});
pad.addEventListener('pointerleave', () => tip.hide());
addEventListener('pointerdown', event => { if (event.pointerType === 'touch') tip.hide(); });
scroll.addEventListener('scroll', () => { tip.hide(); draw(); }, { passive: true });
addEventListener('resize', draw);
function zoom(by, at = .5) {
  const length = Math.min((last - first) * 1.02, Math.max(.01, (view.to - view.from) * by)), middle = view.from + (view.to - view.from) * at;
  view = { ...view, from: middle - length * at, to: middle + length * (1 - at) };
  draw();
}
function pan(by) { const length = view.to - view.from; view = { ...view, from: view.from + by * length, to: view.to + by * length }; draw(); }
$('in').onclick = () => zoom(.5);
$('out').onclick = () => zoom(2);
$('earlier').onclick = () => pan(-.5);
$('later').onclick = () => pan(.5);
$('all').onclick = () => { view = whole; draw(); };
scroll.addEventListener('wheel', event => {
  if (!event.ctrlKey) return;
  event.preventDefault();
  const box = $('axis').getBoundingClientRect();
  zoom(event.deltaY > 0 ? 1.25 : .8, Math.max(0, Math.min(1, (event.clientX - box.left) / box.width)));
}, { passive: false });
$('filter').oninput = () => {
  const q = $('filter').value.trim().toLowerCase();
  shown = all.filter(e => e.name.toLowerCase().includes(q) || e.terms.some(t => t[0].toLowerCase().includes(q)));
  selected = 0;
  scroll.scrollTop = 0;
  draw();
};
function step(by) {
  selected = Math.max(0, Math.min(shown.length - 1, selected + by));
  termAt = null;
  const h = height(), at = selected * h;
  if (at < scroll.scrollTop) scroll.scrollTop = at; else if (at + h > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = at + h - scroll.clientHeight;
  draw();
}
function stepTerm(by) {
  const row = pool.find(each => !each.hidden && each.at === selected), nodes = row ? [...row.lane.children] : [];
  if (!nodes.length) return;
  termAt = termAt == null ? (by < 0 ? nodes.length - 1 : 0) : Math.max(0, Math.min(nodes.length - 1, termAt + by));
  for (const node of pad.querySelectorAll('.on')) node.classList.remove('on');
  const node = nodes[termAt], box = node.getBoundingClientRect();
  node.classList.add('on');
  explain(row, node, (box.left + box.right) / 2, box.bottom - 8);
  $('spoken').textContent = $('tip').textContent;
}
addEventListener('keydown', event => {
  if (event.target === $('filter') || event.metaKey || event.ctrlKey || event.altKey) return;
  const keys = { ArrowDown: () => step(1), j: () => step(1), ArrowUp: () => step(-1), k: () => step(-1), ArrowLeft: () => stepTerm(-1), ArrowRight: () => stepTerm(1), '+': () => zoom(.5), '-': () => zoom(2), Escape: () => { termAt = null; tip.hide(); }, '/': () => $('filter').focus() };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
scroll.style.setProperty('--rows', Math.max(3, all.length));
draw();
