// Text, time and small pieces of the document. Names come from other processes: they are only ever
// set as text.

export const $ = id => document.getElementById(id);

export function el(tag, cls, text) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text != null) node.textContent = text;
  return node;
}

// A text of others: clipped by the layout, and isolated in its direction.
export function name(text, cls = '') {
  const node = el('span', `clip ${cls}`, text);
  node.dir = 'auto';
  return node;
}

export const clock = (t, digits = 0) => {
  const d = new Date(t * 1000);
  const two = n => String(n).padStart(2, '0');
  const base = `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
  return digits ? `${base}.${String(d.getMilliseconds()).padStart(3, '0').slice(0, digits)}` : base;
};

export const day = t => new Date(t * 1000).toLocaleDateString(undefined, { month: 'short', day: 'numeric' });

export const date = t => new Date(t * 1000).toLocaleDateString(undefined, { year: 'numeric', month: 'short', day: 'numeric' });

export function span(s) {
  if (s < 0.9995) return `${Math.max(1, Math.round(s * 1000))} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(s < 36000 ? 1 : 0)} h`;
  return `${Math.round(s / 86400)} d`;
}

export const thousands = n => String(n).replace(/\B(?=(\d{3})+$)/g, ',');
export const many = (n, one, more = `${one}s`) => `${thousands(n)} ${n === 1 ? one : more}`;
export const size = b => b >= 1e9 ? `${(b / 1e9).toFixed(1)} GB` : b >= 1e6 ? `${(b / 1e6).toFixed(1)} MB` : `${Math.ceil(b / 1e3)} kB`;

// One name, one colour, in every row. The first eight names have different ones.
const HUES = 8, hues = new Map(), used = new Array(HUES).fill(0);
export function hue(who) {
  let h = hues.get(who);
  if (h == null) {
    let start = 0;
    for (const c of who) start = (start * 31 + c.codePointAt(0)) >>> 0;
    h = start % HUES;
    const least = Math.min(...used);
    while (used[h] > least) h = (h + 1) % HUES;
    used[h]++;
    hues.set(who, h);
  }
  return `var(--l${h})`;
}

export const calm = matchMedia('(prefers-reduced-motion: reduce)');
