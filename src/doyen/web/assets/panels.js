// Groups, shards, configurations, the nodes of a quorum, and the processes of `doyen up`.

import { $, clock, day, el, many, name, plain, said, size, span, thousands } from './text.js';
import { get, isLive, known, now, state } from './state.js';
import { close, confirm, open, perform, quoted, whyNot } from './dialog.js';
import { tip } from './list.js';

const drawn = {};
// Draw a panel if its topic has changed, or whether actions are allowed has.
function panel(topic, id, draw) {
  const value = state.topics[topic], mark = [value, whyNot()];
  const some = Array.isArray(value) ? value.length > 0 : value != null;
  if ($(id).hidden === some) { $(id).hidden = !some; $(`nav-${id}`).hidden = !some; }
  if (!some || (drawn[topic]?.[0] === mark[0] && drawn[topic]?.[1] === mark[1])) return;
  drawn[topic] = mark;
  draw(value);
}
export function drawPanels() {
  panel('members', 'groups', drawGroups);
  panel('shards', 'shards', drawShards);
  panel('configs', 'configs', drawConfigs);
  panel('nodes', 'nodes', drawNodes);
  panel('processes', 'processes', drawProcesses);
}
export function ticking() { for (const f of heard) f(); }

// ---- groups: the last heartbeats of each member ---------------------------------------------
// Members renew all the time, so rows are kept: neither the focus nor a tip is lost.
let heard = [];
const memberRows = new Map(), groupBoxes = new Map();
function drawGroups(members) {
  const groups = new Map();
  for (const m of members) { if (!groups.has(m.group)) groups.set(m.group, []); groups.get(m.group).push(m); }
  const rows = new Set();
  put($('groups-body'), [...groups].map(([group, its]) => {
    const box = kept(groupBoxes, group, () => makeGroup(group)), alive = its.filter(m => m.gone == null).length;
    box.count.textContent = `${alive} ${alive === its.length ? '' : `of ${its.length} `}here`;
    put(box, [box.head, ...its.map(m => { const row = kept(memberRows, `${m.group}\n${m.name}`, makeMember); rows.add(row); row.show(m); return row; })]);
    return box;
  }));
  for (const [key, row] of memberRows) if (!rows.has(row)) memberRows.delete(key);
  for (const key of groupBoxes.keys()) if (!groups.has(key)) groupBoxes.delete(key);
  heard = [...rows].map(row => row.update);
  $('groups-sub').textContent = `${many(groups.size, 'group')}, ${many(members.filter(m => m.gone == null).length, 'member')}`;
}
function kept(map, key, make) {
  if (!map.has(key)) map.set(key, make());
  return map.get(key);
}
// Give a node these children, if they are not the ones that it has.
function put(node, children) {
  if (node.childNodes.length !== children.length || children.some((child, k) => node.childNodes[k] !== child)) node.replaceChildren(...children);
}
function makeGroup(group) {
  const box = el('div', 'group');
  box.head = el('div', 'gname');
  box.count = el('span');
  box.head.append(name(group), box.count);
  return box;
}
function makeMember() {
  const row = el('div', 'mem'), dot = el('span', 'dot'), who = name(''), beat = el('span', 'beat'), ago = el('span', 'ago');
  let m, what = '', beats = null;
  row.tabIndex = 0;
  row.append(dot, who, beat, ago);
  row.show = member => {
    m = member;
    if (who.textContent !== plain(m.name)) who.textContent = plain(m.name);
    if (beats !== m.beats) { beats = m.beats; beat.replaceChildren(...[...beats.padStart(12, ' ')].map(b => el('i', b === 'l' ? 'late' : b === ' ' ? 'none' : ''))); }
    row.update();
  };
  row.update = () => {
    // Whether it is late is known of the last look at the store: since then it may have renewed.
    const silent = m.heard == null ? null : Math.max(0, (m.gone ?? known()) - m.heard), late = m.heard != null && (isLive() ? m.looked : known()) - m.heard > m.ttl * 2 / 3;
    const kind = m.gone != null ? 'bad' : !isLive() && late ? 'unknown' : late || m.state !== 'up' ? 'warn' : '';
    if (dot.className !== `dot ${kind}`) dot.className = `dot ${kind}`;
    ago.textContent = m.gone != null ? 'gone' : silent == null ? '' : span(silent);
    what = m.gone != null ? `gone since ${clock(m.gone)}` : m.state !== 'up' ? `${m.state}${m.reason ? `: ${m.reason}` : ''}` : late ? `suspected: not heard for ${span(silent)} of its ttl of ${m.ttl} s` : 'up';
    const label = `${m.name}, ${what}`;
    if (row.getAttribute('aria-label') !== label) row.setAttribute('aria-label', label);
  };
  const tell = (x, y) => tip.show([{ cls: 'head', text: plain(m.name) }, { cls: 'muted', text: what }, { cls: 'cause', text: `incarnation ${m.incarnation}, ${m.by}` }, { cls: 'mono', text: plain(m.meta) }], x, y);
  row.onpointerenter = event => tell(event.clientX, row.getBoundingClientRect().bottom - 12);
  row.onpointerleave = event => { if (event.pointerType !== 'touch') tip.hide(); };
  row.onfocus = () => { const box = row.getBoundingClientRect(); tell((box.left + box.right) / 2, box.bottom - 12); };
  row.onblur = () => tip.hide();
  return row;
}

// ---- shards: one cell each, coloured by owner ------------------------------------------------
const OWNERS = 10;
const ownerName = (set, number) => number < 0 ? 'nobody' : said(set.names[number]);
let chosen = 0, sets = [], cells = null, lit = -1, keyed = -1;   // keyed: the shard that the keyboard is on
function drawShards(value) {
  sets = value;
  chosen = Math.min(chosen, sets.length - 1);
  const pick = $('shard-sets');
  pick.hidden = sets.length < 2;
  pick.replaceChildren(...sets.map((s, k) => { const o = el('option', '', s.name); o.value = k; return o; }));
  pick.value = chosen;
  drawSet();
}
function drawSet() {
  const set = sets[chosen];
  $('shards-sub').textContent = `${sets.length < 2 ? `set ${said(set.name)}, ` : ''}${many(set.count, 'shard')}`;
  const without = set.owners.filter(o => o < 0).length;
  $('shards-state').textContent = [set.paused && 'paused', set.moves.length && `${set.moves.length} moving`, without && `${without} without an owner`].filter(Boolean).join(', ') || 'at rest';
  const counts = new Array(set.names.length).fill(0), off = whyNot();
  for (const o of set.owners) if (o >= 0) counts[o]++;
  $('owners').replaceChildren(...set.names.map((who, o) => {
    const item = el('span', 'owner'), b = el('button', 'plain'), s = el('i', 'sw');
    s.style.background = `var(--o${o % OWNERS})`;
    b.append(s, name(who), el('span', 'n', counts[o]));
    b.onpointerenter = b.onfocus = () => { lit = o; drawMap(); };
    b.onpointerleave = b.onblur = () => { lit = -1; drawMap(); };
    item.append(b);
    const drained = set.drained.includes(who);
    if (drained) item.append(el('span', 'tag', 'drained'));
    if (Object.hasOwn(set.grace, who)) item.append(el('span', 'tag', 'gone, kept for its return'));
    if (state.hello?.may_act && set.members[o]) {
      const act = el('button', 'small', drained ? 'Undo drain…' : 'Drain…');
      act.disabled = !!off;
      act.onclick = () => drain(set, who, drained, counts[o]);
      item.append(act);
    }
    return item;
  }));
  const lines = set.moves.slice(0, 4).map(([n, from, to, way]) => {
    const line = el('div'); line.dir = 'auto';
    line.append(el('b', '', n), `  ${ownerName(set, from)} → ${ownerName(set, to)}, ${way}`);
    return line;
  });
  for (const [n, why] of Object.entries(set.aside).slice(0, 3)) lines.push(el('div', 'red', `${n} is set aside: ${why}`));
  if (set.note) lines.push(el('div', '', set.note));
  $('moves').replaceChildren(...lines);
  const move = $('move-shard');
  move.hidden = !state.hello?.may_act;
  move.disabled = !!off;
  drawMap();
}
function drawMap() {
  const set = sets[chosen], canvas = $('map'), width = canvas.parentElement.clientWidth - 28;
  if (!set || width <= 0) return;
  const columns = Math.max(8, Math.min(64, Math.ceil(Math.sqrt(set.count * 4)))), cell = Math.max(4, Math.min(17, Math.floor(width / columns)));
  const across = Math.max(1, Math.floor(width / cell)), down = Math.ceil(set.count / across), ratio = devicePixelRatio || 1, gap = cell > 8 ? 2 : 1;
  canvas.width = across * cell * ratio;
  canvas.height = down * cell * ratio;
  canvas.style.width = `${across * cell}px`;
  canvas.style.height = `${down * cell}px`;
  cells = { across, cell };
  const g = canvas.getContext('2d'), css = getComputedStyle(document.documentElement), colour = n => css.getPropertyValue(n).trim();
  const hues = Array.from({ length: OWNERS }, (_, k) => colour(`--o${k}`)), moving = new Map(set.moves.map(m => [m[0], m]));
  g.scale(ratio, ratio);
  for (let n = 0; n < set.count; n++) {
    const x = (n % across) * cell, y = Math.floor(n / across) * cell, w = cell - gap, owner = set.owners[n], move = moving.get(n);
    g.globalAlpha = lit >= 0 && lit !== owner && lit !== move?.[2] ? .18 : 1;
    g.beginPath();
    g.roundRect(x, y, w, w, cell > 8 ? 2.5 : 1);
    if (owner < 0) { g.strokeStyle = colour('--red'); g.lineWidth = 1.5; g.stroke(); } else { g.fillStyle = hues[owner % OWNERS]; g.fill(); }
    if (move) {
      g.save();
      g.clip();
      g.strokeStyle = hues[move[2] % OWNERS];
      g.lineWidth = 2.2;
      for (let d = -w; d < w * 2; d += 4.5) { g.beginPath(); g.moveTo(x + d, y + w); g.lineTo(x + d + w, y); g.stroke(); }
      g.restore();
      g.strokeStyle = colour('--text');
      g.lineWidth = 1.2;
      g.stroke();
    }
  }
  g.globalAlpha = 1;
  if (keyed >= 0 && keyed < set.count) {
    g.strokeStyle = colour('--text');
    g.lineWidth = 2;
    g.strokeRect((keyed % across) * cell + .5, Math.floor(keyed / across) * cell + .5, cell - gap - 1, cell - gap - 1);
  }
  canvas.setAttribute('aria-label', `Shards of ${set.name} by owner; arrow keys step through them`);
}
function cellAt(event) {
  if (!cells) return -1;
  const box = $('map').getBoundingClientRect(), n = Math.floor((event.clientY - box.top) / cells.cell) * cells.across + Math.floor((event.clientX - box.left) / cells.cell);
  return n >= 0 && n < sets[chosen].count ? n : -1;
}
function tellShard(n) {
  const set = sets[chosen], owner = set.owners[n], move = set.moves.find(m => m[0] === n), planned = set.planned[n];
  const lines = [{ cls: 'head', text: `Shard ${n}` }, { cls: 'muted', text: owner < 0 ? 'no owner' : `${said(set.names[owner])}, token ${set.tokens[n]}` }];
  if (move) lines.push({ cls: 'cause', text: `moves to ${ownerName(set, move[2])}: ${move[3]}` });
  else if (planned >= 0 && planned !== owner) lines.push({ cls: 'cause', text: `planned for ${said(set.names[planned])}` });
  if (set.aside[n]) lines.push({ cls: 'cause red', text: `set aside: ${set.aside[n]}` });
  return lines;
}
$('map').addEventListener('pointermove', event => { const n = cellAt(event); if (n < 0) tip.hide(); else tip.show(tellShard(n), event.clientX, event.clientY); });
$('map').addEventListener('pointerleave', () => tip.hide());
$('map').addEventListener('click', event => { const n = cellAt(event); if (n < 0) return; if (state.hello?.may_act && !whyNot()) moveShard(n); else tip.show(tellShard(n), event.clientX, event.clientY); });
$('map').addEventListener('keydown', event => {
  const set = sets[chosen], step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -cells?.across, ArrowDown: cells?.across, Home: -Infinity, End: Infinity }[event.key];
  if (event.key === 'Enter' && keyed >= 0 && state.hello?.may_act && !whyNot()) moveShard(keyed);
  if (!set || !step || event.metaKey || event.ctrlKey || event.altKey) return;
  event.preventDefault();
  event.stopPropagation();   // the list has these keys elsewhere
  keyed = keyed < 0 ? 0 : Math.max(0, Math.min(set.count - 1, keyed + step));
  drawMap();
  const box = $('map').getBoundingClientRect();
  tip.show(tellShard(keyed), box.left + (keyed % cells.across + .5) * cells.cell, box.top + Math.floor(keyed / cells.across + 1) * cells.cell);
  $('spoken').textContent = $('tip').textContent;
});
$('map').addEventListener('blur', () => { if (keyed >= 0) { keyed = -1; tip.hide(); drawMap(); } });
$('shard-sets').onchange = event => { chosen = +event.target.value; drawSet(); };
$('move-shard').onclick = () => moveShard(0);
new ResizeObserver(() => { if (sets.length) drawMap(); }).observe($('owners'));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { if (sets.length) drawMap(); });

function moveShard(n) {
  const set = sets[chosen], form = el('p', 'form'), which = el('input'), to = el('select');
  which.type = 'number'; which.min = 0; which.max = set.count - 1; which.value = n;
  const members = set.names.filter((who, o) => set.members[o] && !set.drained.includes(who));
  for (const who of members) { const o = el('option', '', who); o.value = who; to.append(o); }
  const other = members.find(who => who !== set.names[set.owners[n]]);
  if (other) to.value = other;
  const a = el('label', '', 'Shard '), b = el('label', '', ' to ');
  a.append(which); b.append(to); form.append(a, b);
  confirm({
    title: `Move a shard of ${said(set.name)}?`, extra: form,
    steps: [
      'The member becomes the preferred owner of the shard, until that is changed.',
      'The controller plans the move. The new owner prepares; until it is ready, nothing changes for the old one.',
      'The old owner ends its work, and then releases the shard. Between its end and the beginning of the new owner, the shard has no owner.',
    ],
    note: 'If the new owner does not become ready in time, the move is given up. If the old one does not end, the move is reported as stuck.',
    command: `doyen shards ${quoted(set.name)} move SHARD MEMBER`,
    label: 'Move it',
    request: () => which.checkValidity() && which.value !== '' && to.value ? { action: 'move', set: set.name, shard: +which.value, to: to.value } : null,
  });
}
function drain(set, who, undo, owns) {
  if (undo) {
    confirm({
      title: `Let ${said(who)} own shards of ${said(set.name)} again?`,
      steps: [`${said(who)} gets the weight that it states itself.`, 'The controller may move shards to it, a few at a time.'],
      command: `doyen shards ${quoted(set.name)} drain ${quoted(who)} --undo`, label: 'Undo the drain',
      request: { action: 'undrain', set: set.name, member: who },
    });
    return;
  }
  confirm({
    title: `Drain ${said(who)} of the shards of ${said(set.name)}?`,
    steps: [
      `${said(who)} gets the weight 0. If no other member could own its shards, nothing is changed.`,
      `Its ${many(owns, 'shard')} move to others, a few at a time. Each new owner prepares before ${said(who)} ends its work for that shard.`,
      `${said(who)} stays a member, and owns nothing until the drain is undone.`,
    ],
    command: `doyen shards ${quoted(set.name)} drain ${quoted(who)}`, label: `Drain ${said(who)}`,
    request: { action: 'drain', set: set.name, member: who },
  });
}

// ---- configurations: versions, who has applied them, what changed -----------------------------
function drawConfigs(configs) {
  const table = $('configs-table'), head = el('tr'), body = el('tbody'), thead = el('thead');
  for (const [text, cls] of [['Name', ''], ['Version', 'num'], ['Written', ''], ['By', 'opt'], ['Applied', 'num']]) head.append(el('th', cls, text));
  thead.append(head);
  for (const c of configs) {
    const tr = el('tr'), first = el('td'), b = el('button', 'plain link');
    b.append(name(c.name));
    b.onclick = () => showConfig(c.name, null);
    first.append(b);
    tr.append(first);
    if (c.error) { const td = el('td', 'red', c.error); td.colSpan = 4; tr.append(td); body.append(tr); continue; }
    const by = el('td', 'opt muted'), applied = el('td', 'num', c.subscribers ? `${c.applied} of ${c.subscribers}` : '–');
    by.append(name(c.author));
    if (c.refused) { applied.append(el('span', 'red', `, ${c.refused} refused`)); } else if (c.applied < c.subscribers) applied.classList.add('amber');
    tr.append(el('td', 'num mono', c.version), el('td', 'muted', when(c.at)), by, applied);
    body.append(tr);
  }
  table.replaceChildren(thead, body);
  $('configs-sub').textContent = many(configs.length, 'document');
}
const when = at => typeof at !== 'number' ? '' : now() - at < 86400 ? clock(at) : `${day(at)} ${clock(at).slice(0, 5)}`;
async function showConfig(which, version) {
  let found;
  try { found = await get('api/config', version == null ? { name: which } : { name: which, version }); } catch (error) { found = null; }
  const ok = el('button', '', 'Close');
  ok.onclick = close;
  if (!found) { open(which, [el('p', '', 'It cannot be read at present.')], [ok]); return; }
  const box = el('div', 'config'), history = el('div', 'history'), diff = el('pre', 'diff');
  for (const h of found.history) {
    const b = el('button', 'plain');
    b.setAttribute('aria-pressed', h.version === found.version);
    b.append(el('b', 'mono', h.version), el('span', 'muted', when(h.at)), name(h.author, 'muted'));
    b.onclick = () => showConfig(which, h.version);
    history.append(b);
  }
  for (const [sign, text] of found.diff) {
    const line = el('div', { '+': 'plus', '-': 'minus', ' ': '' }[sign], `${sign} ${text}`);
    diff.append(line);
  }
  diff.tabIndex = 0;
  box.append(history, diff);
  const parts = [el('p', 'muted', found.before == null ? `Version ${found.version}, the oldest that the store has.` : `Version ${found.version}, compared with version ${found.before}.`), box];
  const behind = found.applied.filter(a => a.version !== found.history[0].version || a.refused);
  if (found.applied.length) parts.push(el('p', 'muted', `${many(found.applied.length, 'subscriber')}; ${behind.length ? `not on version ${found.history[0].version}: ${behind.slice(0, 5).map(a => `${a.name} (${a.refused ? `refused ${a.refused[0]}: ${a.refused[1]}` : a.version})`).join(', ')}` : `all on version ${found.history[0].version}`}.`));
  open(which, parts, [ok]);
  document.getElementById('dialog').classList.add('wide');
}
$('dialog').addEventListener('close', () => $('dialog').classList.remove('wide'));

// ---- nodes of a quorum -------------------------------------------------------------------------
function drawNodes(q) {
  const table = $('nodes-table'), head = el('tr'), body = el('tbody'), thead = el('thead');
  for (const [text, cls] of [['Node', ''], ['Role', ''], ['Generation', 'num opt wide'], ['Commit', 'num opt'], ['Lag', 'num'], ['Clients', 'num opt wide'], ['Keyspace', 'opt wide'], ['Sync p99', 'num opt'], ['Disk', '']]) head.append(el('th', cls, text));
  thead.append(head);
  for (const n of q.nodes) {
    const tr = el('tr'), first = el('td', 'mono'), role = el('td'), mark = el('span', `role ${n.silent ? 'silent' : n.role}`);
    first.append(name(n.node));
    first.title = n.address;
    mark.append(el('i'), n.silent ? 'silent' : n.role);
    role.append(mark);
    tr.append(first, role);
    if (n.silent) { const td = el('td', 'muted', n.silent); td.colSpan = 7; td.dir = 'auto'; tr.append(td); body.append(tr); continue; }
    const lag = el('td', n.lag > 100 ? 'num amber' : 'num', n.lag == null ? '–' : thousands(n.lag)), keys = el('td', 'opt wide'), disk = el('td');
    if (n.quota) {
      const used = el('span', 'disk'), track = el('span', n.bytes / n.quota > .7 ? 'track low' : 'track'), fill = el('b');
      fill.style.transform = `scaleX(${Math.min(1, n.bytes / n.quota).toFixed(3)})`;
      track.append(fill);
      used.append(track, el('span', 'muted', size(n.bytes)));
      used.title = `${thousands(n.keys)} keys, ${size(n.bytes)} of ${size(n.quota)}`;
      keys.append(used);
    } else keys.textContent = `${thousands(n.keys)} keys`;
    if (n.full) disk.append(el('span', 'red', 'full'));
    else if (n.disk_total) {
      const used = el('span', 'disk'), share = 1 - n.disk_free / n.disk_total, track = el('span', share > .85 ? 'track low' : 'track'), fill = el('b');
      fill.style.transform = `scaleX(${share.toFixed(3)})`;
      track.append(fill);
      used.append(track, el('span', 'muted', `${Math.round(share * 100)}%`));
      used.title = `${size(n.disk_free)} free of ${size(n.disk_total)}`;
      disk.append(used);
    } else disk.append(el('span', 'muted', 'ok'));
    tr.append(el('td', 'num opt wide', n.generation), el('td', 'num opt', thousands(n.commit)), lag, el('td', 'num opt wide', n.clients), keys, el('td', n.sync_ms > 100 ? 'num opt amber' : 'num opt', n.sync_ms ? `≤ ${n.sync_ms} ms` : '–'), disk);
    body.append(tr);
  }
  table.replaceChildren(thead, body);
  $('nodes-sub').textContent = `${many(q.voters.length || q.nodes.length, 'voter')}; generation ${q.generation}`;
  const up = q.nodes.filter(n => !n.silent && q.voters.includes(n.node)).length, spare = up - (Math.floor(q.voters.length / 2) + 1);
  $('nodes-note').textContent = q.remarks[0] ?? (!q.leader ? 'No node leads: nothing can be written.' : spare > 1 ? `Any ${spare} voters may fail.` : spare === 1 ? 'Any one voter may fail.' : q.voters.length === 1 ? 'There is only one voter.' : 'At risk: if one more voter fails, nothing can be written.');
  $('nodes-note').classList.toggle('red', !q.leader || (spare < 1 && q.voters.length > 1));
}

// ---- the processes of `doyen up` ---------------------------------------------------------------
// A row is made anew only if it has changed, so that a click is not lost.
const processRows = new Map();
function drawProcesses(all) {
  const off = whyNot() && !/unreachable/.test(whyNot()) ? whyNot() : '', root = $('processes-body');
  all.forEach((p, k) => {
    const mark = JSON.stringify([p, off]), known = processRows.get(p.name);
    if (known?.mark === mark) return;
    const row = el('div', 'proc'), acts = el('span', 'acts2'), focused = document.activeElement?.dataset?.process;
    row.append(el('span', `dot ${{ dead: 'bad', frozen: 'warn', starting: 'unknown' }[p.state] ?? ''}`), el('b', '', p.name), el('span', 'muted clip', p.detail ? `${p.label}, ${p.detail}` : p.label));
    for (const [action, label] of p.actions) {
      const b = el('button', action === 'kill' ? 'small danger' : 'small', label);
      b.disabled = !!off;
      b.title = off;
      b.dataset.process = `${action} ${p.name}`;
      b.onclick = () => perform({ action, process: p.name }, `${label} ${p.name}`);
      acts.append(b);
    }
    row.append(acts);
    if (known) known.row.replaceWith(row); else root.append(row);
    processRows.set(p.name, { mark, row });
    if (focused) row.querySelector(`[data-process="${CSS.escape(focused)}"]`)?.focus();
  });
}
