/* The data of a page, and its scale.

   Scene   one recording (see recorder.py), decoded: arrays to search by time
   Fold    virtual time in which nothing but heartbeats happens takes little room

   Times are microseconds. */

const LOOK = {
  // by category: colour, whether it is drawn faintly
  votes: ['ask', false],
  entries: ['entry', false],
  heartbeats: ['beat', true],
  questions: ['ask', false],
  changes: ['entry', false],
  renewals: ['beat', true],
  notifications: ['yes', false],
};
const DOWN = 0,
  LOOKING = 1,
  LEADING = 3;

class Scene {
  constructor(raw) {
    this.raw = raw;
    this.lanes = raw.lanes.map(name => clip(name, 60));
    this.n = raw.lanes.length;
    this.end = raw.end;
    this.kinds = raw.kinds.map(kind => {
      const [colour, faint] = LOOK[kind.category] || ['entry', false];
      return {
        ...kind,
        faint,
        dashed: kind.name.startsWith('pre vote'),
        colour: kind.tag === 'granted' ? 'yes' : kind.tag === 'refused' ? 'no' : colour,
      };
    });
    this.categories = [...new Set(raw.kinds.map(kind => kind.category))];
    this.readMessages(raw);
    this.readRoles(raw);
    this.acted = raw.roles.some(([, , role]) => role !== DOWN); // and not only told
    this.readLogs(raw);
    this.story = raw.story.map(([at, kind, text]) => ({ at, kind, text }));
    this.marks = raw.marks
      .map(([at, lane, label]) => ({ at, lane, label: clip(label, 200) }))
      .sort((a, b) => a.at - b.at);
    this.bad = raw.violations.length ? raw.violations[0].at : null;
    const times = new Set();
    for (let i = 0; i < this.m; i++) {
      times.add(this.sent[i]);
      if (this.fate[i] === 0) times.add(this.arrives[i]);
    }
    for (const [, at] of raw.roles) times.add(at);
    for (const line of this.story) times.add(line.at);
    times.add(this.end);
    this.times = Float64Array.from([...times].filter(t => t <= this.end)).sort();
  }
  readMessages(raw) {
    const m = (this.m = raw.messages.length),
      ok = raw.fates.indexOf('arrived');
    this.sent = new Float64Array(m);
    this.arrives = new Float64Array(m);
    this.reach = new Float64Array(m);
    this.from = new Uint8Array(m);
    this.to = new Uint8Array(m);
    this.kind = new Uint8Array(m);
    this.fate = new Uint8Array(m);
    this.busy = new Int32Array(m + 1);
    const took = raw.messages
      .filter(r => r[5] === ok)
      .map(r => r[1] - r[0])
      .sort((a, b) => a - b);
    this.latency = took.length ? took[took.length >> 1] : 1e4;
    let reach = 0;
    raw.messages.forEach((row, i) => {
      const [sent, arrives, from, to, kind, fate] = row;
      this.sent[i] = sent;
      this.arrives[i] = arrives >= 0 ? arrives : sent + this.latency;
      this.from[i] = from;
      this.to[i] = to;
      this.kind[i] = kind;
      this.fate[i] = fate === ok ? 0 : fate === raw.fates.indexOf('unreceived') ? 2 : 1;
      this.reach[i] = reach = Math.max(reach, this.arrives[i]);
      this.busy[i + 1] = this.busy[i] + (this.kinds[kind].faint ? 0 : 1);
    });
  }
  readRoles(raw) {
    this.roles = raw.lanes.map(() => []);
    for (const [lane, at, role, label] of raw.roles) {
      const spans = this.roles[lane],
        last = spans.at(-1);
      if (last) {
        if (last.from === at) spans.pop();
        else last.to = at;
      }
      spans.push({ from: at, to: Infinity, role, label: clip(raw.labels[label], 80) });
    }
  }
  readLogs(raw) {
    this.logs = raw.lanes.map(() => new Map());
    this.lasts = raw.lanes.map(() => [[0, 0]]);
    this.tallest = [[0, 0]];
    const changes = raw.lanes.map(() => []);
    const tags = [...new Set(raw.logs.map(r => r[2]))].sort((a, b) => a - b);
    this.tag = new Map(tags.map((g, k) => [g, k % 4]));
    for (const [lane, index, generation, from, committed, until] of raw.logs) {
      const rows = this.logs[lane],
        row = {
          index,
          generation,
          tag: this.tag.get(generation),
          from,
          committed: committed < 0 ? Infinity : committed,
          until: until < 0 ? Infinity : until,
        };
      if (row.until <= row.from) continue;
      if (!rows.has(index)) rows.set(index, []);
      rows.get(index).push(row);
      changes[lane].push([from, 1, index]);
      if (until >= 0) changes[lane].push([until, 0, index]);
    }
    for (const [lane, at, index] of raw.bases) changes[lane].push([at, -1, index]);
    changes.forEach((list, lane) => {
      const there = new Set();
      let last = 0,
        base = 0;
      for (const [at, add, index] of list.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
        if (add < 0) base = index;
        else if (add) there.add(index);
        else there.delete(index);
        if (add > 0) last = Math.max(last, index);
        else while (last > 0 && !there.has(last)) last--;
        this.lasts[lane].push([at, Math.max(last, base)]);
        this.tallest.push([at, Math.max(last, base)]);
      }
    });
    this.tallest.sort((a, b) => a[0] - b[0]);
    let most = 0;
    for (const step of this.tallest) step[1] = most = Math.max(most, step[1]);
  }
  at(list, t) {
    return list[above(list, t, step => step[0]) - 1][1];
  }
  roleAt(lane, t) {
    const spans = this.roles[lane];
    return spans[above(spans, t, s => s.from) - 1] || { role: DOWN, label: '' };
  }
  entryAt(lane, index, t) {
    return (this.logs[lane].get(index) || []).find(row => row.from <= t && t < row.until);
  }
  says(i) {
    const row = this.raw.messages[i],
      kind = this.kinds[row[4]];
    let k = 8;
    return kind.says.replace(/\{\w+\}/g, () => clip(String(row[k++]), 300));
  }
  range(t0, t1) {
    return [above(this.reach, t0 - 1), above(this.sent, t1)];
  }
}

class Fold {
  constructor(scene, on) {
    const pad = (this.pad = clamp(2 * scene.latency, 4e3, 5e4)),
      t = (this.t = []),
      u = (this.u = []);
    this.gaps = [];
    const busy = [0, scene.end];
    for (let i = 0; i < scene.m; i++)
      if (!scene.kinds[scene.kind[i]].faint)
        busy.push(scene.sent[i], Math.min(scene.end, scene.arrives[i]));
    for (const [, at] of scene.raw.roles) busy.push(at);
    for (const line of scene.story) busy.push(line.at);
    for (const mark of scene.marks) busy.push(mark.at);
    busy.sort((a, b) => a - b);
    t.push(-1e6);
    u.push(-1e6);
    let shift = 0;
    for (let k = 1; k < busy.length; k++) {
      const a = busy[k - 1] + pad,
        b = busy[k] - pad,
        keep = 1.4 * pad;
      if (!on || b - a < 4 * pad) continue;
      t.push(a);
      u.push(a - shift);
      shift += b - a - keep;
      t.push(b);
      u.push(b - shift);
      this.gaps.push([a, b]);
    }
    t.push(scene.end + 1e7);
    u.push(scene.end + 1e7 - shift);
  }
  map(v, x, y) {
    const k = clamp(above(x, v), 1, x.length - 1);
    return y[k - 1] + ((v - x[k - 1]) / (x[k] - x[k - 1])) * (y[k] - y[k - 1]);
  }
  on(t) {
    return this.map(t, this.t, this.u);
  }
  off(u) {
    return this.map(u, this.u, this.t);
  }
  inside(t0, t1) {
    const k = above(this.gaps, t0, g => g[0]) - 1;
    return k >= 0 && t1 < this.gaps[k][1];
  }
}
