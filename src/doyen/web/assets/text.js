// Text, time and small pieces of the document. Names come from other processes: they are only ever
// set as text.

export const $ = id => document.getElementById(id);

export function el(tag, cls, text) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text != null) node.textContent = text;
  return node;
}

// A text of others as it is shown: what cannot be seen, or would turn the direction of what follows,
// is a mark, and a name of blanks stands in quotes.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u2069\ufeff]/g;
export function plain(text) {
  const shown = String(text).replace(UNSEEN, '\ufffd');
  return shown.trim() || !shown ? shown : `“${shown}”`;
}
// The same within a sentence: what is written from right to left is isolated in its direction.
const LEFTWARD = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;
export const said = text => LEFTWARD.test(text) ? `\u2068${plain(text)}\u2069` : plain(text);

// A text of others: clipped by the layout, and isolated in its direction.
export function name(text, cls = '') {
  const node = el('span', `clip ${cls}`, plain(text));
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

// One name, one colour, in every row. The first eight names have different ones. The names that were
// seen first are forgotten if there are ever new ones.
const HUES = 8, KNOWN = 2000, hues = new Map(), used = new Array(HUES).fill(0);
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
    if (hues.size > KNOWN) { const [first, its] = hues.entries().next().value; hues.delete(first); used[its]--; }
  }
  return `var(--l${h})`;
}

export const calm = matchMedia('(prefers-reduced-motion: reduce)');
