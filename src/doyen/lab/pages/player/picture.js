/* What is shown, and the picture: lanes over virtual time on a canvas, and the cursor above it. */

let film = JSON.parse($('film').textContent),
  scene,
  fold,
  folding = true;
let at = 0,
  from = 0,
  wide = 1e6,
  playing = false,
  speed = 0.05,
  hot = null,
  pinned = null,
  sparse = 0;
let hidden = new Set();
const view = $('view'),
  over = $('over'),
  ctx = view.getContext('2d'),
  octx = over.getContext('2d'),
  tctx = $('top').getContext('2d');
const phone = () => innerWidth <= 720;
let W = 0,
  H = 0,
  LH = 104,
  C = {};
const TOP = 56,
  BH = 18,
  OVER = 66,
  CAP = 900,
  DOTS = 14;
const X = t => ((fold.on(t) - from) / wide) * W,
  T = x => fold.off(from + (x / W) * wide),
  UEND = () => fold.on(scene.end) + fold.pad;
const laneY = lane => TOP + lane * LH,
  bandY = lane => laneY(lane) + 13,
  rows = () => Math.max(1, Math.floor((LH - 13 - BH - 13) / 9));
const shownKind = kind => !hidden.has(kind.category);

function colours() {
  const probe = el('span');
  document.body.append(probe);
  C = {};
  for (const k of [
    'panel',
    'sunken',
    'line',
    'line-soft',
    'text',
    'muted',
    'faint',
    'blue',
    'red',
    'red-soft',
    'amber-fill',
    'amber',
    'follow',
    'look',
    'lead',
    'down',
    'on-follow',
    'on-look',
    'on-lead',
    'beat',
    'entry',
    'ask',
    'yes',
    'no',
    'g0',
    'g1',
    'g2',
    'g3',
    'veil',
    'cut',
    'cutline',
  ]) {
    probe.style.color = `var(--${k})`;
    C[k] = getComputedStyle(probe).color;
  }
  const style = getComputedStyle(document.documentElement);
  C.sans = style.getPropertyValue('--sans');
  C.mono = style.getPropertyValue('--mono');
  probe.remove();
}
const roleFill = role => [C.down, C.look, C.follow, C.lead][role],
  roleText = role => [C.muted, C['on-look'], C['on-follow'], C['on-lead']][role];

function size() {
  const room = innerWidth <= 1100 ? 0 : $('stage').clientHeight - TOP;
  LH = phone() ? 82 : Math.floor(clamp(scene.n ? room / scene.n : 0, 76, 200));
  H = TOP + scene.n * LH;
  W = Math.max(50, $('canvases').clientWidth);
  const d = devicePixelRatio || 1;
  for (const [c, w, h] of [
    [view, W, H],
    [$('top'), DOTS, H],
    [over, over.clientWidth, OVER],
  ]) {
    c.width = Math.round(w * d);
    c.height = Math.round(h * d);
    c.getContext('2d').setTransform(d, 0, 0, d, 0, 0);
    if (c !== over) c.style.height = h + 'px';
  }
  $('canvases').style.height = H + 'px';
  for (const g of $('gut').children) g.style.height = LH + 'px';
}

function rr(c, x, y, w, h, r) {
  c.beginPath();
  c.roundRect(x, y, Math.max(0.5, w), h, r);
}
function hatch(c, x, y, w, h, gap, colour) {
  c.save();
  c.beginPath();
  c.rect(x, y, w, h);
  c.clip();
  c.strokeStyle = colour;
  c.lineWidth = 1;
  c.beginPath();
  for (let k = x - h - (x % gap); k < x + w; k += gap) {
    c.moveTo(k, y + h);
    c.lineTo(k + h, y);
  }
  c.stroke();
  c.restore();
}
function cross(c, x, y, r, colour, w) {
  c.strokeStyle = colour;
  c.lineWidth = w;
  c.beginPath();
  c.moveTo(x - r, y - r);
  c.lineTo(x + r, y + r);
  c.moveTo(x + r, y - r);
  c.lineTo(x - r, y + r);
  c.stroke();
  c.lineWidth = 1;
}
function label(c, text, x, y, room, colour, font) {
  if (room < 12) return false;
  c.font = font || `500 10.5px ${C.sans}`;
  if (c.measureText(text).width > room) return false;
  c.fillStyle = colour;
  c.fillText(text, x, y);
  return true;
}
function badge(c, x, y, ok, alpha) {
  c.globalAlpha = alpha;
  c.fillStyle = ok ? C.yes : C.no;
  c.strokeStyle = C.panel;
  c.lineWidth = 1.5;
  if (ok) {
    c.beginPath();
    c.arc(x, y, 6.5, 0, 7);
  } else rr(c, x - 6, y - 6, 12, 12, 2);
  c.fill();
  c.stroke();
  c.lineWidth = 1.7;
  c.beginPath();
  if (ok) {
    c.moveTo(x - 3, y);
    c.lineTo(x - 0.8, y + 2.4);
    c.lineTo(x + 3.2, y - 2.4);
  } else {
    c.moveTo(x - 2.6, y - 2.6);
    c.lineTo(x + 2.6, y + 2.6);
    c.moveTo(x + 2.6, y - 2.6);
    c.lineTo(x - 2.6, y + 2.6);
  }
  c.stroke();
  c.lineWidth = 1;
  c.globalAlpha = 1;
}
/* Where a message is drawn: from band to band, or as far as it got. */
function segment(i) {
  const f = scene.from[i],
    t = scene.to[i],
    down = t > f,
    y0 = bandY(f) + (down ? BH : 0),
    y1 = bandY(t) + (down ? 0 : BH),
    x0 = X(scene.sent[i]),
    x1 = X(scene.arrives[i]),
    part = scene.fate[i] === 1 ? 0.45 : 1;
  return { x0, y0, x1: x0 + (x1 - x0) * part, y1: y0 + (y1 - y0) * part };
}
function draw() {
  const c = ctx;
  c.clearRect(0, 0, W, H);
  c.textBaseline = 'middle';
  c.textAlign = 'left';
  const t0 = T(-20),
    t1 = T(W + 20);
  axis(c);
  weather(c, t0, t1);
  const later = []; // text, which stands above all lines
  for (let lane = 0; lane < scene.n; lane++) {
    cuts(c, lane, t0, t1, later);
    log(c, lane, t0, t1);
    bands(c, lane, t0, t1, later);
  }
  const ends = messages(c, t0, t1);
  folds(c);
  for (const write of later) write();
  marks(c, t0, t1);
  votes(c, ends);
  violations(c);
  overview();
  top();
  const note = $('sparse');
  if (note) {
    note.hidden = sparse < 2;
    note.textContent = sparse < 2 ? '' : `zoomed out: 1 of ${sparse} messages drawn`;
  }
}
const STEPS = [1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 2e7, 6e7, 6e8];
function axis(c) {
  const step = STEPS.find(s => (s / wide) * W > 64) || 6e8,
    digits = step < 1e4 ? 3 : step < 1e5 ? 2 : step < 1e6 ? 1 : 0,
    stop = Math.min(scene.end, T(W));
  let last = -99;
  c.font = `11px ${C.sans}`;
  for (let k = Math.max(0, Math.ceil(T(0) / step)); k * step <= stop; k++) {
    const t = k * step;
    if (fold.inside(t, t)) {
      const gap = fold.gaps[above(fold.gaps, t, g => g[0]) - 1];
      k = Math.max(k, Math.floor(gap[1] / step));
      continue;
    }
    const x = Math.round(X(t)) + 0.5;
    c.strokeStyle = C['line-soft'];
    c.beginPath();
    c.moveTo(x, TOP);
    c.lineTo(x, H);
    c.stroke();
    if (x > 20 && x < W - 20 && x - last > 50) {
      last = x;
      c.fillStyle = C.faint;
      c.textAlign = 'center';
      c.fillText(secs(t, digits) + ' s', x, 11);
      c.textAlign = 'left';
    }
  }
}
function weather(c, t0, t1) {
  let row = 0;
  const free = [-1, -1];
  for (const [kind, , a, b, what] of scene.raw.spans) {
    if (kind !== 'weather' || b < t0 || a > t1) continue;
    const x0 = Math.max(0, X(a)),
      x1 = Math.min(W, X(b));
    row = free.findIndex(x => x < x0);
    if (row < 0) continue;
    const y = 27 + row * 13;
    c.fillStyle = C['amber-fill'];
    rr(c, x0, y - 1, x1 - x0, 3, 1.5);
    c.fill();
    c.font = `10.5px ${C.sans}`;
    const w = c.measureText(what).width,
      right = x1 + 7 + w < W,
      x = right ? x1 + 7 : x0 + 12;
    free[row] = Math.max(x1, x + w) + 8;
    if (!right) {
      c.fillStyle = C.panel;
      c.fillRect(x - 4, y - 6, w + 8, 12);
    }
    c.fillStyle = C.muted;
    c.fillText(what, x, y + 0.5);
  }
}
function cuts(c, lane, t0, t1, later) {
  const y = laneY(lane);
  c.strokeStyle = C['line-soft'];
  c.beginPath();
  c.moveTo(0, Math.round(y) + 0.5);
  c.lineTo(W, Math.round(y) + 0.5);
  c.stroke();
  for (const [kind, on, a, b, what, share] of scene.raw.spans) {
    if (on !== lane || kind !== 'cut' || b < t0 || a > t1) continue;
    const x0 = Math.max(0, X(a)),
      x1 = Math.min(W, Math.max(X(b), X(a) + 3)),
      strong = share > 0.5;
    if (strong) {
      c.fillStyle = C.cut;
      c.fillRect(x0, y + 1, x1 - x0, LH - 1);
      hatch(c, x0, y + 1, x1 - x0, LH - 1, 9, C.cutline);
    }
    c.setLineDash([4, 3]);
    c.strokeStyle = C.red;
    c.beginPath();
    if (strong)
      for (const e of [a, b]) {
        c.moveTo(X(e), y + 1);
        c.lineTo(X(e), y + LH);
      }
    else {
      c.moveTo(x0, y + LH - 3);
      c.lineTo(x1, y + LH - 3);
    }
    c.stroke();
    c.setLineDash([]);
    later.push(() => label(c, what, x0 + 7, y + LH - 10, x1 - x0 - 10, C.red));
  }
}
function log(c, lane, t0, t1) {
  const y = bandY(lane) + BH + 9,
    room = rows(),
    most = scene.at(scene.tallest, Math.min(t1, scene.end)),
    base = Math.max(0, most - room),
    eh = 6;
  for (let index = base + 1; index <= most; index++)
    for (const e of scene.logs[lane].get(index) || []) {
      if (e.until < t0 || e.from > t1) continue;
      const yy = y + (index - base - 1) * 9,
        x0 = X(e.from),
        x1 = X(Math.min(e.until, scene.end)),
        colour = C['g' + e.tag];
      c.fillStyle = colour;
      c.globalAlpha = 0.28;
      rr(c, Math.max(-4, x0), yy, Math.min(W + 4, x1) - Math.max(-4, x0), eh, 2);
      c.fill();
      c.globalAlpha = 1;
      if (e.committed < e.until && e.committed < t1) {
        const xc = Math.max(-4, X(e.committed));
        rr(c, xc, yy, Math.min(W + 4, x1) - xc, eh, 2);
        c.fill();
      }
      if (x0 > 14) {
        c.textAlign = 'right';
        label(c, String(index), x0 - 3, yy + eh / 2 + 0.5, 40, C.muted, `500 9.5px ${C.mono}`);
        c.textAlign = 'left';
      }
    }
  if (base && scene.logs[lane].size)
    label(c, `${base} earlier`, 5, y - 4, 80, C.faint, `9.5px ${C.sans}`);
  for (const bad of scene.raw.violations) {
    const named = /\bentry (\d+)/.exec(bad.text);
    if (!named || bad.lanes[0] !== lane) continue;
    const index = +named[1],
      place = index - base;
    if (place < 1 || place > room) continue;
    let since = Infinity;
    for (const rows of scene.logs)
      for (const e of rows.get(index) || []) since = Math.min(since, e.committed);
    if (since < bad.at) {
      c.strokeStyle = C.red;
      c.setLineDash([3, 2.5]);
      rr(c, X(since), y + (place - 1) * 9 + 0.5, X(bad.at) - X(since), eh - 1, 2);
      c.stroke();
      c.setLineDash([]);
    }
  }
}
function bands(c, lane, t0, t1, later) {
  const spans = scene.roles[lane],
    y = bandY(lane);
  for (
    let k = Math.max(0, above(spans, t0, s => s.from) - 1);
    k < spans.length && spans[k].from < t1;
    k++
  ) {
    const s = spans[k],
      x0 = Math.max(-4, X(s.from)),
      x1 = Math.min(W + 4, X(Math.min(s.to, scene.end)));
    if (x1 < x0) continue;
    if (s.role === DOWN && !s.label) continue;
    c.fillStyle = roleFill(s.role);
    rr(c, x0, y, x1 - x0 - (x1 - x0 > 4 ? 1 : 0), BH, 3);
    c.fill();
    if (s.role === DOWN) {
      hatch(c, x0, y, x1 - x0, BH, 6, C.faint);
      if (X(s.from) > -10 && k > 0) {
        const x = X(s.from);
        c.fillStyle = C.panel;
        c.strokeStyle = C.red;
        c.lineWidth = 1.6;
        c.beginPath();
        c.arc(x, y + BH / 2, 8.5, 0, 7);
        c.fill();
        c.stroke();
        cross(c, x, y + BH / 2, 3.4, C.red, 2);
      }
      continue;
    }
    later.push(() => {
      c.font = `500 10.5px ${C.sans}`;
      const x = beside(Math.max(x0, 0) + 7, c.measureText(s.label).width);
      label(c, s.label, x, y + BH / 2 + 0.5, Math.min(x1, W) - x - 5, roleText(s.role));
    });
  }
  for (const [kind, on, a, b, what] of scene.raw.spans) {
    if (on !== lane || b < t0 || a > t1 || kind === 'cut') continue;
    const x0 = Math.max(0, X(a)),
      x1 = Math.min(W, Math.max(X(b), X(a) + 3));
    if (kind === 'paused') later.push(() => paused(c, x0, x1, y, what));
    if (kind === 'clock') {
      c.fillStyle = C['amber-fill'];
      c.fillRect(x0, y + BH + 2, x1 - x0, 2.5);
      label(c, what, x0 + 4, y - 6, x1 - x0 - 6, C.amber, `10px ${C.sans}`);
    }
  }
}
const mateOf = i => {
  if (i == null) return null;
  const k = scene.raw.messages[i][6];
  return k >= 0 ? k : null;
};
function messages(c, t0, t1) {
  const [i0, i1] = scene.range(t0, t1),
    all = i1 - i0,
    busy = scene.busy[i1] - scene.busy[i0],
    faint = all <= CAP,
    stride = Math.max(1, Math.ceil((faint ? all : busy) / CAP));
  sparse = all > CAP ? Math.ceil(all / Math.max(1, busy / stride)) : 1;
  const picked = pinned ?? hot,
    pick = picked && picked.mark == null ? picked.i : null,
    mate = mateOf(pick),
    buckets = new Map(),
    given = [];
  let seen = 0;
  for (let i = i0; i < i1; i++) {
    const kind = scene.kinds[scene.kind[i]];
    if (!shownKind(kind) || (kind.faint && !faint)) continue;
    if (kind.tag && !kind.dashed) given.push(i);
    if (stride > 1 && seen++ % stride) continue;
    if (
      scene.arrives[i] < t0 ||
      fold.inside(scene.sent[i], scene.arrives[i]) ||
      i === pick ||
      i === mate
    )
      continue;
    const lost = scene.fate[i] !== 0,
      key = kind.colour + (lost ? 'x' : kind.dashed ? '-' : '') + (kind.faint ? '.' : '');
    let b = buckets.get(key);
    if (!b)
      buckets.set(
        key,
        (b = { colour: C[kind.colour], faint: kind.faint, lost, dashed: kind.dashed, at: [] }),
      );
    const g = segment(i);
    b.at.push(g.x0, g.y0, g.x1, g.y1);
  }
  c.globalAlpha = pick != null ? 0.32 : 1;
  for (const b of buckets.values()) lines(c, b, false);
  c.globalAlpha = 1;
  for (const i of [mate, pick])
    if (i != null && i < scene.m) {
      const kind = scene.kinds[scene.kind[i]],
        g = segment(i);
      lines(
        c,
        {
          colour: C[kind.colour],
          faint: false,
          lost: scene.fate[i] !== 0,
          dashed: kind.dashed,
          at: [g.x0, g.y0, g.x1, g.y1],
        },
        true,
      );
    }
  return [given, pick, mate];
}
function lines(c, b, strong) {
  c.strokeStyle = c.fillStyle = b.colour;
  c.lineWidth = strong ? 2.6 : b.faint ? 1 : b.dashed ? 1.1 : 1.6;
  if (b.lost) c.setLineDash([3, 3]);
  else if (b.dashed) c.setLineDash([6, 2]);
  const p = b.at;
  c.beginPath();
  for (let k = 0; k < p.length; k += 4) {
    c.moveTo(p[k], p[k + 1]);
    c.lineTo(p[k + 2], p[k + 3]);
  }
  c.stroke();
  c.setLineDash([]);
  c.beginPath();
  if (b.lost) {
    const r = b.faint ? 2.8 : 3.6;
    for (let k = 0; k < p.length; k += 4) {
      const x = p[k + 2],
        y = p[k + 3];
      c.moveTo(x - r, y - r);
      c.lineTo(x + r, y + r);
      c.moveTo(x + r, y - r);
      c.lineTo(x - r, y + r);
    }
    c.strokeStyle = C.red;
    c.lineWidth = 1.7;
    c.stroke();
    c.lineWidth = 1;
    return;
  }
  const r = b.faint ? 5 : 7;
  for (let k = 0; k < p.length; k += 4) {
    const dx = p[k + 2] - p[k],
      dy = p[k + 3] - p[k + 1],
      n = Math.hypot(dx, dy) || 1,
      ux = (dx / n) * r,
      uy = (dy / n) * r,
      x = p[k + 2],
      y = p[k + 3];
    c.moveTo(x, y);
    c.lineTo(x - ux * 0.93 + uy * 0.37, y - uy * 0.93 - ux * 0.37);
    c.lineTo(x - ux * 0.93 - uy * 0.37, y - uy * 0.93 + ux * 0.37);
    c.closePath();
  }
  c.fill();
  c.lineWidth = 1;
}
function paused(c, x0, x1, y, what) {
  c.globalAlpha = 0.8;
  c.fillStyle = C.down;
  c.fillRect(x0, y, x1 - x0, BH);
  c.globalAlpha = 1;
  hatch(c, x0, y, x1 - x0, BH, 5, C.muted);
  c.font = `500 10.5px ${C.sans}`;
  const w = c.measureText(what).width,
    x = beside(x0 + 9, w);
  if (x1 - x < w + 7) return;
  c.fillStyle = C.panel;
  rr(c, x - 4, y + 2, w + 8, BH - 4, 2);
  c.fill();
  c.fillStyle = C.muted;
  c.fillText(what, x, y + BH / 2 + 0.5);
}
/* Where text of this width can begin, at x or after the folds that it would cover. */
function beside(x, w) {
  for (let k = Math.max(0, above(fold.gaps, T(x - 20), g => g[0]) - 1); k < fold.gaps.length; k++) {
    const f = (X(fold.gaps[k][0]) + X(fold.gaps[k][1])) / 2;
    if (f > x + w + 8) break;
    if (f > x - 8) x = f + 9;
  }
  return x;
}
function folds(c) {
  let free = 0;
  for (let k = Math.max(0, above(fold.gaps, T(0), g => g[0]) - 1); k < fold.gaps.length; k++) {
    const [a, b] = fold.gaps[k],
      x0 = X(a),
      x1 = X(b),
      x = (x0 + x1) / 2;
    if (x1 < 0) continue;
    if (x0 > W) break;
    const zig = (x, way) => {
      for (let y = way > 0 ? TOP : H, k = 0; way > 0 ? y <= H : y >= TOP; y += 7 * way, k++)
        c.lineTo(x + (k % 2 ? 2 : -2), y);
    };
    c.fillStyle = C.sunken;
    c.beginPath();
    zig(x - 4.5, 1);
    zig(x + 4.5, -1);
    c.fill();
    c.strokeStyle = C.line;
    for (const d of [-4.5, 4.5]) {
      c.beginPath();
      zig(x + d, 1);
      c.stroke();
    }
    const text = b - a < 1e5 ? '' : `${secs(b - a, 2)} s quiet`;
    if (!text) continue;
    c.font = `10.5px ${C.sans}`;
    const w = c.measureText(text).width + 12;
    if (x - w / 2 > free && x < W - w / 2) {
      free = x + w / 2 + 4;
      c.fillStyle = C.panel;
      c.strokeStyle = C.line;
      rr(c, x - w / 2, TOP - 18, w, 16, 8);
      c.fill();
      c.stroke();
      c.fillStyle = C.muted;
      c.textAlign = 'center';
      c.fillText(text, x, TOP - 9.5);
      c.textAlign = 'left';
    }
  }
}
function marks(c, t0, t1) {
  const bare = !scene.m,
    k0 = above(scene.marks, t0, m => m.at);
  let used = scene.raw.lanes.map(() => -99);
  for (let k = k0; k < scene.marks.length && scene.marks[k].at < t1; k++) {
    const m = scene.marks[k],
      x = X(m.at),
      y = bandY(m.lane) + (bare ? BH / 2 : -5);
    if (x - used[m.lane] < 7) continue;
    used[m.lane] = x;
    c.fillStyle = bare ? C.blue : C['amber-fill'];
    c.strokeStyle = C.panel;
    c.beginPath();
    if (bare) c.arc(x, y, 5, 0, 7);
    else {
      c.moveTo(x - 5, y - 4);
      c.lineTo(x + 5, y - 4);
      c.lineTo(x, y + 4);
      c.closePath();
    }
    c.fill();
    c.stroke();
    if (bare) {
      const next = scene.marks.slice(k + 1).find(o => o.lane === m.lane),
        room = (next ? X(next.at) : W) - x - 20,
        left = !next && room < 120,
        lines = wrap(c, m.label, left ? 220 : room);
      c.textAlign = left ? 'right' : 'left';
      lines.forEach((line, j) =>
        label(c, line, x + (left ? -10 : 10), y + j * 13, W, C.text, `11px ${C.sans}`),
      );
      c.textAlign = 'left';
    }
  }
}
function wrap(c, text, room) {
  c.font = `11px ${C.sans}`;
  const out = [];
  let line = '';
  for (const word of clip(text, 120).split(' ')) {
    const more = line ? line + ' ' + word : word;
    if (line && c.measureText(more).width > Math.max(90, room)) {
      out.push(line);
      line = word;
    } else line = more;
  }
  if (line) out.push(line);
  return out.slice(0, 5);
}
function votes(c, [given, pick, mate]) {
  for (const i of given.length > 400 ? [] : given) {
    const x = X(scene.sent[i]);
    if (x > -10 && x < W + 10)
      badge(
        c,
        x,
        bandY(scene.from[i]) + BH / 2,
        scene.kinds[scene.kind[i]].tag === 'granted',
        pick != null && i !== pick && i !== mate ? 0.3 : 1,
      );
  }
}

function violations(c) {
  for (const bad of scene.raw.violations) {
    const x = Math.round(X(bad.at)) + 0.5;
    if (x < -20 || x > W + 20) continue;
    c.strokeStyle = C.red;
    c.lineWidth = 1.5;
    c.setLineDash([2, 3]);
    c.beginPath();
    c.moveTo(x, 20);
    c.lineTo(x, H);
    c.stroke();
    c.setLineDash([]);
    for (const lane of bad.lanes.slice(0, 1)) {
      c.beginPath();
      c.arc(x, bandY(lane) + BH / 2, 13, 0, 7);
      c.lineWidth = 2;
      c.stroke();
      c.globalAlpha = 0.18;
      c.fillStyle = C.red;
      c.fill();
      c.globalAlpha = 1;
      c.lineWidth = 1;
    }
    c.font = `600 11px ${C.sans}`;
    const w = c.measureText('violation').width + 14,
      lx = clamp(x - w / 2, 0, W - w);
    c.fillStyle = C.red;
    rr(c, lx, 25, w, 17, 4);
    c.fill();
    c.fillStyle = C.panel;
    c.fillText('violation', lx + 7, 34);
  }
}
/* Everything that depends on the cursor. It is drawn at every frame, so it is small: a line with the
   messages that are under way, moved to its place, and a pale cover over what has not happened yet. */
function top() {
  const c = tctx,
    x = X(at),
    away = x < -2 || x > W + 2,
    veil = clamp(x, 0, W);
  $('veil').style.transform = `translateX(${veil}px)`;
  $('cursor').hidden = away;
  if (away) return;
  $('cursor').style.transform = `translateX(${Math.round(x)}px)`;
  $('cursor').classList.toggle('bad', scene.bad != null && Math.abs(at - scene.bad) < 1);
  c.clearRect(0, 0, DOTS, H);
  const [i0, i1] = scene.range(at, at),
    u = fold.on(at);
  for (let i = Math.max(i0, i1 - 400); i < i1; i++) {
    const kind = scene.kinds[scene.kind[i]];
    if (scene.arrives[i] < at || !shownKind(kind)) continue;
    const u0 = fold.on(scene.sent[i]),
      part = (u - u0) / Math.max(1, fold.on(scene.arrives[i]) - u0);
    if (scene.fate[i] === 1 && part > 0.45) continue;
    const f = scene.from[i],
      t = scene.to[i],
      down = t > f,
      y0 = bandY(f) + (down ? BH : 0),
      y1 = bandY(t) + (down ? 0 : BH);
    c.fillStyle = kind.faint ? C.muted : C[kind.colour];
    c.strokeStyle = C.panel;
    c.lineWidth = 1.5;
    c.beginPath();
    c.arc(DOTS / 2, y0 + (y1 - y0) * part, kind.faint ? 3.2 : 4.6, 0, 7);
    c.fill();
    c.stroke();
  }
  const now = $('now');
  now.textContent = secs(at) + ' s';
  now.style.transform = `translateX(${clamp(-36, -x, W - x - 72)}px)`;
}
/* The overview is drawn once; what moves on it are elements. */
function overview() {
  if (!drawn) {
    drawn = true;
    drawOverview(octx, over.clientWidth, OVER);
  }
  const a = overX(Math.max(0, T(0))),
    b = overX(Math.min(scene.end, T(W)));
  $('window').style.transform = `translateX(${a}px)`;
  $('window').style.width = Math.max(4, b - a) + 'px';
  overCursor();
}
function overCursor() {
  $('over-cursor').style.transform = `translateX(${overX(at)}px)`;
}
let drawn = false;
const overX = t => 14 + (t / scene.end) * (over.clientWidth - 28);
function drawOverview(c, w, h) {
  const x = overX;
  c.fillStyle = C.sunken;
  c.fillRect(0, 0, w, h);
  const step = Math.min(9, 40 / Math.max(1, scene.n)),
    bar = Math.max(2, step - 3);
  for (let lane = 0; lane < scene.n; lane++) {
    const y = 9 + lane * step;
    for (const s of scene.roles[lane]) {
      if (s.role === DOWN) {
        if (s.label) cross(c, x(s.from), y + bar / 2, Math.min(3.5, bar), C.red, 1.5);
        continue;
      }
      c.fillStyle = roleFill(s.role);
      const x0 = x(s.from),
        x1 = x(Math.min(s.to, scene.end));
      c.fillRect(x0, y, Math.max(0.6, x1 - x0 - (x1 - x0 > 2 ? 0.5 : 0)), bar);
    }
    for (const [kind, on, a, b, , share] of scene.raw.spans)
      if (on === lane && kind === 'cut' && share > 0.5) {
        c.fillStyle = C.cutline;
        c.fillRect(x(a), y - 1, Math.max(3, x(b) - x(a)), bar + 2);
      }
  }
  c.fillStyle = C.faint;
  c.font = `10px ${C.sans}`;
  c.textBaseline = 'middle';
  c.textAlign = 'center';
  const tick = STEPS.find(s => (s / scene.end) * w > 70) || 6e8;
  for (let t = 0; t < scene.end; t += tick)
    c.fillText(secs(t, tick < 1e6 ? (tick < 1e5 ? 2 : 1) : 0), Math.max(x(t), 24), 56);
  for (const bad of scene.raw.violations) {
    const bx = x(bad.at);
    c.fillStyle = C.red;
    c.fillRect(bx - 1, 7, 2, 49);
    c.beginPath();
    c.moveTo(bx - 5, 3);
    c.lineTo(bx + 5, 3);
    c.lineTo(bx, 10);
    c.fill();
  }
}
