/* The list of what `doyen lab play` serves. Text is only ever set as text. */
const $ = id => document.getElementById(id),
  film = JSON.parse($('film').textContent);
$('title').textContent = film.title;
$('saved-box').hidden = !film.saved.length;
for (const box of ['play', 'saved', 'scenarios'])
  for (const each of film[box]) {
    const li = document.createElement('li'),
      a = document.createElement('a'),
      text = document.createElement('span');
    a.href = each.href;
    a.textContent = each.name;
    text.textContent = each.text;
    text.className = 'muted name';
    li.append(a, text);
    $(box).append(li);
  }
