/* Draws a comparison (see comparison.py). One figure at a time: medians with every run, the share of
   runs up to a value, or a table. Protocols can be left out. Text is only ever set as text. */
const $ = id => document.getElementById(id);
const el = (tag, name, text) => {
  const e = document.createElement(tag);
  if (name) e.className = name;
  if (text != null) e.textContent = text;
  return e;
};
const svg = (tag, attributes, text) => {
  const e = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const k in attributes) e.setAttribute(k, attributes[k]);
  if (text != null) e.textContent = text;
  return e;
};
const film = JSON.parse($('film').textContent),
  off = new Set();
const median = list => {
  const s = [...list].sort((a, b) => a - b),
    k = s.length >> 1;
  return s.length % 2 ? s[k] : (s[k - 1] + s[k]) / 2;
};
const short = v => (v >= 1000 ? Math.round(v).toLocaleString('en') : +v.toPrecision(3) + '');
let figure = 0,
  view = 'medians',
  scale = 'linear';
const VIEWS = [
  ['medians', 'medians and runs'],
  ['shares', 'share of runs'],
  ['table', 'table'],
];
const W = 1000,
  H = 420,
  L = 70,
  R = 24,
  TOP = 20,
  BOTTOM = 50;

function choose(box, items, get, set) {
  $(box).replaceChildren(
    ...items.map(([key, text]) => {
      const b = el('button', '', text);
      b.setAttribute('aria-pressed', get() === key);
      b.onclick = () => {
        set(key);
        draw();
      };
      return b;
    }),
  );
}
function axis(values) {
  const positive = values.filter(v => v > 0),
    most = Math.max(...values, 1e-9),
    log = scale === 'log' && positive.length;
  if (log) {
    const lo = Math.floor(Math.log10(Math.min(...positive))),
      hi = Math.max(lo + 1, Math.ceil(Math.log10(most)));
    return {
      at: v => (v > 0 ? (Math.log10(v) - lo) / (hi - lo) : 0),
      ticks: Array.from({ length: hi - lo + 1 }, (_, k) => 10 ** (lo + k)),
    };
  }
  const raw = most / 5,
    power = 10 ** Math.floor(Math.log10(raw)),
    step = [1, 2, 5, 10].map(k => k * power).find(s => s >= raw),
    top = Math.ceil(most / step) * step;
  return {
    at: v => v / top,
    ticks: Array.from({ length: Math.round(top / step) + 1 }, (_, k) => k * step),
  };
}
function say(text) {
  $('hint').textContent = text;
}
function medians(f) {
  const s = svg('svg', {
      viewBox: `0 0 ${W} ${H}`,
      role: 'img',
      'aria-label': `${f.name}: medians by protocol`,
    }),
    shown = film.protocols.map((_, k) => k).filter(k => !off.has(k)),
    scaleY = axis(shown.flatMap(k => f.values[k])),
    y = v => H - BOTTOM - scaleY.at(v) * (H - TOP - BOTTOM),
    step = (W - L - R) / Math.max(1, shown.length);
  for (const t of scaleY.ticks) {
    s.append(
      svg('line', { x1: L, x2: W - R, y1: y(t), y2: y(t), class: 'grid' }),
      svg('text', { x: L - 8, y: y(t) + 4, 'text-anchor': 'end' }, short(t)),
    );
  }
  shown.forEach((k, place) => {
    const x = L + place * step,
      mid = median(f.values[k]),
      middle = x + step / 2,
      wide = Math.min(120, step * 0.5);
    s.append(
      svg('rect', {
        x: middle - wide / 2,
        width: wide,
        y: y(mid),
        height: Math.max(1, H - BOTTOM - y(mid)),
        rx: 3,
        class: `o${k % 6}`,
        'fill-opacity': 0.32,
        'stroke-width': 0,
      }),
      svg('line', {
        x1: middle - wide / 2,
        x2: middle + wide / 2,
        y1: y(mid),
        y2: y(mid),
        class: `o${k % 6}`,
        'stroke-width': 2.5,
      }),
    );
    f.values[k].forEach((v, run) => {
      const c = svg('circle', {
        cx: middle + ((((run * 37) % 11) - 5) / 11) * wide * 0.8,
        cy: y(v),
        r: 4,
        class: `o${k % 6}`,
        'fill-opacity': 0.75,
        'stroke-width': 0,
      });
      c.append(
        svg('title', {}, `${film.protocols[k]}, seed ${film.seeds[run]}: ${short(v)} ${f.unit}`),
      );
      c.onpointerenter = () =>
        say(`${film.protocols[k]}, seed ${film.seeds[run]}: ${short(v)} ${f.unit}`);
      s.append(c);
    });
    s.append(
      svg(
        'text',
        { x: middle, y: H - BOTTOM + 20, 'text-anchor': 'middle', class: 'strong' },
        film.protocols[k],
      ),
      svg(
        'text',
        { x: middle, y: H - BOTTOM + 37, 'text-anchor': 'middle' },
        `${short(mid)} ${f.unit}`,
      ),
    );
  });
  s.append(svg('line', { x1: L, x2: W - R, y1: H - BOTTOM, y2: H - BOTTOM, class: 'axis' }));
  return s;
}
function shares(f) {
  const s = svg('svg', {
      viewBox: `0 0 ${W} ${H}`,
      role: 'img',
      'aria-label': `${f.name}: share of runs up to a value`,
    }),
    shown = film.protocols.map((_, k) => k).filter(k => !off.has(k)),
    scaleX = axis(shown.flatMap(k => f.values[k])),
    x = v => L + scaleX.at(v) * (W - L - R),
    y = v => H - BOTTOM - v * (H - TOP - BOTTOM);
  for (const t of scaleX.ticks)
    s.append(
      svg('line', { x1: x(t), x2: x(t), y1: TOP, y2: H - BOTTOM, class: 'grid' }),
      svg('text', { x: x(t), y: H - BOTTOM + 18, 'text-anchor': 'middle' }, short(t)),
    );
  for (const t of [0, 0.25, 0.5, 0.75, 1])
    s.append(
      svg('line', { x1: L, x2: W - R, y1: y(t), y2: y(t), class: 'grid' }),
      svg('text', { x: L - 8, y: y(t) + 4, 'text-anchor': 'end' }, `${t * 100} %`),
    );
  for (const k of shown) {
    const list = [...f.values[k]].sort((a, b) => a - b);
    let d = `M${x(list[0])} ${y(0)}`;
    list.forEach((v, n) => {
      d += `L${x(v)} ${y(n / list.length)}L${x(v)} ${y((n + 1) / list.length)}`;
    });
    s.append(svg('path', { d: d + `L${W - R} ${y(1)}`, class: `step o${k % 6}` }));
  }
  s.append(
    svg(
      'text',
      { x: (L + W - R) / 2, y: H - 8, 'text-anchor': 'middle' },
      `${f.name}${f.unit ? ', ' + f.unit : ''}`,
    ),
  );
  return s;
}
function table() {
  const t = el('table'),
    head = el('tr');
  head.append(
    el('th', '', 'protocol'),
    ...film.figures.map(f => el('th', '', f.unit ? `${f.name}, ${f.unit}` : f.name)),
    el('th', '', 'lost or broken'),
  );
  t.append(head);
  const best = film.figures.map(f => {
    const m = f.values.map(median);
    return f.more ? Math.max(...m) : Math.min(...m);
  });
  film.protocols.forEach((name, k) => {
    const row = el('tr');
    row.append(
      el('td', '', name),
      ...film.figures.map((f, n) =>
        el('td', median(f.values[k]) === best[n] ? 'best' : '', short(median(f.values[k]))),
      ),
      el('td', '', film.violations[k]),
    );
    t.append(row);
  });
  return t;
}
function draw() {
  const f = film.figures[figure];
  choose(
    'figures',
    film.figures.map((each, k) => [k, each.name]),
    () => figure,
    k => {
      figure = k;
    },
  );
  choose(
    'views',
    VIEWS,
    () => view,
    k => {
      view = k;
    },
  );
  choose(
    'scales',
    [
      ['linear', 'linear'],
      ['log', 'logarithmic'],
    ],
    () => scale,
    k => {
      scale = k;
    },
  );
  $('what').textContent =
    view === 'table' ? 'medians of all figures' : f.name + (f.unit ? `, ${f.unit}` : '');
  $('how').textContent =
    view === 'table'
      ? 'The best of each column is green.'
      : `${f.more ? 'More' : 'Less'} is better. All protocols had the same faults at the same times.`;
  say('');
  $('plot').replaceChildren(
    view === 'table' ? table() : view === 'shares' ? shares(f) : medians(f),
  );
  $('scales').hidden = view === 'table';
  $('legend').replaceChildren(
    ...film.protocols.map((name, k) => {
      const b = el('button'),
        i = el('i', `o${k % 6}`);
      b.append(i, name);
      b.setAttribute('aria-pressed', !off.has(k));
      b.onclick = () => {
        if (off.has(k)) off.delete(k);
        else if (off.size < film.protocols.length - 1) off.add(k);
        draw();
      };
      return b;
    }),
  );
}
addEventListener('keydown', e => {
  if (e.metaKey || e.ctrlKey || e.altKey) return;
  const n = film.figures.length;
  if (e.key === 'ArrowRight') figure = (figure + 1) % n;
  else if (e.key === 'ArrowLeft') figure = (figure + n - 1) % n;
  else return;
  draw();
});
const THEMES = ['', 'light', 'dark'];
$('theme').onclick = () => {
  const root = document.documentElement,
    next = THEMES[(THEMES.indexOf(root.dataset.theme || '') + 1) % 3];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
};
$('title').textContent = film.title;
$('chips').replaceChildren(...film.chips.map(text => el('span', 'chip', text)));
draw();
