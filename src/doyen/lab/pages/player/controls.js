/* The cursor, the keys, and light and dark. */

function inBounds() {
  from = clamp(from, -fold.pad, Math.max(-fold.pad, UEND() - wide));
}
function follow(centre) {
  const u = fold.on(at),
    lo = from + wide * 0.05,
    hi = from + wide * 0.95,
    was = from;
  if (centre && (u < lo || u > hi)) from = u - wide * 0.6;
  else if (u > hi) from = u - wide * (playing ? 0.06 : 0.5);
  else if (u < lo && from > -fold.pad) from = u - wide * 0.5;
  inBounds();
  return from !== was;
}
function go(t, centre) {
  at = clamp(t, 0, scene.end);
  if (follow(centre)) {
    if (pinned) place(pinned);
    draw();
  } else {
    overCursor();
    top();
  }
  const now = performance.now();
  if (!playing || now - sidesAt >= SIDES_MS) {
    sidesAt = now;
    sides();
  }
}
/* What stands beside the picture. Nobody reads it sixty times a second. */
function sides() {
  gutter();
  tell();
  readout();
}
const SIDES_MS = 90;
let sidesAt = 0;
/* The cursor takes at least this long from one edge of the window to the other. */
const CROSSING_S = 1.5;
function widen() {
  const least = Math.min(speed * 1e6 * CROSSING_S, UEND() + fold.pad);
  if (wide < least) zoom(least / wide);
}
function step(way, list = scene.times, get) {
  play(false);
  const k = way > 0 ? above(list, at + 0.5, get) : above(list, at - 0.5, get) - 1;
  if (list[k] != null) go(get ? get(list[k]) : list[k]);
}
function zoom(by, about = at) {
  const u = fold.on(about),
    w = clamp(wide * by, 8 * fold.pad, UEND() + fold.pad);
  from = u - ((u - from) * w) / wide;
  wide = w;
  inBounds();
  if (pinned) place(pinned);
  draw();
}
const slow = matchMedia('(prefers-reduced-motion: reduce)');
let before = 0,
  shown = 0;
function play(on) {
  if (on === playing) return;
  playing = on;
  $('go').replaceChildren(icon(on ? 'pause' : 'play'));
  $('go').setAttribute('aria-label', on ? 'Pause' : 'Play');
  turn += 1;
  if (!on) return sides();
  pin(null);
  if (at >= scene.end - 1) at = 0;
  widen();
  before = shown = performance.now();
  ask(turn);
}
let turn = 0;
const ask = mine => requestAnimationFrame(now => frame(now, mine));
function frame(now, mine) {
  if (!playing || mine !== turn) return;
  if (slow.matches && now - shown < 1000) return ask(mine);
  const d = Math.min(slow.matches ? 1 : 0.1, Math.max(0, (now - before) / 1000));
  before = shown = now;
  go(fold.off(fold.on(at) + d * speed * 1e6));
  if (at >= scene.end) play(false);
  else ask(mine);
}
const toViolation = () => {
  if (scene.bad != null) {
    play(false);
    go(scene.bad, true);
  }
};
$('first').onclick = () => {
  play(false);
  go(0, true);
};
$('back').onclick = () => step(-1);
$('go').onclick = () => play(!playing);
$('next').onclick = () => step(1);
$('jump').onclick = $('verdict').onclick = toViolation;
$('out').onclick = () => zoom(1.4);
$('in').onclick = () => zoom(1 / 1.4);
$('help').onclick = () => $('dlg').showModal();
for (const name of ['first', 'back', 'next']) $(name).append(icon(name));
$('go').append(icon('play'));
$('theme').append(icon('theme'));
const SPEEDS = [0.02, 0.05, 0.1, 0.5, 1];
for (const s of SPEEDS) {
  const b = el('button', '', s + '×');
  b.onclick = () => setSpeed(s);
  $('speed').append(b);
}
function setSpeed(s) {
  speed = s;
  if (playing) widen();
  [...$('speed').children].forEach((b, k) => b.setAttribute('aria-pressed', SPEEDS[k] === s));
}
addEventListener('keydown', e => {
  if (
    e.metaKey ||
    e.ctrlKey ||
    e.altKey ||
    document.querySelector('dialog[open]') ||
    ['SELECT', 'INPUT'].includes(e.target.tagName)
  )
    return;
  const line = l => l.at;
  switch (e.key) {
    case ' ':
      if (e.target.tagName === 'BUTTON') return;
      e.preventDefault();
      play(!playing);
      break;
    case 'ArrowRight':
    case 'ArrowLeft': {
      const way = e.key === 'ArrowRight' ? 1 : -1;
      e.preventDefault();
      if (e.shiftKey) step(way, scene.story, line);
      else step(way);
      break;
    }
    case 'v':
      toViolation();
      break;
    case 'Home':
      e.preventDefault();
      play(false);
      go(0, true);
      break;
    case 'End':
      e.preventDefault();
      play(false);
      go(scene.end, true);
      break;
    case '+':
    case '=':
      zoom(1 / 1.4);
      break;
    case '-':
      zoom(1.4);
      break;
    case 'f':
      setFold(!folding);
      break;
    case 'Escape':
      pin(null);
      break;
    case '?':
      $('dlg').showModal();
      break;
    case 'h': {
      const b = [...document.querySelectorAll('#legend button')].find(b =>
        ['heartbeats', 'renewals'].includes(b.dataset.category),
      );
      if (b) b.click();
      break;
    }
    case 'm': {
      const list = underWay();
      if (list.length) {
        const k = list.findIndex(i => pinned && pinned.i === i);
        play(false);
        pin({ i: list[(k + 1) % list.length] });
      }
      break;
    }
  }
});
/* The messages at the cursor: with `m` they can be read without a pointer. */
function underWay() {
  const [i0, i1] = scene.range(at, at),
    out = [];
  for (let i = i0; i < i1; i++)
    if (scene.arrives[i] >= at && shownKind(scene.kinds[scene.kind[i]])) out.push(i);
  return out;
}
for (const [k, what] of [
  ['space', 'play, pause'],
  ['← →', 'one instant back, ahead'],
  ['shift ← →', 'one line of the story'],
  ['v', 'to the violation'],
  ['m', 'the next message at the cursor'],
  ['+ −', 'zoom; or ctrl and the wheel'],
  ['h', 'hide heartbeats'],
  ['f', 'fold quiet time'],
  ['Home End', 'beginning, end'],
  ['Esc', 'close what a message says'],
]) {
  const s = el('span');
  s.append(el('kbd', '', k));
  $('keys').append(s, el('span', '', what));
}

const THEMES = ['', 'light', 'dark'];
function remembered(value) {
  try {
    if (value == null) return localStorage.getItem('doyen-theme') || '';
    localStorage.setItem('doyen-theme', value);
  } catch {
    /* a page may have no storage */
  }
  return value || '';
}
function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  $('theme').title = `Colours: ${name || 'as the system'}`;
}
setTheme(remembered());
$('theme').onclick = () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme || '') + 1) % 3];
  remembered(next);
  setTheme(next);
  repaint();
};
function repaint() {
  colours();
  drawn = false;
  draw();
}
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', repaint);
addEventListener('resize', () => {
  size();
  drawn = false;
  inBounds();
  draw();
  if (pinned) place(pinned);
});
