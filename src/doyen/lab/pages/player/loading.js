/* Shows a film. Runs last. */

function makeScenes(number) {
  const box = $('scenes');
  box.hidden = film.scenes.length < 2;
  box.replaceChildren(
    ...film.scenes.map((s, k) => {
      const b = el('button', '', `${k + 1}. ${clip(s.title || 'scene', 160)}`);
      b.setAttribute('aria-pressed', k === number);
      b.onclick = () => load(k);
      return b;
    }),
  );
}
/* Show a scene. A failing one opens at its violation; `keep` is a cursor to keep. */
function load(number, keep) {
  playing = false;
  $('go').replaceChildren(icon('play'));
  $('go').setAttribute('aria-label', 'Play');
  hot = pinned = null;
  $('card').hidden = true;
  drawn = false;
  document.title = 'doyen lab: ' + clip(film.title, 120);
  $('title').textContent = clip(film.title, 200);
  $('chips').replaceChildren(...film.chips.map(text => el('span', 'chip name', clip(text, 120))));
  $('events').textContent = `${film.events.toLocaleString('en')} events`;
  $('trace').textContent = film.trace ? `trace ${film.trace}` : '';
  if (film.home) $('home').href = film.home;
  scene = new Scene(film.scenes[number]);
  fold = new Fold(scene, folding);
  makeScenes(number);
  makeGutter();
  makeLegend();
  makeStory();
  makeSide();
  makeDoing();
  size();
  setSpeed(
    SPEEDS.reduce((a, b) =>
      Math.abs(Math.log(b / (fold.pad / 4e5))) < Math.abs(Math.log(a / (fold.pad / 4e5))) ? b : a,
    ),
  );
  at = clamp(keep ?? scene.bad ?? scene.end, 0, scene.end);
  if (keep == null) {
    wide = firstWidth();
    from = fold.on(at) - wide * 0.9;
  }
  inBounds();
  follow(true);
  draw();
  gutter();
  tell();
  readout();
  over.setAttribute('aria-valuemin', 0);
  over.setAttribute('aria-valuemax', secs(scene.end));
}
/* About as much time as the eye can take in: some hundred messages. */
function firstWidth() {
  const near = phone() ? 24 : 90,
    whole = UEND() + fold.pad;
  let k = above(scene.sent, at) - 1,
    seen = 0;
  for (; k >= 0 && seen < near; k--) if (!scene.kinds[scene.kind[k]].faint) seen++;
  return clamp(
    (fold.on(at) - fold.on(k < 0 ? 0 : scene.sent[k])) * 1.15,
    Math.min(whole, 30 * fold.pad),
    whole,
  );
}
colours();
load(0);
if (film.play && location.hash.length > 1) {
  try {
    const given = JSON.parse(decodeURIComponent(location.hash.slice(1)));
    rerun(given.faults || [], given);
  } catch {
    /* not an address of ours */
  }
}
