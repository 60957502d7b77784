// Dialogs: the confirmation of an action says in order what will happen, and the same as a command.

import { $, el, plain, said } from './text.js';
import { isLive, post, state } from './state.js';

const dialog = $('dialog');

export function whyNot() {
  if (!state.connected) return 'off: this page has lost its server';
  if (!isLive()) return 'off: the store is unreachable';
  if (state.hello?.may_act) return '';
  return state.hello?.why === 'no token' ? 'off: open the printed address, which has the token' : 'read-only: started without --allow-actions';
}

export function open(title, parts, buttons) {
  dialog.replaceChildren();
  const body = el('div', 'in'), h = el('h2', '', title), row = el('div', 'row2');
  h.id = 'dialog-title';
  h.dir = 'auto';
  body.append(h, ...parts);
  row.append(...buttons);
  dialog.append(body, row);
  if (!dialog.open) dialog.showModal();
  return row;
}
export const close = () => dialog.close();

function toast(text, bad) {
  const node = el('div', bad ? 'toast bad' : 'toast', plain(text));
  node.dir = 'auto';
  $('toasts').append(node);
  setTimeout(() => node.remove(), bad ? 12000 : 6000);
}

export async function perform(request, what) {
  toast(`${what} …`);
  try { toast((await post('api/act', request)).done); } catch (error) { toast(error.message, true); }
}

export function confirm({ title, steps, note, command, label, danger, request, extra }) {
  const list = el('ol');
  for (const text of steps) { const li = el('li', '', text); li.dir = 'auto'; list.append(li); }
  const parts = [el('p', 'muted', 'What will happen:'), list];
  if (extra) parts.unshift(extra);
  if (note) parts.push(el('p', 'muted', note));
  if (command && plain(command) === command) { const p = el('p', 'muted', 'The same as a command: '), code = el('code', 'mono', command); code.dir = 'auto'; p.append(code); parts.push(p); }
  const no = el('button', '', 'Leave as it is'), yes = el('button', danger ? 'primary danger' : 'primary', label);
  no.onclick = close;
  yes.onclick = () => { const asked = typeof request === 'function' ? request() : request; if (asked) { close(); perform(asked, label); } };
  open(title, parts, [no, yes]);
  no.focus();
}

// A word of a command, quoted for a shell.
export const quoted = text => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;

export function transfer(row, to, ttl) {
  const name = said(row.name), leader = said(row.leader), successor = said(to);
  const lock = row.kind === 'locks' ? ' --lock' : '', wait = ttl ? `${ttl.toFixed(0)} s` : 'its ttl';
  confirm({
    title: `Hand ${name} over to ${successor}?`,
    steps: [
      `${successor} is asked whether it is ready. If it does not confirm within 10 s, ${leader} keeps ${name}.`,
      `${leader} is told to stop. Its work under token ${row.token} is cancelled, and has to end.`,
      `${successor} leads, with a token above ${row.token}. In between nobody leads, usually for a few milliseconds.`,
      `${leader} does as it is programmed: usually it goes to the end of the line.`,
    ],
    note: `If ${leader} hangs, it keeps ${name} until its lease ends (${wait} after its last renewal). Late writes with token ${row.token} are refused wherever tokens are checked.`,
    command: `doyen transfer ${quoted(row.name)} --to ${quoted(to)}${lock}`,
    label: `Hand over to ${successor}`,
    request: { action: 'transfer', kind: row.kind, name: row.name, to, token: row.token },
  });
}

export function resign(row) {
  const name = said(row.name), leader = said(row.leader);
  const lock = row.kind === 'locks' ? ' --lock' : '', next = row.next[0] && said(row.next[0]);
  confirm({
    title: `Have ${leader} resign from ${name}?`,
    steps: [
      `${leader} is told to stop. Its work under token ${row.token} is cancelled, and has to end within 10 s; otherwise this fails and ${leader} keeps ${name}.`,
      next ? `${next}, first in line, leads with a token above ${row.token}.` : `Nobody is in line: nobody ${row.kind === 'elections' ? 'leads' : 'has it'} until somebody stands.`,
      `${leader} does as it is programmed: it may campaign again.`,
    ],
    note: `Late writes with token ${row.token} are refused wherever tokens are checked.`,
    command: row.kind === 'semaphores' ? '' : `doyen resign ${quoted(row.name)}${lock}`,   // the command line has none for a slot
    label: 'Have it resign',
    danger: true,
    request: { action: 'resign', kind: row.kind, name: row.name, token: row.token },
  });
}

export function help() {
  const keys = el('div', 'keys');
  for (const [k, v] of [['/', 'filter'], ['↑ ↓  or  k j', 'previous, next election'], ['← →', 'step through its terms, with causes'], ['[ ]', 'shorter, longer time'], ['t', 'transfer'], ['r', 'resign'], ['1 – 5', 'elections, groups, shards, configuration, quorum'], ['Esc', 'close; clear the filter']]) {
    const cell = el('span');
    cell.append(el('kbd', '', k));
    keys.append(cell, el('span', '', v));
  }
  const ok = el('button', '', 'Close');
  ok.onclick = close;
  open('Keys', [keys], [ok]);
}
export const isOpen = () => dialog.open;
