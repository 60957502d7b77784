/* What the other parts use to make elements. Text of a film is only ever set as text. */
const $ = id => document.getElementById(id);
const el = (tag, name, text) => {
  const e = document.createElement(tag);
  if (name) e.className = name;
  if (text != null) e.textContent = text;
  return e;
};
const clip = (text, most) => (text.length > most ? text.slice(0, most - 1) + '…' : text);
/* A long name without its middle: names of many candidates differ at their ends. */
const middle = name => (name.length > 16 ? `${name.slice(0, 7)}…${name.slice(-7)}` : name);
const secs = (t, digits = 3) => (t / 1e6).toFixed(digits);
const clamp = (v, lo, hi) => Math.max(lo, Math.min(hi, v));
/* The first place in a sorted array whose value is above (or, with `from`, not below) v. */
function above(list, v, get) {
  let lo = 0,
    hi = list.length;
  while (lo < hi) {
    const k = (lo + hi) >> 1;
    if ((get ? get(list[k]) : list[k]) > v) hi = k;
    else lo = k + 1;
  }
  return lo;
}

const ICONS = {
  other: [
    ['circle', { cx: 7, cy: 7, r: 3, fill: 'none', stroke: 'var(--faint)', 'stroke-width': 1.6 }],
  ],
  asks: [
    [
      'path',
      {
        d: 'M2 7h8M7 3.5 10.5 7 7 10.5',
        fill: 'none',
        stroke: 'var(--ask)',
        'stroke-width': 1.8,
      },
    ],
  ],
  yes: [
    ['circle', { cx: 7, cy: 7, r: 5.5, fill: 'var(--yes)' }],
    [
      'path',
      { d: 'M4.4 7.2 6.3 9l3.4-4', fill: 'none', stroke: 'var(--panel)', 'stroke-width': 1.6 },
    ],
  ],
  no: [
    ['rect', { x: 1.8, y: 1.8, width: 10.4, height: 10.4, rx: 2, fill: 'var(--no)' }],
    ['path', { d: 'm4.6 4.6 4.8 4.8m0-4.8L4.6 9.4', stroke: 'var(--panel)', 'stroke-width': 1.6 }],
  ],
  leads: [['circle', { cx: 7, cy: 7, r: 5.5, fill: 'var(--lead)' }]],
  follows: [['circle', { cx: 7, cy: 7, r: 4, fill: 'var(--follow)', stroke: 'var(--faint)' }]],
  entry: [['rect', { x: 2, y: 4, width: 10, height: 6, rx: 1.5, fill: 'var(--g0)' }]],
  fault: [['path', { d: 'M7.8 1 3 8h3.4L5.8 13 11 6H7.4z', fill: 'var(--red)' }]],
  healed: [
    [
      'path',
      {
        d: 'M1.5 7H5l1.5-3 2 6L10 7h2.5',
        fill: 'none',
        stroke: 'var(--green)',
        'stroke-width': 1.6,
      },
    ],
  ],
  order: [
    [
      'path',
      {
        d: 'M3 2v10M3 3h8l-2.5 2.5L11 8H3',
        fill: 'none',
        stroke: 'var(--muted)',
        'stroke-width': 1.5,
      },
    ],
  ],
  note: [],
  violation: [
    [
      'path',
      {
        d: 'M7 1.4 13 12.4H1z',
        fill: 'none',
        stroke: 'var(--red)',
        'stroke-width': 1.7,
        'stroke-linejoin': 'round',
      },
    ],
    [
      'path',
      {
        d: 'M7 5.6v3M7 10.3v.3',
        stroke: 'var(--red)',
        'stroke-width': 1.6,
        'stroke-linecap': 'round',
      },
    ],
  ],
  first: [
    ['rect', { x: 1.5, y: 2, width: 2, height: 10, rx: 0.6, fill: 'currentColor' }],
    ['path', { d: 'M12.5 2.6v8.8L5 7z', fill: 'currentColor' }],
  ],
  back: [
    [
      'path',
      { d: 'M9 2.5 4.5 7 9 11.5', fill: 'none', stroke: 'currentColor', 'stroke-width': 1.8 },
    ],
  ],
  next: [
    [
      'path',
      { d: 'M5 2.5 9.5 7 5 11.5', fill: 'none', stroke: 'currentColor', 'stroke-width': 1.8 },
    ],
  ],
  play: [['path', { d: 'M3 1.8v10.4L12 7z', fill: 'currentColor' }]],
  pause: [
    ['rect', { x: 2.5, y: 2, width: 3.2, height: 10, rx: 0.8, fill: 'currentColor' }],
    ['rect', { x: 8.3, y: 2, width: 3.2, height: 10, rx: 0.8, fill: 'currentColor' }],
  ],
  theme: [
    ['circle', { cx: 7, cy: 7, r: 5.2, fill: 'none', stroke: 'currentColor', 'stroke-width': 1.5 }],
    ['path', { d: 'M7 1.8a5.2 5.2 0 0 1 0 10.4z', fill: 'currentColor' }],
  ],
};
function shape(parts, width = 14, height = 14) {
  const make = (tag, attributes) => {
    const e = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const k in attributes) e.setAttribute(k, attributes[k]);
    return e;
  };
  const e = make('svg', {
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    'aria-hidden': 'true',
  });
  for (const [tag, attributes] of parts) e.append(make(tag, attributes));
  return e;
}
const icon = name => shape(ICONS[name] || ICONS.other);
