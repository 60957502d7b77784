"""What is done at the server, each as one script and so in one step.

    {prefix}:meta        revision (the counter of all changes), run (of the server that last
                         counted), layout
    {prefix}:lease:<id>  ttl_us, counter, renewed_us: a lease; it has ended when this is gone
    {prefix}:keys:<id>   the paths bound to it
    {prefix}:leases      all leases, by when they would end if nobody renewed them
    {prefix}:entry:<path>  value, revision, version, lease
    {prefix}:index       all paths, in the order of their bytes; tickets sort as their line
    {prefix}:at:<path>   the channel that tells of changes at a path or under it

The prefix is a hash tag, so in a cluster everything lies in one slot. Nothing has a time to live
of its own: a server's clock alone never ends anything.

Revisions are what tokens are made of. Each is above the one before, never below the server's
microseconds, and a server that was not the last to count leaves a gap of more than an hour's
microseconds: one that was promoted, or started again, without the last writes of the one before
stays above the tokens which that one has given.

Numbers in Lua are exact up to 2**53, which microseconds reach in the year 2255. Imports nothing.
"""

from __future__ import annotations

__all__ = ["LARGEST", "LAYOUT", "SCRIPTS"]

LAYOUT = 1
LARGEST = 1 << 53
_SWEPT = 64
"""How many leases that look over are followed up when a store is opened."""

_PRELUDE = """
local P, RUN = ARGV[1], ARGV[2]
local GAP = 4294967296

local function int(n) return string.format('%.0f', n) end

local function now()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end

local function number()
  local last = redis.call('HMGET', P .. 'meta', 'revision', 'run')
  local n = tonumber(last[1] or 0) + 1
  if last[2] and last[2] ~= RUN then n = n + GAP end
  n = int(math.max(n, now()))
  redis.call('HSET', P .. 'meta', 'revision', n, 'run', RUN)
  return n
end

local function tell(path)
  while path do
    redis.call('PUBLISH', P .. 'at:' .. path, '')
    path = string.match(path, '^(.+)/[^/]*$')
  end
end

local function lease_row(id)
  local l = redis.call('HMGET', P .. 'lease:' .. id, 'ttl_us', 'counter', 'renewed_us')
  if not l[1] then return {id} end
  return {id, l[1], l[2], int(now() - l[3])}
end

local function lives(id) return redis.call('EXISTS', P .. 'lease:' .. id) == 1 end

local function entry(path)
  local e = redis.call('HMGET', P .. 'entry:' .. path, 'value', 'revision', 'version', 'lease')
  if not e[1] then return false end
  local row = {path, e[1], e[2], e[3]}
  if e[4] then
    local l = lease_row(e[4])
    if not l[2] then return false end
    row[5] = l
  end
  return row
end

local function entries(paths)
  local rows = {}
  for _, path in ipairs(paths) do
    local row = entry(path)
    if row then rows[#rows + 1] = row end
  end
  return rows
end

local function unbind(path)
  local id = redis.call('HGET', P .. 'entry:' .. path, 'lease')
  if id then
    redis.call('SREM', P .. 'keys:' .. id, path)
    redis.call('HDEL', P .. 'entry:' .. path, 'lease')
  end
end

local function write(path, value, revision, version, id)
  unbind(path)
  local key = P .. 'entry:' .. path
  redis.call('HSET', key, 'value', value, 'revision', revision, 'version', version)
  if id then
    redis.call('HSET', key, 'lease', id)
    redis.call('SADD', P .. 'keys:' .. id, path)
  end
  redis.call('ZADD', P .. 'index', 0, path)
  tell(path)
end

local function remove(path)
  unbind(path)
  redis.call('DEL', P .. 'entry:' .. path)
  redis.call('ZREM', P .. 'index', path)
  tell(path)
end

local function finish(id)
  number()
  for _, path in ipairs(redis.call('SMEMBERS', P .. 'keys:' .. id)) do remove(path) end
  redis.call('DEL', P .. 'lease:' .. id, P .. 'keys:' .. id)
  redis.call('ZREM', P .. 'leases', id)
end

local function renewed(id, ttl_us)
  local at = now()
  redis.call('HSET', P .. 'lease:' .. id, 'renewed_us', int(at))
  redis.call('ZADD', P .. 'leases', int(at + ttl_us), id)
end
"""

_BODIES = {
    # Does a little of everything, where it leaves nothing, so that what is not permitted is known
    # before it could interrupt a script that has done half of its work.
    "try": """
local key = P .. 'trial'
redis.call('HSET', key, 'a', '1'); redis.call('HINCRBY', key, 'a', 1)
redis.call('HMGET', key, 'a'); redis.call('HGET', key, 'a'); redis.call('HDEL', key, 'a')
redis.call('ZADD', key, 0, 'a'); redis.call('ZRANGEBYSCORE', key, '-inf', 0)
redis.call('ZRANGEBYLEX', key, '-', '+'); redis.call('ZREVRANGEBYLEX', key, '+', '-')
redis.call('ZREM', key, 'a')
redis.call('SADD', key, 'a'); redis.call('SMEMBERS', key); redis.call('SREM', key, 'a')
redis.call('EXISTS', key); redis.call('DEL', key)
redis.call('PUBLISH', P .. 'at:', '')
local layout = redis.call('HGET', P .. 'meta', 'layout')
if not layout then redis.call('HSET', P .. 'meta', 'layout', ARGV[3]) end
return layout or ARGV[3]
""",
    "raise": """
local last = tonumber(redis.call('HGET', P .. 'meta', 'revision') or 0)
if last < tonumber(ARGV[3]) then redis.call('HSET', P .. 'meta', 'revision', ARGV[3]) end
""",
    "grant": """
redis.call('HSET', P .. 'lease:' .. ARGV[3], 'ttl_us', ARGV[4], 'counter', '0')
renewed(ARGV[3], ARGV[4])
""",
    "renew": """
local ttl_us = redis.call('HGET', P .. 'lease:' .. ARGV[3], 'ttl_us')
if not ttl_us then return {} end
redis.call('HINCRBY', P .. 'lease:' .. ARGV[3], 'counter', 1)
renewed(ARGV[3], ttl_us)
return lease_row(ARGV[3])
""",
    "revoke": "finish(ARGV[3])",
    "seal": """
if redis.call('HGET', P .. 'lease:' .. ARGV[3], 'counter') ~= ARGV[4] then return 0 end
finish(ARGV[3])
return 1
""",
    "create": """
if not lives(ARGV[5]) then return {0, 0} end
local standing = entry(ARGV[3])
if standing then return {1, 0, standing} end
local n = number()
write(ARGV[3], ARGV[4], n, n, ARGV[5])
return {1, 1, entry(ARGV[3])}
""",
    "put": """
local standing = entry(ARGV[3])
local version = standing and standing[4] or ''
if version ~= ARGV[5] then return {0, standing} end
local n = number()
write(ARGV[3], ARGV[4], standing and standing[3] or n, n)
return {1, entry(ARGV[3])}
""",
    "delete": """
local standing = entry(ARGV[3])
if not standing or (ARGV[4] ~= '' and ARGV[4] ~= standing[4]) then return 0 end
number()
remove(ARGV[3])
return 1
""",
    "enqueue": """
if not lives(ARGV[5]) then return {} end
local n = number()
local path = ARGV[3] .. string.rep('0', 20 - #n) .. n
write(path, ARGV[4], n, n, ARGV[5])
return {entry(path)}
""",
    "get": "return entries({ARGV[3]})",
    "list": "return entries(redis.call('ZRANGEBYLEX', P .. 'index', ARGV[3], ARGV[4]))",
    "first": """
local paths = redis.call('ZRANGEBYLEX', P .. 'index', ARGV[3], ARGV[4], 'LIMIT', 0, 1)
return entries(paths)
""",
    "last two": """
local paths = redis.call('ZREVRANGEBYLEX', P .. 'index', ARGV[4], ARGV[3], 'LIMIT', 0, 2)
return entries(paths)
""",
    "look": """
local rows = {}
for i = 3, #ARGV do rows[#rows + 1] = lease_row(ARGV[i]) end
return rows
""",
    "stale": f"""
return redis.call('ZRANGEBYSCORE', P .. 'leases', '-inf', int(now()), 'LIMIT', 0, {_SWEPT})
""",
    "position": "return redis.call('HGET', P .. 'meta', 'revision') or '0'",
    # By scope and owner: how much stands there, and the latest version of it.
    "survey": """
local surveys = {}
for i = 3, #ARGV do
  local first, last = '[' .. ARGV[i] .. '/', '(' .. ARGV[i] .. '0'
  local paths = redis.call('ZRANGEBYLEX', P .. 'index', first, last)
  paths[#paths + 1] = ARGV[i]
  local rows, at = {}, {}
  for _, path in ipairs(paths) do
    local e = redis.call('HMGET', P .. 'entry:' .. path, 'version', 'lease')
    if e[1] then
      local id = e[2] or ''
      if not at[id] then
        rows[#rows + 1] = {id, 0, '0'}
        at[id] = rows[#rows]
      end
      local row = at[id]
      row[2] = row[2] + 1
      if tonumber(e[1]) > tonumber(row[3]) then row[3] = e[1] end
    end
  end
  surveys[#surveys + 1] = rows
end
return surveys
""",
}

SCRIPTS = {name: f"{_PRELUDE}\n{body.strip()}\n" for name, body in _BODIES.items()}
