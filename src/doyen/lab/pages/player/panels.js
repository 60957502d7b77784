/* What stands beside the picture: the servers at the cursor, the story, the violation with its
   causes, the legend, and what a message says and why. */

function chips(lane, t, upto = 0, most = 5) {
  const box = el('div', 'log'),
    last = scene.at(scene.lasts[lane], t),
    high = Math.max(last, upto),
    low = Math.max(1, high - most + 1);
  if (low > 1) box.append(el('span', 'e more', '…'));
  for (let k = low; k <= high; k++) {
    const e = scene.entryAt(lane, k, t);
    box.append(
      e
        ? el('span', `e g${e.tag}${e.committed <= t ? '' : ' open'}`, k)
        : el('span', k > last ? 'e missing' : 'e', k),
    );
  }
  return box;
}
const gutters = [];
function makeGutter() {
  $('gut').replaceChildren();
  gutters.length = 0;
  scene.lanes.forEach((name, lane) => {
    const box = el('div', 'ln'),
      a = el('div', 'a'),
      r = el('div', 'r'),
      dot = el('i'),
      text = el('span'),
      log = el('div', 'log'),
      b = el('b', '', middle(name));
    b.title = clip(scene.raw.lanes[lane], 300);
    a.append(b);
    r.append(dot, text);
    box.append(a, r, log);
    if (film.play && lane < scene.raw.servers) {
      const act = el('button', 'act', '⋯');
      act.setAttribute('aria-label', `Do something to ${name}`);
      act.onclick = () => menuFor(lane);
      box.append(act);
    }
    $('gut').append(box);
    gutters.push({ box, dot, text, log, was: '' });
  });
}
function gutter() {
  gutters.forEach((g, lane) => {
    const s = scene.roleAt(lane, at),
      last = scene.at(scene.lasts[lane], at);
    let agreed = last;
    while (
      agreed > Math.max(0, last - 5) &&
      !((scene.entryAt(lane, agreed, at) || {}).committed <= at)
    )
      agreed--;
    const bad = scene.raw.violations.some(v => v.at <= at && v.lanes[0] === lane),
      now = `${s.role}/${s.label}/${last}/${agreed}/${bad}`;
    if (now === g.was) return;
    g.was = now;
    g.dot.className = 'r' + s.role;
    g.text.textContent = s.label || (scene.acted ? 'not started' : '');
    g.box.classList.toggle('bad', bad);
    const log = chips(lane, at);
    g.log.replaceWith(log);
    g.log = log;
  });
}
function makeStory() {
  $('story').replaceChildren(
    ...scene.story.map(line => {
      const li = el('li', line.kind),
        b = el('button');
      b.append(
        el('time', '', secs(line.at)),
        icon(line.kind),
        el('span', 'name', clip(line.text, 600)),
      );
      b.onclick = () => {
        play(false);
        go(line.at, true);
      };
      li.append(b);
      li.classList.add('later');
      return li;
    }),
  );
  $('story').classList.toggle('long', scene.story.length > 400);
  told = -1;
}
let told = -1;
function tell() {
  const now = above(scene.story, at + 0.5, line => line.at) - 1,
    items = $('story').children;
  if (now === told) return;
  for (let k = Math.min(told, now); k <= Math.max(told, now); k++)
    if (items[k]) {
      items[k].classList.toggle('later', k > now);
      items[k].classList.toggle('at', k === now);
      if (k === now) items[k].setAttribute('aria-current', 'step');
      else items[k].removeAttribute('aria-current');
    }
  told = now;
  const li = items[Math.max(0, now)],
    box = $('story');
  if (li)
    box.scrollTop = Math.max(
      0,
      li.offsetTop - box.clientHeight * 0.7,
      li.offsetTop + li.offsetHeight + 8 - box.clientHeight,
    );
}
function readout() {
  $('time').textContent = secs(at, 4) + ' s';
  $('instant').textContent = `instant ${above(scene.times, at + 0.5)} of ${scene.times.length}`;
  if (!playing) {
    over.setAttribute('aria-valuenow', secs(at));
    over.setAttribute('aria-valuetext', `${secs(at)} seconds`);
  }
}
/* What led to a violation: who led before, the last faults, the entry that is missing, the votes. */
function causes(bad) {
  const names = bad.lanes.map(lane => scene.raw.lanes[lane]),
    before = scene.story.filter(line => line.at <= bad.at && line.kind !== 'violation'),
    entry = /\bentry (\d+)/.exec(bad.text);
  const mentions = text =>
      !names.length ||
      names.some(name =>
        new RegExp(`(^|[^\\w-])${name.replace(/[^\w]/g, '\\$&')}([^\\w-]|$)`).test(text),
      ),
    last = (kinds, count, of = () => true) =>
      before.filter(line => kinds.includes(line.kind) && of(line.text)).slice(-count);
  const holds = text => {
    const m = /^entr(?:y|ies) (\d+)(?: to (\d+))?/.exec(text);
    return entry && m && +entry[1] >= +m[1] && +entry[1] <= +(m[2] || m[1]);
  };
  return [
    ...new Set([
      ...last(['fault'], 3),
      ...last(['healed'], 1),
      ...last(['leads'], 1, text => !mentions(text)),
      ...last(['entry'], 1, holds),
      ...last(['yes', 'no'], 3, mentions),
    ]),
  ].sort((a, b) => scene.story.indexOf(a) - scene.story.indexOf(b));
}
function makeSide() {
  const bad = scene.raw.violations[0];
  $('why').hidden = !bad;
  $('jump').hidden = !bad;
  $('verdict').hidden = !bad;
  if (bad) {
    $('verdict').textContent =
      `${scene.raw.violations.length} violation${scene.raw.violations.length > 1 ? 's' : ''}, at ${secs(bad.at)} s`;
    $('why-text').replaceChildren(
      ...scene.raw.violations.map(v => el('p', '', `${v.kind}: ${v.text}`)),
    );
    $('chain').replaceChildren(
      ...causes(bad).map(line => {
        const li = el('li'),
          b = el('button'),
          text = el('span', 'name', ' ' + clip(line.text, 300));
        b.append(el('u', '', secs(line.at) + ' s'), text);
        b.onclick = () => {
          play(false);
          go(line.at, true);
        };
        li.append(b);
        return li;
      }),
    );
  }
  $('facts').hidden = !film.facts.length && !film.notes.length;
  $('fact-list').replaceChildren(
    ...film.facts.map(([text, held]) => el('li', held ? '' : 'broken', text)),
  );
  $('notes').hidden = !film.notes.length;
  $('notes').textContent = film.notes.join('\n');
  $('command').hidden = !film.command;
  $('command').textContent = film.command;
}
function makeLegend() {
  const box = $('legend');
  box.replaceChildren();
  const key = (name, text) => {
    const k = el('span', 'k');
    k.append(el('i', name), text);
    box.append(k);
  };
  const arrow = (colour, lost) =>
    shape(
      [
        [
          'path',
          {
            d: 'M1 5h18',
            stroke: `var(--${colour})`,
            'stroke-width': 1.8,
            ...(lost ? { 'stroke-dasharray': '4 2' } : {}),
          },
        ],
        lost
          ? ['path', { d: 'm16 2 6 6m0-6-6 6', stroke: 'var(--red)', 'stroke-width': 1.7 }]
          : ['path', { d: 'm17 1.5 6 3.5-6 3.5z', fill: `var(--${colour})` }],
      ],
      24,
      10,
    );
  if (scene.acted) {
    key('lead', 'leads');
    key('follow', scene.raw.servers ? 'follows' : 'waits');
    if (scene.raw.servers) key('look', 'looking');
  }
  for (const category of scene.categories) {
    const b = el('button');
    b.append(arrow((LOOK[category] || ['entry'])[0]), category);
    b.dataset.category = category;
    b.setAttribute('aria-pressed', !hidden.has(category));
    b.onclick = () => {
      if (hidden.has(category)) hidden.delete(category);
      else hidden.add(category);
      b.setAttribute('aria-pressed', !hidden.has(category));
      draw();
    };
    box.append(b);
  }
  if (scene.m) {
    const k = el('span', 'k');
    k.append(arrow('beat', true), 'lost');
    box.append(k);
  }
  if (scene.raw.logs.length) key('grow', 'entry: written, then committed');
  if (scene.raw.first)
    box.append(
      el('span', 'note', `the first ${scene.raw.first.toLocaleString('en')} messages are left out`),
    );
  const note = el('span', 'note');
  note.id = 'sparse';
  note.hidden = true;
  box.append(note);
  const b = el('button', '', 'fold quiet time');
  b.id = 'fold';
  b.setAttribute('aria-pressed', folding);
  b.onclick = () => setFold(!folding);
  box.append(b);
}
function setFold(on) {
  const middle = T(W / 2);
  folding = on;
  fold = new Fold(scene, on);
  $('fold').setAttribute('aria-pressed', on);
  wide = clamp(wide, 20 * fold.pad, UEND());
  from = fold.on(middle) - wide / 2;
  inBounds();
  go(at, true);
  draw();
}

const FATES = {
  cut: 'Lost: the link was cut.',
  disconnected: 'Not sent: there was no connection.',
  lost: 'Lost by the network.',
  dropped: 'Dropped by you.',
};
function card(what, pin) {
  const box = $('card');
  box.replaceChildren();
  box.classList.toggle('pinned', pin);
  if (what.mark != null) {
    const m = scene.marks[what.mark];
    box.append(
      el('div', 't', scene.lanes[m.lane]),
      el('div', 'q', m.label),
      el('div', 'faint mono', secs(m.at, 4) + ' s'),
    );
    return;
  }
  const i = what.i,
    row = scene.raw.messages[i],
    kind = scene.kinds[row[4]],
    title = el('div', 't');
  title.append(el('span', 'name', `${scene.lanes[row[2]]} → ${scene.lanes[row[3]]}: ${kind.name}`));
  const fate = scene.raw.fates[row[5]],
    lost = fate !== 'arrived',
    tag = lost && fate !== 'unreceived' ? fate : kind.tag;
  if (tag) title.append(el('em', tag === 'granted' ? 'yes' : 'no', tag));
  box.append(
    title,
    el('div', 'q', `“${scene.says(i)}”`),
    el(
      'div',
      'faint mono',
      row[1] < 0
        ? `sent ${secs(row[0], 4)} s`
        : `${secs(row[0], 4)} → ${secs(row[1], 4)} s, ${((row[1] - row[0]) / 1e3).toFixed(1)} ms`,
    ),
  );
  let why = row[7] >= 0 ? scene.raw.reasons[row[7]] : '';
  if (FATES[fate]) why = FATES[fate];
  else if (lost)
    why =
      row[1] >= 0 && row[1] <= scene.end
        ? `${scene.lanes[row[3]]} did not receive it: it was down or paused.`
        : 'It was under way at the end.';
  if (why) box.append(el('div', 'w', why));
  if (kind.tag && !lost && scene.raw.logs.length) {
    const grid = el('div', 'cmp'),
      upto = Math.max(scene.at(scene.lasts[row[2]], row[0]), scene.at(scene.lasts[row[3]], row[0]));
    for (const [lane, word] of [
      [row[2], 'voter'],
      [row[3], 'candidate'],
    ])
      grid.append(
        el('span', 'muted', `${scene.lanes[lane]}, ${word}`),
        chips(lane, row[0], upto, 7),
      );
    box.append(grid);
  }
  if (pin && film.play && !FATES[fate]) {
    const b = el('button', '', 'Drop this message');
    b.onclick = () => {
      at = Math.min(at, (row[0] + Math.max(row[0], row[1])) / 2);
      act({ kind: 'drop', at: row[0] / 1e6, amount: scene.raw.first + i + 1 });
    };
    box.append(b);
  }
}
function place(what) {
  const box = $('card'),
    left = $('canvases').offsetLeft,
    gs =
      what.mark != null
        ? [
            {
              x0: X(scene.marks[what.mark].at),
              x1: X(scene.marks[what.mark].at),
              y0: bandY(scene.marks[what.mark].lane),
              y1: bandY(scene.marks[what.mark].lane),
            },
          ]
        : [what.i, mateOf(what.i)].filter(i => i != null).map(segment);
  box.hidden = false;
  const w = box.offsetWidth,
    h = box.offsetHeight,
    wideStage = $('stage').clientWidth,
    xs = gs.flatMap(g => [g.x0, g.x1]).map(x => left + clamp(x, 0, W)),
    ys = gs.flatMap(g => [g.y0, g.y1]),
    lo = Math.min(...xs),
    hi = Math.max(...xs);
  let x = lo - w - 22,
    y = (Math.min(...ys) + Math.max(...ys)) / 2 - h / 2;
  if (x < 8) x = hi + 22;
  if (x + w > wideStage - 8) {
    x = clamp((lo + hi - w) / 2, 8, wideStage - w - 8);
    y = Math.max(...ys) + 30;
    if (y + h > H) y = Math.min(...ys) - h - 30;
  }
  box.style.left = x + 'px';
  box.style.top = clamp(y, 4, Math.max(4, H - h - 6)) + 'px';
}
function hit(px, py) {
  for (
    let k = above(scene.marks, T(px - 8), m => m.at);
    k < scene.marks.length && X(scene.marks[k].at) < px + 8;
    k++
  ) {
    const m = scene.marks[k];
    if (Math.abs(py - bandY(m.lane) - (scene.m ? -5 : BH / 2)) < 8) return { mark: k };
  }
  const [i0, i1] = scene.range(T(px - 12), T(px + 12));
  let best = null,
    near = 7;
  for (let i = i0; i < i1; i++) {
    const kind = scene.kinds[scene.kind[i]];
    if (!shownKind(kind) || fold.inside(scene.sent[i], scene.arrives[i])) continue;
    const g = segment(i);
    if (px < Math.min(g.x0, g.x1) - 8 || px > Math.max(g.x0, g.x1) + 8) continue;
    const dx = g.x1 - g.x0,
      dy = g.y1 - g.y0,
      k = clamp(((px - g.x0) * dx + (py - g.y0) * dy) / (dx * dx + dy * dy || 1), 0, 1),
      d = Math.hypot(px - g.x0 - k * dx, py - g.y0 - k * dy) + (kind.faint ? 1.5 : 0);
    if (d < near) {
      near = d;
      best = { i };
    }
  }
  return best;
}
const same = (a, b) => a === b || (a && b && a.i === b.i && a.mark === b.mark);
function pin(what) {
  pinned = what;
  if (what) {
    card(what, true);
    place(what);
  } else $('card').hidden = true;
  draw();
}
let drag = null;
view.addEventListener('pointermove', e => {
  if (drag) {
    from = drag.from - ((e.offsetX - drag.x) / W) * wide;
    inBounds();
    drag.moved ||= Math.abs(e.offsetX - drag.x) > 4;
    if (pinned) place(pinned);
    draw();
    return;
  }
  const what = hit(e.offsetX, e.offsetY);
  view.style.cursor = what ? 'pointer' : 'crosshair';
  if (same(what, hot)) return;
  hot = what;
  if (!pinned) {
    if (what) {
      card(what, false);
      place(what);
    } else $('card').hidden = true;
    draw();
  }
});
view.addEventListener('pointerleave', () => {
  if (hot) {
    hot = null;
    if (!pinned) {
      $('card').hidden = true;
      draw();
    }
  }
});
view.addEventListener('pointerdown', e => {
  drag = { x: e.offsetX, from, moved: false };
  view.setPointerCapture(e.pointerId);
});
view.addEventListener('pointerup', e => {
  const was = drag;
  drag = null;
  if (!was || was.moved) return;
  const what = hit(e.offsetX, e.offsetY);
  if (what) pin(same(pinned, what) ? null : what);
  else {
    pin(null);
    play(false);
    go(T(e.offsetX));
  }
});
view.addEventListener('pointercancel', () => {
  drag = null;
});
view.addEventListener(
  'wheel',
  e => {
    if (e.ctrlKey || e.metaKey) {
      e.preventDefault();
      zoom(Math.exp(e.deltaY * 0.002), T(e.offsetX));
    } else if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
      e.preventDefault();
      from += (e.deltaX / W) * wide;
      inBounds();
      draw();
    }
  },
  { passive: false },
);
const seek = e => {
  play(false);
  go(((e.offsetX - 14) / (over.clientWidth - 28)) * scene.end, true);
};
over.addEventListener('pointerdown', e => {
  over.setPointerCapture(e.pointerId);
  seek(e);
});
over.addEventListener('pointermove', e => {
  if (e.buttons) seek(e);
});
