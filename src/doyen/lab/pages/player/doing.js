/* A run in which the reader intervenes is the same plan with one more fault, so it is the same run
   up to that instant. The server runs it; the address holds it. */
let forS = 2;
function menuFor(lane) {
  const name = scene.raw.lanes[lane],
    others = scene.raw.lanes.filter((_, k) => k !== lane && k < scene.raw.servers),
    now = Math.max(0, at / 1e6),
    items = $('menu-items');
  play(false);
  $('menu-title').textContent = `${scene.lanes[lane]} at ${secs(at)} s`;
  items.replaceChildren();
  const label = el('label', 'muted', 'for'),
    select = el('select');
  for (const [v, text] of [
    [0.5, '0.5 s'],
    [2, '2 s'],
    [5, '5 s'],
    [60, 'the rest of the run'],
  ]) {
    const o = el('option', '', text);
    o.value = v;
    o.selected = v === forS;
    select.append(o);
  }
  select.onchange = () => {
    forS = +select.value;
  };
  label.append(select);
  items.append(label);
  const add = (text, ...faults) => {
    const b = el('button', '', text);
    b.onclick = () => {
      $('menu').close();
      act(...faults.map(fault => ({ at: now, for_s: forS, nodes: [name], ...fault })));
    };
    items.append(b);
  };
  add('Kill its process', { kind: 'crash' });
  add('Cut its power', { kind: 'power' });
  add('Pause its process', { kind: 'pause' });
  add('Cut it off from all others', { kind: 'partition' });
  for (const other of others)
    add(
      `Cut the link to ${clip(other, 40)}, both ways`,
      { kind: 'oneway', nodes: [name, other] },
      { kind: 'oneway', nodes: [other, name] },
    );
  for (const other of others)
    add(`Lose what it sends to ${clip(other, 40)}`, { kind: 'oneway', nodes: [name, other] });
  add('Let its clock run at twice the rate', { kind: 'rate', amount: 2 });
  add('Make its disk 0.3 s slower', { kind: 'stall', amount: 0.3 });
  $('menu').showModal();
}
const ACTS = {
  crash: 'kill',
  power: 'cut the power of',
  pause: 'pause',
  partition: 'cut off',
  oneway: 'lose messages',
  rate: 'speed up the clock of',
  stall: 'slow the disk of',
  drop: 'drop message',
  transfer: 'hand over',
};
/* One after the other: what is done while the lab runs is added to what was done before. */
let acting = Promise.resolve();
function act(...faults) {
  acting = acting.then(() => rerun([...film.play.run.faults, ...faults]));
}
/* What replaces the whole list waits for the reader to see the list that it is about. */
const ifIdle = what => {
  if (!document.body.hasAttribute('aria-busy')) what();
};
async function rerun(faults, change = {}) {
  const run = { ...film.play.run, ...change, faults };
  $('doing-error').hidden = true;
  document.body.setAttribute('aria-busy', 'true');
  try {
    const answer = await fetch(film.play.url, {
        method: 'POST',
        headers: { 'Content-Type': 'application/json' },
        body: JSON.stringify(run),
      }),
      result = await answer.json();
    if (!answer.ok) throw new Error(result.error);
    film = result;
    history.replaceState(null, '', '#' + encodeURIComponent(JSON.stringify(film.play.run)));
    load(0, at);
  } catch (error) {
    $('doing-error').textContent = `The lab did not do it: ${error.message}`;
    $('doing-error').hidden = false;
  } finally {
    document.body.removeAttribute('aria-busy');
  }
}
function makeDoing() {
  $('doing').hidden = !film.play;
  if (!film.play) return;
  const faults = film.play.run.faults;
  $('done').replaceChildren(
    ...faults.map((f, k) => {
      const li = el('li'),
        b = el('button', '', '✕');
      b.setAttribute('aria-label', `Undo line ${k + 1}`);
      b.onclick = () => ifIdle(() => rerun(faults.filter((_, j) => j !== k)));
      li.append(
        el('span', 'mono faint', f.at.toFixed(3)),
        el(
          'span',
          'name',
          `${ACTS[f.kind] || f.kind} ${f.kind === 'drop' ? f.amount : (f.nodes || []).join(f.kind === 'oneway' ? ' → ' : ', ')}${f.for_s && !['drop'].includes(f.kind) ? `, ${f.for_s < 60 ? f.for_s + ' s' : 'for good'}` : ''}`,
        ),
        b,
      );
      return li;
    }),
  );
  $('doing-hint').textContent = faults.length
    ? ''
    : 'Move the cursor to an instant. Then use ⋯ beside a server, or select a message and drop it.';
  const row = $('doing-row');
  row.replaceChildren();
  const button = (text, what) => {
    const b = el('button', '', text);
    b.onclick = () => ifIdle(what);
    row.append(b);
  };
  if (!film.play.run.saved)
    button('Another seed', () => rerun([], { seed: film.play.run.seed + 1 }));
  button('Undo all', () => rerun([]));
  button('Save as a file', save);
}
function save() {
  const a = el('a');
  a.href = URL.createObjectURL(new Blob([film.play.file], { type: 'application/json' }));
  a.download = `lab-${film.play.run.protocol}-${film.play.run.seed}.json`;
  a.click();
  URL.revokeObjectURL(a.href);
}
