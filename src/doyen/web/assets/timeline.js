// Terms as bars on a time axis: the lanes of the live page and of a report.
//
// A term is [name, token, since, until | null, cause, why, exact]. A view is
// {from, to, known, tolerance}: the times at both ends of the lane, until when anything is known, and
// by how much two terms may seem to overlap because their times come from different clocks.

import { clock, date, day, el, hue, plain, said, span } from './text.js';

export const FAILED = new Set(['expired', 'died', 'lost', 'violation']);
export const TAGS = {   // the same, shorter
  expired: 'lease', died: 'died', lost: 'lost', resigned: 'resigned', transferred: 'handover',
  released: 'released', ended: 'ended', violation: 'violation',
};
export const CAUSES = {
  expired: 'lease ran out', died: 'process died', lost: 'lost', resigned: 'resigned',
  transferred: 'handed over', released: 'released', ended: 'ended', violation: 'violation',
};
const LEAST = 3;       // pixels of a gap, however short
const DENSE = 200;     // terms of a lane
const LABEL = 58;      // pixels from which on a bar has a name

// Draw the terms of one lane. `marks` are violations of a report: [{from, to, text}].
export function drawLane(lane, terms, view, width, marks = []) {
  const x = t => (t - view.from) / (view.to - view.from) * width;
  const parts = [];
  // Of many terms that would be drawn at the same place one is drawn, so that a lane has no more
  // nodes than pixels. Two at a time are always drawn.
  const dense = terms.length > DENSE, overlap = (a, b) => a != null && b != null && a[3] != null && b[2] < a[3] - view.tolerance - 1e-4;
  let lastBar = -Infinity, lastGap = -Infinity;
  terms.forEach((term, k) => {
    const [who, , since, until, cause, , exact] = term;
    const end = Math.min(until ?? view.known, view.known);
    const hidden = dense && until != null && x(end) - lastBar < 1 && !overlap(terms[k - 1], term) && !overlap(term, terms[k + 1]);
    if (end > view.from && since < view.to && !hidden) {
      lastBar = x(end);
      const left = Math.max(0, x(since)), right = Math.min(width, x(end));
      const bar = el('div', until == null ? 't cur' : 't');
      if (!exact && since > view.from) bar.classList.add('before');
      // Two at a time are a violation: both are seen.
      if (overlap(terms[k - 1], term)) bar.classList.add('lower');
      else if (overlap(term, terms[k + 1])) bar.classList.add('upper');
      place(bar, left, Math.max(1.5, right - left));
      bar.style.background = hue(who);
      if (right - left > LABEL) { bar.textContent = plain(who); bar.dir = 'auto'; }
      bar.dataset.k = k;
      parts.push(bar);
    }
    const next = terms[k + 1];
    const gapEnd = next ? next[2] : view.known;
    if (until != null && gapEnd > view.from && until < view.to && FAILED.has(cause) && !overlap(term, next) && !(dense && x(gapEnd) - lastGap < 1)) {
      lastGap = x(gapEnd);
      const wide = x(gapEnd) - x(until);
      const gap = el('div', wide > 7 ? 'g long' : 'g');
      const shown = Math.max(LEAST, wide);
      place(gap, Math.max(0, wide >= LEAST ? x(until) : x(until) - LEAST / 2), shown);
      gap.dataset.k = k;
      gap.dataset.gap = 1;
      parts.push(gap);
    }
  });
  marks.forEach((mark, k) => {
    if (mark.to < view.from || mark.from > view.to) return;
    const node = el('div', 'v');
    const left = Math.max(0, x(mark.from) - 1);
    place(node, left, Math.max(4, Math.min(width, x(mark.to)) - left));
    node.dataset.v = k;
    parts.push(node);
  });
  if (view.known < view.to) {
    const unknown = el('div', 'u');
    unknown.style.left = `${Math.max(0, x(view.known)).toFixed(1)}px`;
    parts.push(unknown);
  }
  lane.replaceChildren(...parts);
}

function place(node, left, width) {
  node.style.left = `${left.toFixed(1)}px`;
  node.style.width = `${width.toFixed(1)}px`;
}

const STEPS = [0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 900, 1800, 3600, 5400, 10800, 21600, 43200, 86400, 604800];
export function drawAxis(axis, view, width, end = 'now') {
  const length = view.to - view.from, room = Math.max(2, Math.floor(width / 90));
  // Beyond weeks, whole days: damaged logs, and machines without a clock, make an axis of centuries.
  const step = STEPS.find(s => length / s <= room) ?? Math.ceil(length / room / 86400) * 86400;
  const parts = [];
  for (let t = Math.ceil(view.from / step) * step; t < view.to; t += step) {
    const f = (t - view.from) / length;
    if (f < .05 || (1 - f) * width < (end === 'now' ? 58 : 140)) continue;
    const digits = step < .009 ? 3 : step < .09 ? 2 : step < 1 ? 1 : 0;
    const text = step > 604800 ? date(t) : step >= 86400 ? day(t) : step >= 60 ? clock(t).slice(0, 5) : clock(t + 5e-4, digits);
    const tick = el('i', '', text);
    tick.style.left = `${(f * 100).toFixed(2)}%`;
    parts.push(tick);
  }
  const last = el('i', 'now', end);
  last.style.left = '100%';
  parts.push(last);
  axis.replaceChildren(...parts);
}

// What a bar or a gap says: lines for a tip, and for the keyboard.
export function describe(terms, k, gap, known) {
  const [who, token, since, until, cause, why, exact] = terms[k], next = terms[k + 1];
  if (gap) {
    const to = next ? next[2] : known;
    const lines = [
      { cls: 'head', text: `Nobody led for ${span(Math.max(0, to - until))}` },
      { cls: 'muted', text: `${clock(until, 1)} to ${next ? clock(next[2], 1) : 'now'}` },
      { cls: 'cause red', text: plain(why) },
    ];
    if (next) lines.push({ cls: '', text: `Then ${said(next[0])}, token ${next[1]}.` });
    return lines;
  }
  const before = terms[k - 1], end = until ?? known;
  const from = exact ? clock(since) : `before ${clock(since)}`;
  const lines = [
    { cls: 'head', text: `${said(who)}, token ${token}` },
    { cls: 'muted', text: `${from} to ${until == null ? 'now' : clock(until)}, ${exact ? '' : 'at least '}${span(Math.max(0, end - since))}` },
  ];
  if (before && before[3] != null && since >= before[3]) {
    const gone = since - before[3];
    lines.push({ cls: 'cause muted', text: `Began after ${said(before[0])}: ${CAUSES[before[4]] || before[4]}, ${gone < .0015 ? 'at once' : `${span(gone)} without a leader`}.` });
  }
  lines.push({ cls: before ? '' : 'cause', text: until == null ? 'Leads now.' : plain(why) || CAUSES[cause] || cause });
  return lines;
}

// The tip beside the pointer or the keyboard's position.
export class Tip {
  constructor(node) { this.node = node; }
  show(lines, x, y) {
    this.node.replaceChildren(...lines.map(line => {
      const div = el('div', line.cls, line.text);
      div.dir = 'auto';
      return div;
    }));
    this.node.hidden = false;
    const w = this.node.offsetWidth, h = this.node.offsetHeight;
    this.node.style.left = `${Math.max(8, Math.min(innerWidth - w - 8, x - w / 2))}px`;
    this.node.style.top = `${y + 18 + h > innerHeight ? y - h - 14 : y + 18}px`;
  }
  hide() { this.node.hidden = true; }
}
