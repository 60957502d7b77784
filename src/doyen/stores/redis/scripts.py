"""The data in Redis, and the scripts that read and change it. Each runs as one atomic step.

    {prefix}:meta     hash: revision (the counter of all changes), run (the run id of the server
                      that last advanced it), ahead (how far it is ahead of that server's clock),
                      layout
    {prefix}:leases   hash: ttl_us:<id>, counter:<id>, renewed_us:<id>; a lease has ended when its
                      fields are gone
    {prefix}:due      sorted set: all leases, by the time at which they expire without a renewal
    {prefix}:entries  hash: value:<path>, revision:<path>, version:<path>, lease:<path>
    {prefix}:index    sorted set: all paths, in byte order, which is the order of tickets in a line
    {prefix}:bound    sorted set: "<id> <path>" of every entry that is bound to a lease
    {prefix}:at:<path>  the channel for changes at a path or under it

Every script declares these six keys and touches no other. The prefix is a hash tag, so in a cluster
they are in one slot. While that slot is being moved, a server refuses a command that needs a key
which it lacks. It also refuses such a command in the middle of a script, and what the script has
written by then stays. Six keys that are declared and always exist rule that out: a server that has
all of them runs the whole script, and one that lacks any refuses it before it begins. Each key
holds an element named by the empty string, so that it does not vanish with its last lease or entry.

No key has an expiry: a server's clock alone never ends anything.

Tokens are revisions. Each revision is greater than the one before, and follows the server's clock
in microseconds. A server that was not the last to advance the counter begins more than an hour
further ahead of its clock. A server that was promoted or restarted without the last writes of its
predecessor therefore stays above the tokens which that one has given out. There is one exception.
If the predecessor had itself just been promoted, and nothing that it wrote survives, both count
equally far ahead of their clocks. The later one then stays above as long as its clock is behind by
less than the time between the two promotions.

Numbers in Lua are exact up to 2**53, which microseconds reach in the year 2255.
"""

from __future__ import annotations

KEYS = ("meta", "leases", "due", "entries", "index", "bound")
LAYOUT = 2
LARGEST = 1 << 53
_SWEPT = 64
"""How many leases that may have expired are observed when a store is opened."""
_LOOKED_AT = 16
"""How many batches of that size are searched for them."""

_PRELUDE = f"""
local META, LEASES, DUE, ENTRIES, INDEX, BOUND = unpack(KEYS)
local P, RUN = ARGV[1], ARGV[2]
local GAP = 4294967296

local function int(n) return string.format('%.0f', n) end

local function now()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

local function number()
  local last = redis.call('HMGET', META, 'revision', 'run', 'ahead')
  local n, at = tonumber(last[1] or 0) + 1, now()
  local ahead = tonumber(last[3]) or math.max(0, n - at)
  if not last[2] or last[2] == RUN then
    ahead = math.max(ahead, n - at)
  else
    ahead = ahead + GAP
  end
  n = int(math.max(n, at + ahead))
  redis.call('HSET', META, 'revision', n, 'run', RUN, 'ahead', int(ahead))
  return n
end

-- The counter is advanced when the data is created. Another server that has this much, but not the
-- first token, then leaves its gap above the counter.
if redis.call('EXISTS', META) == 0 then
  redis.call('HSET', LEASES, '', ''); redis.call('HSET', ENTRIES, '', '')
  redis.call('ZADD', DUE, '+inf', ''); redis.call('ZADD', INDEX, 0, '')
  redis.call('ZADD', BOUND, 0, '')
  redis.call('HSET', META, 'layout', {LAYOUT})
  number()
end

local function notify(path)
  while path do
    redis.call('PUBLISH', P .. 'at:' .. path, '')
    path = string.match(path, '^(.+)/[^/]*$')
  end
end

-- The second result is true if another program has damaged the lease. A damaged lease is skipped in
-- queries for many leases, and an error in queries for an entry that is bound to it.
local function lease_row(id)
  local l = redis.call('HMGET', LEASES, 'ttl_us:' .. id, 'counter:' .. id, 'renewed_us:' .. id)
  if not (tonumber(l[1]) and tonumber(l[2]) and tonumber(l[3])) then
    return {{id}}, (l[1] or l[2] or l[3]) and true
  end
  return {{id, l[1], l[2], int(now() - l[3])}}
end

local function exists(id) return redis.call('HEXISTS', LEASES, 'ttl_us:' .. id) == 1 end

local function entry(path)
  local e = redis.call(
    'HMGET', ENTRIES, 'value:' .. path, 'revision:' .. path, 'version:' .. path, 'lease:' .. path
  )
  if not e[1] then return false end
  local row = {{path, e[1], e[2], e[3]}}
  if e[4] then
    local l, damaged = lease_row(e[4])
    if damaged then error('the lease ' .. e[4] .. ' of ' .. path .. ' is damaged') end
    if not l[2] then return false end
    row[5] = l
  end
  return row
end

local function entries(paths)
  local rows = {{}}
  for _, path in ipairs(paths) do
    local row = entry(path)
    if row then rows[#rows + 1] = row end
  end
  return rows
end

local function unbind(path)
  local id = redis.call('HGET', ENTRIES, 'lease:' .. path)
  if id then
    redis.call('ZREM', BOUND, id .. ' ' .. path)
    redis.call('HDEL', ENTRIES, 'lease:' .. path)
  end
end

local function write(path, value, revision, version, id)
  unbind(path)
  redis.call(
    'HSET', ENTRIES, 'value:' .. path, value, 'revision:' .. path, revision,
    'version:' .. path, version
  )
  if id then
    redis.call('HSET', ENTRIES, 'lease:' .. path, id)
    redis.call('ZADD', BOUND, 0, id .. ' ' .. path)
  end
  redis.call('ZADD', INDEX, 0, path)
  notify(path)
end

local function remove(path)
  unbind(path)
  redis.call('HDEL', ENTRIES, 'value:' .. path, 'revision:' .. path, 'version:' .. path)
  redis.call('ZREM', INDEX, path)
  notify(path)
end

local function create(path, value, id)
  if not exists(id) then return {{0, 0}} end
  local present = entry(path)
  if present then return {{1, 0, present}} end
  local n = number()
  write(path, value, n, n, id)
  return {{1, 1, entry(path)}}
end

local function last_two(after, upto)
  return entries(redis.call('ZREVRANGEBYLEX', INDEX, upto, after, 'LIMIT', 0, 2))
end

local function finish(id)
  number()
  -- The character after the space is the exclamation mark.
  for _, bound in ipairs(redis.call('ZRANGEBYLEX', BOUND, '[' .. id .. ' ', '(' .. id .. '!')) do
    remove(string.sub(bound, #id + 2))
  end
  redis.call('HDEL', LEASES, 'ttl_us:' .. id, 'counter:' .. id, 'renewed_us:' .. id)
  redis.call('ZREM', DUE, id)
end

local function renewed(id, ttl_us)
  local at = now()
  redis.call('HSET', LEASES, 'renewed_us:' .. id, int(at))
  redis.call('ZADD', DUE, int(at + ttl_us), id)
end
"""

_BODIES = {
    # Uses every command that the scripts use, without leaving a trace. A missing permission thus
    # shows here, and cannot interrupt a script halfway. Data of another layout is not touched.
    "try": """
local layout = redis.call('HGET', META, 'layout')
if layout ~= ARGV[3] then return layout end
redis.call('HSET', LEASES, 'trial', '1'); redis.call('HINCRBY', LEASES, 'trial', 1)
redis.call('HMGET', LEASES, 'trial'); redis.call('HGET', ENTRIES, 'trial')
redis.call('HEXISTS', LEASES, 'trial'); redis.call('HDEL', LEASES, 'trial')
redis.call('ZADD', BOUND, 0, 'trial'); redis.call('ZREM', BOUND, 'trial')
redis.call('ZRANGEBYSCORE', DUE, '-inf', '-inf'); redis.call('ZRANGEBYLEX', INDEX, '-', '(')
redis.call('ZREVRANGEBYLEX', INDEX, '(', '-')
redis.call('PUBLISH', P .. 'at:', '')
return layout
""",
    "raise": """
local last = tonumber(redis.call('HGET', META, 'revision') or 0)
if last < tonumber(ARGV[3]) then
  redis.call('HSET', META, 'revision', ARGV[3])
  number()
end
""",
    "grant": """
redis.call('HSET', LEASES, 'ttl_us:' .. ARGV[3], ARGV[4], 'counter:' .. ARGV[3], '0')
renewed(ARGV[3], ARGV[4])
""",
    "renew": """
local ttl_us = redis.call('HGET', LEASES, 'ttl_us:' .. ARGV[3])
if not ttl_us then return {} end
redis.call('HINCRBY', LEASES, 'counter:' .. ARGV[3], 1)
renewed(ARGV[3], ttl_us)
return lease_row(ARGV[3])
""",
    "revoke": "finish(ARGV[3])",
    # RUN is the server that runs this. Its counter proves nothing about another server's renewals.
    "expire": """
if RUN ~= ARGV[5] then return 0 end
if redis.call('HGET', LEASES, 'counter:' .. ARGV[3]) ~= ARGV[4] then return 0 end
finish(ARGV[3])
return 1
""",
    "create": "return create(ARGV[3], ARGV[4], ARGV[5])",
    # A damaged entry is an error, which would not undo the creation, so the reads are first.
    "create and look": """
local line, other = last_two(ARGV[6], ARGV[7]), entries({ARGV[8]})
return {create(ARGV[3], ARGV[4], ARGV[5]), line, other}
""",
    "put": """
local present = entry(ARGV[3])
local version = present and present[4] or ''
if version ~= ARGV[5] then return {0, present} end
local n = number()
write(ARGV[3], ARGV[4], present and present[3] or n, n)
return {1, entry(ARGV[3])}
""",
    "update": """
local present = entry(ARGV[3])
if not present or not present[5] or present[4] ~= ARGV[5] then return {} end
write(ARGV[3], ARGV[4], present[3], number(), present[5][1])
return {entry(ARGV[3])}
""",
    "delete": """
local done = {}
for i = 3, #ARGV, 2 do
  local path, version = ARGV[i], ARGV[i + 1]
  local present = entry(path)
  local same = present and (version == '' or version == present[4])
  if same then
    number()
    remove(path)
  end
  done[#done + 1] = same and 1 or 0
end
return done
""",
    "enqueue": """
if not exists(ARGV[5]) then return {} end
local n = number()
local path = ARGV[3] .. string.rep('0', 20 - #n) .. n
write(path, ARGV[4], n, n, ARGV[5])
return {entry(path)}
""",
    "get": "return entries({ARGV[3]})",
    "list": "return entries(redis.call('ZRANGEBYLEX', INDEX, ARGV[3], ARGV[4]))",
    "first": """
local paths = redis.call('ZRANGEBYLEX', INDEX, ARGV[3], ARGV[4], 'LIMIT', 0, 1)
return entries(paths)
""",
    "last two": "return last_two(ARGV[3], ARGV[4])",
    "look": """
local rows = {}
for i = 3, #ARGV do rows[#rows + 1] = lease_row(ARGV[i]) end
return rows
""",
    # Elements without a lease, or with a damaged one, are removed, so that they do not block the
    # others. A renewal of such a lease adds it again.
    "stale": f"""
local due, at = {{}}, int(now())
for _ = 1, {_LOOKED_AT} do
  local ids = redis.call('ZRANGEBYSCORE', DUE, '-inf', at, 'LIMIT', #due, {_SWEPT})
  for _, id in ipairs(ids) do
    if lease_row(id)[2] then due[#due + 1] = id else redis.call('ZREM', DUE, id) end
  end
  if #due >= {_SWEPT} or #ids < {_SWEPT} then break end
end
return due
""",
    "position": "return redis.call('HGET', META, 'revision') or '0'",
    # For each scope and owner: the number of entries and their highest version.
    "survey": """
local surveys = {}
for i = 3, #ARGV do
  local first, last = '[' .. ARGV[i] .. '/', '(' .. ARGV[i] .. '0'
  local paths = redis.call('ZRANGEBYLEX', INDEX, first, last)
  paths[#paths + 1] = ARGV[i]
  local rows, at = {}, {}
  for _, path in ipairs(paths) do
    local e = redis.call('HMGET', ENTRIES, 'version:' .. path, 'lease:' .. path)
    local id = e[2] or ''
    if e[1] and at[id] == nil then
      at[id] = (id == '' or lease_row(id)[2]) and {id, 0, '0'} or false
      if at[id] then rows[#rows + 1] = at[id] end
    end
    local row = e[1] and at[id]
    if row then
      row[2] = row[2] + 1
      -- A damaged version must not hide the other entries.
      if (tonumber(e[1]) or 0) > tonumber(row[3]) then row[3] = e[1] end
    end
  end
  surveys[#surveys + 1] = rows
end
return surveys
""",
}

SCRIPTS = {name: f"{_PRELUDE}\n{body.strip()}\n" for name, body in _BODIES.items()}
